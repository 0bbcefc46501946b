"""Shapes of outputs before the first forward, and shapes that no forward could take, without a trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import lockstep as ls

TWO = ["cpu", "cpu"]
Shapes = list[tuple[str, tuple[int, ...]]]


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        scores = self.layer(x)
        if target is None:
            return {"scores": scores}
        return {"loss": nn.functional.cross_entropy(scores, target), "scores": scores}


class Looking(nn.Module):
    """Looks at values, draws random numbers of three kinds, and counts in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(nn.functional.dropout(self.layer(x), 0.5))
        drawn = random.random() + np.random.rand()  # noqa: S311 - not for secrets, and of the global generator
        return y.cumsum(0) if drawn + y.mean().item() > 5 else y[:, :2]


class Nested(nn.Module):
    def forward(self, pair: Any, extra: Any) -> Any:
        first, second = pair
        return [first + second, extra["mask"] * first]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


def embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))


KNOWN: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Shapes]] = {
    "linear": (lambda: nn.Linear(5, 3), {"data": [("x", (7, 5))]}, [("output", (7, 3))]),
    "double": (lambda: nn.Linear(5, 3).double(), {"data": [("x", (7, 5))]}, [("output", (7, 3))]),
    "whole numbers": (embedding, {"data": [("tokens", (6, 3))]}, [("output", (6, 2))]),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
        {"data": [("image", (4, 3, 8, 8))]},
        [("output", (4, 4, 6, 6))],
    ),
    "labels": (
        Loss,
        {"data": [("x", (6, 5))], "labels": [("target", (6,))]},
        [("loss", ()), ("scores", (6, 3))],
    ),
    "no labels": (Loss, {"data": [("x", (6, 5))]}, [("scores", (6, 3))]),
    "recurrent": (Recurrent, {"data": [("x", (6, 9, 4))]}, [("output", (6, 9, 2))]),
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.Linear(5, 3)),
        {"data": [("x", (6, 5))]},
        [("output", (6, 3))],
    ),
    "one sample in training": (
        lambda: nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)),
        {"data": [("x", (1, 5))]},
        [("output", (1, 3))],
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_shapes_are_known_before_the_first_forward(name: str) -> None:
    make, described, expected = KNOWN[name]
    model = make()
    calls: list[object] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    with ls.ReplicaGroup(model, TWO) as group:
        drawn = np.random.get_state()[2]
        before = ls.digest(model), torch.get_rng_state(), random.getstate(), model.training
        group.bind(**described)
        assert group.output_shapes() == expected
        assert (ls.digest(model), random.getstate(), model.training) == (before[0], *before[2:])
        assert torch.equal(torch.get_rng_state(), before[1])
        assert np.random.get_state()[2] == drawn
        assert not calls
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["linear", "labels", "recurrent", "whole numbers"])
def test_shapes_are_those_that_the_forward_gives(name: str) -> None:
    make, described, expected = KNOWN[name]
    with ls.ReplicaGroup(make(), TWO) as group:
        group.bind(**described)
        group.forward(batch_of(described))
        assert group.output_shapes() == expected


def batch_of(described: dict[str, Any]) -> Any:
    """Make zeros of the described shapes."""
    shapes = dict([*described["data"], *described.get("labels", [])])
    whole = {"tokens", "target"}
    return tuple(
        torch.zeros(shape, dtype=torch.long if path in whole else torch.float32) for path, shape in shapes.items()
    )


def test_reshape_changes_the_shapes_that_are_to_come() -> None:
    with ls.ReplicaGroup(nn.Linear(5, 3), TWO) as group:
        group.bind(data=[("x", (6, 5))])
        group.forward(torch.ones(6, 5))
        group.reshape(data=[("x", (4, 5))])
        assert group.output_shapes() == [("output", (4, 3))]


def test_without_bound_shapes_a_forward_comes_first() -> None:
    with (
        ls.ReplicaGroup(nn.Linear(5, 3), TWO) as group,
        pytest.raises(ls.OrderError, match="A forward must come first"),
    ):
        group.output_shapes()


class Picky(nn.Module):
    """Refuses values, which says nothing of shapes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not bool((x > 0).all()):
            raise ValueError("`x` must be above 0")
        return x


def test_what_depends_on_values_is_not_refused() -> None:
    with ls.ReplicaGroup(Picky(), TWO) as group:
        group.bind(data=[("x", (6, 5))])
        with pytest.raises(ls.OrderError, match="A forward must come first"):
            group.output_shapes()
        group.forward(torch.ones(6, 5))
        assert group.output_shapes() == [("output", (6, 5))]


UNKNOWN: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Any, Shapes]] = {
    "looking at values": (Looking, {"data": [("x", (6, 5))]}, torch.ones(6, 5), [("output", (6, 2))]),
    "nested": (
        Nested,
        {"data": [("pair[0]", (6, 5)), ("pair[1]", (6, 1)), ("extra['mask']", (6, 5))]},
        ((torch.ones(6, 5), torch.ones(6, 1)), {"mask": torch.ones(6, 5)}),
        [("output[0]", (6, 5)), ("output[1]", (6, 5))],
    ),
}


@pytest.mark.filterwarnings("ignore:The model draws from:lockstep.RandomStreamWarning")
@pytest.mark.parametrize("name", UNKNOWN)
def test_shapes_that_are_not_known_come_with_a_forward(name: str) -> None:
    make, described, batch, expected = UNKNOWN[name]
    with ls.ReplicaGroup(make(), TWO) as group:
        before = torch.get_rng_state(), random.getstate()
        group.bind(**described)
        with pytest.raises(ls.OrderError, match="A forward must come first"):
            group.output_shapes()
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        group.forward(batch)
        assert group.output_shapes() == expected


def test_a_model_with_devices_of_its_own_is_asked_nothing() -> None:
    with ls.ReplicaGroup(ls.DataParallel(nn.Linear(5, 3), ["cpu"] * 2), TWO) as group:
        group.bind(data=[("x", (6, 4))])
        with pytest.raises(ls.OrderError, match="A forward must come first"):
            group.output_shapes()


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (lambda: nn.Linear(5, 3), (6, 4), r"`x` must have a shape .* got x \(6, 4\): RuntimeError"),
        (embedding, (6, 2), r"`x` must have a shape .* got x \(6, 2\): RuntimeError: .*8.*12"),
        (Looking, (6, 4), r"`x` must have a shape .* got x \(6, 4\): RuntimeError"),
    ],
)
def test_shapes_the_model_cannot_take_are_refused_at_bind(
    make: Callable[[], nn.Module], shape: tuple[int, ...], message: str
) -> None:
    with ls.ReplicaGroup(make(), TWO) as group:
        with pytest.raises(ValueError, match=message):
            group.bind(data=[("x", shape)])
        with pytest.raises(ls.OrderError, match="reshape must follow bind"):
            group.reshape(data=[("x", shape)])


def test_a_refused_reshape_changes_nothing() -> None:
    model = Loss()
    with ls.ReplicaGroup(model, TWO) as group:
        group.bind(data=[("x", (6, 5))], labels=[("target", (6,))])
        out = group.forward((torch.ones(6, 5), torch.zeros(6, dtype=torch.long)))
        group.backward()
        before = ls.digest(model, [parameter.grad for parameter in model.parameters()])
        with pytest.raises(ValueError, match=r"^`x` must have a shape .* got x \(4, 9\)"):
            group.reshape(data=[("x", (4, 9))], labels=[("target", (4,))])
        assert group.batch_size == 6
        assert torch.equal(group.outputs()[1], out["scores"])
        assert ls.digest(model, [parameter.grad for parameter in model.parameters()]) == before
