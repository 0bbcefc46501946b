"""Gradients in one tensor: the same bits, each parameter's a view."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls


class Half(nn.Module):
    """A model with a parameter that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def train(devices: int, **options: Any) -> tuple[str, Half, ls.ParallelUpdater]:
    torch.manual_seed(0)
    model = Half()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batches = [(torch.randn(7, 5), torch.randn(7, 3)) for _ in range(3)]
    loss_fn = ls.supervised(nn.functional.mse_loss)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=devices, num_shards=3, loss_fn=loss_fn, **options)
    for _ in range(5):
        updater.update()
    updater.finalize()
    return ls.digest(model, optimizer), model, updater


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_one_tensor_changes_no_bit(devices: int) -> None:
    assert train(devices, flat_gradients=True)[0] == train(1)[0]


def test_each_gradient_is_an_aligned_view_and_an_absent_one_stays_absent() -> None:
    _, model, updater = train(2, flat_gradients=True)
    flat = updater.flat_gradients
    gradients = [parameter.grad for parameter in model.used.parameters()]
    starts = [(gradient.data_ptr() - flat.data_ptr()) // flat.element_size() for gradient in gradients]
    assert all(start % 64 == 0 for start in starts)
    assert all(a < b for a, b in pairwise(starts))
    assert [parameter.grad for parameter in model.unused.parameters()] == [None, None]
    assert flat.count_nonzero() == sum(gradient.count_nonzero() for gradient in gradients)


def test_without_asking_there_is_none() -> None:
    assert train(1)[2].flat_gradients is None


def test_several_dtypes_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="`flat_gradients` must be False for parameters of several dtypes"):
        ls.ParallelUpdater([torch.ones(1, 2)], optimizer, model, flat_gradients=True)


def test_steps_of_ones_own_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="`flat_gradients` must be False with several optimizers or a step"):
        ls.ParallelUpdater(
            [torch.ones(1, 2)],
            torch.optim.SGD(model.parameters()),
            model,
            step_fn=lambda *_: None,
            flat_gradients=True,
        )
