"""What rounding on the way costs: never more than stated, and nothing to what is not finite."""

from __future__ import annotations

import pytest
import torch

from lockstep.communicators.sums.wire import (
    BFLOAT16,
    EXACT,
    FLOAT16,
    WireFormat,
    wire_format,
)


def travel(wire: WireFormat, tensor: torch.Tensor) -> torch.Tensor:
    """Send a tensor from here to here."""
    message = wire.encode(tensor)
    arrived = torch.empty_like(tensor)
    received = wire.receive_buffer(arrived)
    received.copy_(message)  # the transport
    wire.decode(received, arrived)
    return arrived


def numbers(dtype: torch.dtype, exponent: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(exponent)
    values = torch.randn(2000, generator=generator, dtype=torch.float64)
    return (values * 2.0**exponent).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-100, -30, 0, 30, 100])
def test_bfloat16_keeps_the_range_and_eight_bits(dtype: torch.dtype, exponent: int) -> None:
    values = numbers(dtype, exponent)
    assert bool(((travel(BFLOAT16, values) - values).abs() <= 2.0**-8 * values.abs()).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-100, -30, 0, 30, 100])
def test_float16_keeps_eleven_bits_at_any_scale(dtype: torch.dtype, exponent: int) -> None:
    values = numbers(dtype, exponent)
    bound = 2.0**-11 * values.abs() + 2.0**-39 * values.abs().max()
    assert bool(((travel(FLOAT16, values) - values).abs() <= bound).all())


def test_without_its_scale_float16_would_lose_small_gradients() -> None:
    values = numbers(torch.float32, -30)
    assert values.half().abs().max() == 0.0
    assert travel(FLOAT16, values).abs().max() > 0.0


@pytest.mark.parametrize("wire", [EXACT, BFLOAT16, FLOAT16])
def test_what_is_not_finite_arrives_so_and_zeros_stay_zeros(wire: WireFormat) -> None:
    arrived = travel(wire, torch.tensor([1.0, torch.inf, -torch.inf, torch.nan]))
    assert arrived.isfinite().tolist() == [True, False, False, False]
    assert travel(wire, torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("wire", [EXACT, BFLOAT16, FLOAT16])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.float16])
def test_what_is_short_or_counts_travels_as_it_is(wire: WireFormat, dtype: torch.dtype) -> None:
    values = torch.arange(7).to(dtype)
    assert wire.encode(values) is values
    assert wire.receive_buffer(values) is values


def test_only_these_formats_have_names() -> None:
    with pytest.raises(ValueError, match="`compression` must be None, 'bf16' or 'fp16', got 'int8'"):
        wire_format("int8")
