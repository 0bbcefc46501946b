"""Tensors that ranks hold beside their models are equal when a run begins, or the run does not begin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import lockstep as ls
from tests.support.ranks import run_on_ranks
from tests.support.small_updater import mean_of_output, updater_of

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


class Holding(nn.Module):
    """Holds what is not registered."""

    def __init__(self, **held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        vars(self).update(held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def frozen() -> nn.Module:
    return nn.Linear(3, 3).requires_grad_(False)


def compared_with(network: nn.Module) -> Any:
    return lambda model, x: (model(x) - network(x)).square().mean()


def times(factor: torch.Tensor) -> Any:
    return lambda model, x: (model(x) * factor).mean()


CASES: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], str]] = {
    "an attribute": (lambda: (Holding(noise=torch.randn(3)), mean_of_output), "Holding.noise"),
    "a single number": (lambda: (Holding(noise=torch.randn(())), mean_of_output), "tensor 0 of shape ()"),
    "integers": (lambda: (Holding(order=torch.randperm(50)), mean_of_output), "tensor 0 of shape (50,)"),
    "a list": (lambda: (Holding(held=[torch.randn(3)]), mean_of_output), "Holding.held[0]"),
    "a network in a list": (lambda: (Holding(held=[frozen()]), mean_of_output), "Holding.held[0].weight"),
    "a network in a closure": (lambda: (Holding(), compared_with(frozen())), "network.weight"),
    "a tensor in a closure": (lambda: (Holding(), times(torch.rand(3))), "factor"),
    "a registered network": (lambda: (Holding(), mean_of_output), ""),
    "a tensor without values": (lambda: (Holding(held=[FakeTensorMode().from_tensor(X)]), mean_of_output), ""),
}


def outcomes(communicator: ls.Communicator, *, seeded: bool) -> dict[str, str]:
    found = {}
    for case, (build, _) in CASES.items():
        # What one process after another draws without a seed.
        torch.manual_seed(0 if seeded else communicator.rank)
        model, loss_fn = build()
        with updater_of(model, X, num_shards=2, loss_fn=loss_fn, communicator=communicator) as updater:
            try:
                found[case] = "trained" if updater.update().applied else "not applied"
            except ls.DisagreementError as error:
                found[case] = str(error)
    return found


def without_seed(communicator: ls.Communicator) -> dict[str, str]:
    return outcomes(communicator, seeded=False)


def with_seed(communicator: ls.Communicator) -> dict[str, str]:
    return outcomes(communicator, seeded=True)


@pytest.fixture(scope="module")
def found() -> list[dict[str, str]]:
    return run_on_ranks(without_seed, 2)


@pytest.mark.parametrize("case", CASES)
def test_tensors_that_differ_are_named_on_every_rank(found: list[dict[str, str]], case: str) -> None:
    name = CASES[case][1]
    for texts in found:
        assert texts[case].startswith(
            f"Rank 1 must have rank 0's tensors beside its parameters and buffers, but on it {name}"
            if name
            else "trained"
        )


def test_with_a_seed_every_one_of_them_is_trained() -> None:
    assert run_on_ranks(with_seed, 2) == [dict.fromkeys(CASES, "trained")] * 2
