"""Backward begins exactly, whatever the format of the loss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import lockstep as ls
from lockstep.precision import initial_gradient
from tests.support.small_updater import updater_of

HALVES = [torch.float16, torch.bfloat16]


@given(st.floats(2.0**-14, 2.0**15), st.sampled_from(HALVES), st.booleans())
def test_nothing_of_a_factor_is_lost(factor: float, dtype: torch.dtype, on_device: bool) -> None:
    loss = torch.zeros((), dtype=dtype)
    given_as = torch.tensor(factor, dtype=torch.float64) if on_device else factor
    first, rest = initial_gradient(loss, given_as)
    begins = 1.0 if first is None else first.item()
    multiplies = 1.0 if rest is None else float(rest)
    assert begins * multiplies == factor
    assert 1.0 <= multiplies < 2.0
    assert first is None or (first.dtype, first.shape) == (dtype, loss.shape)


def test_a_loss_in_full_precision_begins_with_the_factor_itself() -> None:
    first, rest = initial_gradient(torch.zeros(1), 257.0)
    assert (first.item(), first.shape, rest) == (257.0, (1,), None)
    assert initial_gradient(torch.zeros(()), 1.0) == (None, None)


def test_a_hook_that_changes_the_first_gradient_leaves_the_factor_alone() -> None:
    factor = torch.tensor(8.0, dtype=torch.float64)
    first, _ = initial_gradient(torch.zeros((), dtype=torch.float64), factor)
    assert first is not None
    first.mul_(2.0)
    assert (first.item(), factor.item()) == (16.0, 8.0)


def weighted(model: nn.Module, x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> ls.Loss:
    """Give a loss in some format; it and its gradient are the same number in all of them."""
    value = (model(x.new_ones(1)) * x.mean()).to(dtype)
    return ls.Loss(value.sum(), weight=weight.sum().item())


def gradient(dtype: torch.dtype, *, devices: int, num_shards: int, **options: object) -> torch.Tensor:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    x = torch.tensor([[1.0], [2.0], [4.0]])
    weights = torch.tensor([257.0, 1.0, 771.0])  # bfloat16 holds 8 bits, float16 holds 11
    with updater_of(
        model,
        x,
        weights,
        devices=devices,
        num_shards=num_shards,
        batch_size=3,
        loss_fn=lambda replica, x, weight: weighted(replica, x, weight, dtype),
        **options,
    ) as updater:
        updater.compute_gradients((x, weights))
        return model.weight.grad.clone()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("loss_scale", [None, 4.0])
@pytest.mark.parametrize("on_overflow", ["retry", "skip"])
def test_a_weight_that_the_format_of_the_loss_cannot_hold_is_not_rounded(
    dtype: torch.dtype, devices: int, loss_scale: float | None, on_overflow: str
) -> None:
    options = {"devices": devices, "num_shards": 3, "loss_scale": loss_scale, "on_overflow": on_overflow}
    ours = gradient(dtype, **options)
    assert torch.equal(ours, gradient(torch.float32, **options))
    assert ours.item() == torch.tensor((257.0 + 2.0 + 4 * 771.0) / (257 + 1 + 771)).item()
    # What the format makes of the weights would show: the law is not empty.
    held = torch.tensor([257.0, 1.0, 771.0]).to(dtype).float()
    as_held = ((held * torch.tensor([1.0, 2.0, 4.0])).sum() / 1029.0).item()
    assert (as_held != ours.item()) == (dtype == torch.bfloat16)
