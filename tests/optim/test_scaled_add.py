"""Sums with a factor, whose bits do not depend on threads and cuts."""

from __future__ import annotations

import pytest
import torch

from lockstep.optim.momentum import add_scaled_

SIZE = 100_003
HALVES = [torch.bfloat16, torch.float16]


def numbers(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a target and a source."""
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, SIZE, generator=generator, dtype=torch.float32).to(dtype).unbind()
    return first, second


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_threads_and_cuts_change_no_bit(dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            target, source = numbers(dtype)
            add_scaled_([target], [source], -0.1)
            found.append(target)
    finally:
        torch.set_num_threads(before)
    target, source = numbers(dtype)
    add_scaled_(list(target.split(13)), list(source.split(13)), -0.1)
    assert all(torch.equal(target, each) for each in found)


@pytest.mark.parametrize("dtype", HALVES)
def test_halves_are_added_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    target, source = numbers(dtype)
    exact = (target.float() + -0.1 * source.float()).to(dtype)
    wide = torch.ones(3)
    add_scaled_([target, wide], [source, torch.ones(3)], -0.1)
    assert torch.equal(target, exact)
    assert wide.tolist() == torch.tensor([0.9] * 3).tolist()


@pytest.mark.parametrize("dtype", HALVES)
def test_the_law_is_not_empty(dtype: torch.dtype) -> None:
    target, source = numbers(dtype)
    cut = target.clone()
    target.add_(source, alpha=-0.1)
    for part, other in zip(cut.split(13), source.split(13), strict=True):
        part.add_(other, alpha=-0.1)
    assert not torch.equal(target, cut)
