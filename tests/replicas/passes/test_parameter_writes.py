"""A forward or a loss function that writes to parameters is refused, and leaves the weights as they were."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.replicas.passes import leaks

X, Y = torch.randn(12, 4, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
BATCHES = [(X, Y), (X.flip(0), Y.flip(0))]


class Scaled(nn.Module):
    """A model whose forward changes its scale by a function of the scale and the inputs."""

    def __init__(self, change: Callable[[nn.Parameter, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale, self.layer, self.change = nn.Parameter(torch.ones(1)), nn.Linear(4, 3), change
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_ready:
            self.change(self.scale, x)
            self.is_ready = True
        out: torch.Tensor = self.layer(x) * self.scale
        return out


def by_assignment(scale: nn.Parameter, x: torch.Tensor) -> None:
    scale.data = x.abs().mean().reshape(1)


def by_copy(scale: nn.Parameter, x: torch.Tensor) -> None:
    scale.data.copy_(x.abs().mean())


def without_gradient(scale: nn.Parameter, x: torch.Tensor) -> None:
    with torch.no_grad():
        scale.mul_(x.abs().mean())


def updater_of(model: Any, num_devices: int, loss_fn: Any = None, **options: Any) -> ls.ParallelUpdater:
    networks = model.values() if isinstance(model, dict) else [model]
    return ls.ParallelUpdater(
        lambda: iter(BATCHES),
        torch.optim.SGD([each for net in networks for each in net.parameters() if each.requires_grad], lr=0.1),
        model,
        devices=["cpu"] * num_devices,
        num_shards=3,
        loss_fn=loss_fn or ls.supervised(functional.cross_entropy),
        **options,
    )


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("change", [by_assignment, by_copy, without_gradient])
def test_a_forward_that_initializes_a_parameter_is_refused_and_changes_nothing(
    change: Callable[..., Any], num_devices: int
) -> None:
    model = Scaled(change)
    before = ls.digest(model)
    updater = updater_of(model, num_devices)
    try:
        with pytest.raises(ValueError, match=r"must not write to its parameters .* 'scale' has changed"):
            updater.update()
        assert (ls.digest(model), updater.iteration) == (before, 0)
        # The cure that the error names.
        model(X)
        for _ in range(4):
            updater.update()
    finally:
        updater.finalize()
    assert ls.digest(model) != before


def test_an_average_of_weights_in_the_loss_function_is_refused() -> None:
    nets = {"student": nn.Linear(4, 3), "teacher": nn.Linear(4, 3).requires_grad_(False)}

    def loss_fn(replicas: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for theirs, ours in zip(replicas["teacher"].parameters(), replicas["student"].parameters(), strict=True):
            theirs.data.lerp_(ours.data, 0.1)
        return functional.cross_entropy(replicas["student"](x), y)

    updater = updater_of(nets, 1, loss_fn)
    try:
        with pytest.raises(ValueError, match=r"'teacher\.weight' has changed"):
            updater.update()
    finally:
        updater.finalize()


def test_weights_that_are_not_numbers_have_not_changed() -> None:
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.bias.fill_(torch.nan)
    updater = updater_of(model, 1)
    try:
        with pytest.warns(ls.NonFiniteWarning):
            assert not updater.update().applied
    finally:
        updater.finalize()


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("change", [by_assignment, by_copy, without_gradient])
def test_a_large_model_is_refused_without_a_copy_of_it(
    change: Callable[..., Any], num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "MOST_COPIED", 10)
    updater = updater_of(Scaled(change), num_devices)
    try:
        with pytest.raises(ValueError, match=r"must not write to its parameters .* 'scale' has changed"):
            updater.update()
    finally:
        updater.finalize()


@pytest.mark.filterwarnings("ignore:`model` holds weights in torch.bfloat16")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_parameters_of_any_dtype_are_compared(dtype: torch.dtype) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, dtype=dtype))

    def loss_fn(replica: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # noqa: ARG001 - a batch of pairs
        return (replica.weight.abs() ** 2).sum().float()

    def writing(replica: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        replica.weight.data[1] = 2
        return loss_fn(replica, x, y)

    for each, is_refused in ((loss_fn, False), (writing, True)):
        updater = updater_of(model, 1, each)
        try:
            with pytest.raises(ValueError, match="'weight' has changed") if is_refused else nullcontext():
                updater.update()
        finally:
            updater.finalize()
