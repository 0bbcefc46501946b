"""A loss computed with the model itself, beside the replica, is refused: only replicas are summed."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.small_updater import updater_of

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Calling(nn.Module):
    """Keeps a function that calls the module it was made in, which no copy of the model can know."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.read = lambda x: self.head(x).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.body(x)).mean()


def with_penalty(model: nn.Module) -> Callable[..., Any]:
    """Bind the model of the script, as a loss function written beside it does."""
    return lambda replica, x: replica(x).mean() + sum(each.square().sum() for each in model.parameters())


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "penalty of the model itself": (lambda: nn.Linear(4, 1), with_penalty, "weight"),
    "a function kept in the model": (Calling, lambda _: None, "head.weight"),
    "the model alone": (lambda: nn.Linear(4, 1), lambda model: lambda _, x: model(x).mean(), "weight"),
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_past_the_replicas_is_refused_and_nothing_moves(case: str, devices: int) -> None:
    build, loss_of, name = CASES[case]
    model = build()
    with updater_of(model, X, devices=devices, num_shards=3, loss_fn=loss_of(model)) as updater:
        before = ls.digest(updater.state_dict())
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(f"also gives {name!r} of your original model")):
                updater.update()
            assert ls.digest(updater.state_dict()) == before
            assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_function_is_told_too_and_other_optimizers_keep_their_gradients() -> None:
    models = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.5) for name, each in models.items()}

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.compute_gradients(batch, loss_fn=lambda m, x: m["a"](x).mean(), optimizer="a")
        # The other network as it is, not its replica: a gradient for "b" alone is asked for.
        updater.compute_gradients(batch, loss_fn=lambda m, x: (m["b"](x) + models["b"](x)).mean(), optimizer="b")

    updater = ls.ParallelUpdater([X], optimizers, dict(models), devices=["cpu"], num_shards=2, step_fn=step)
    with pytest.raises(ValueError, match=re.escape("also gives 'b.weight' of your original model")):
        updater.update()
    assert models["a"].weight.grad is not None
