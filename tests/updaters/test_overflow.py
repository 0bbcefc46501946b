"""What follows a gradient that is not finite: a table of rules, and never a NaN in the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.backward import in_backward
from tests.support.small_updater import updater_of


class Overflowing:
    """A loss whose gradient is infinite above a loss scale, for the batches that say so.

    A batch is one number a sample: the exponent of the largest loss scale it bears.
    """

    def __init__(self) -> None:
        self.scales: list[float] = []

    def __call__(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        bound = 2.0 ** x.min().item()

        def bounded(grad: torch.Tensor) -> torch.Tensor:
            # The single shard of a batch of one sample: the gradient is the loss scale.
            self.scales.append(grad.item())
            return grad if grad.item() <= bound else grad * float("inf")

        return in_backward(model(torch.ones_like(x)).mean(), bounded)


@dataclass(frozen=True)
class Case:
    """One run: what batches bear, the rules, and what every update shall come to."""

    bears: list[float]
    scale: Callable[[], Any]
    options: dict[str, Any]
    outcomes: list[tuple[bool, int, float]]
    """For each update: applied, tries, the loss scale of the last."""
    batches_left: int = 0
    after: float | None = None
    """The loss scale that a next update would try first."""
    raises: bool = field(default=False)


def dynamic(**options: Any) -> Callable[[], Any]:
    return lambda: ls.DynamicLossScale(factor=8.0, **options)


CASES = {
    "nothing overflows": Case([9, 9], dynamic(), {}, [(True, 1, 8.0), (True, 1, 8.0)], after=8.0),
    "growth": Case([9, 9, 9], dynamic(interval=2), {}, [(True, 1, 8.0), (True, 1, 8.0), (True, 1, 16.0)]),
    "retry": Case([1, 9], dynamic(), {}, [(True, 3, 2.0), (True, 1, 2.0)], after=2.0),
    "retry steps down faster": Case([0], dynamic(backoff=0.125), {}, [(True, 2, 1.0)]),
    "tries run out": Case([-9, 9], dynamic(), {"max_tries": 3}, [(False, 3, 2.0), (True, 1, 1.0)], after=1.0),
    "tries run out and raise": Case(
        [-9], dynamic(), {"max_tries": 3, "on_exhausted": "raise"}, [], batches_left=1, after=8.0, raises=True
    ),
    "the floor": Case([-99], dynamic(minimum=4.0), {}, [(False, 2, 4.0)], after=4.0),
    "the floor raises": Case(
        [-99], dynamic(minimum=4.0), {"on_exhausted": "raise"}, [], batches_left=1, after=8.0, raises=True
    ),
    "skip": Case([1, 9], dynamic(), {"on_overflow": "skip"}, [(False, 1, 8.0), (True, 1, 4.0)], after=4.0),
    "next": Case([1, 1, 9, 9], dynamic(), {"on_overflow": "next"}, [(True, 3, 2.0), (True, 1, 2.0)], after=2.0),
    "next at the end of the batches": Case(
        [9, 1, 0], dynamic(), {"on_overflow": "next"}, [(True, 1, 8.0), (False, 2, 4.0)], after=2.0
    ),
    "next until tries run out": Case(
        [-9, -9, 9], dynamic(), {"on_overflow": "next", "max_tries": 2}, [(False, 2, 4.0), (True, 1, 2.0)]
    ),
    "next raises": Case(
        [-9, -9, 9],
        dynamic(),
        {"on_overflow": "next", "max_tries": 2, "on_exhausted": "raise"},
        [],
        batches_left=3,
        after=8.0,
        raises=True,
    ),
    "a static scale has no second try": Case([1, 9], lambda: 4.0, {}, [(False, 1, 4.0), (True, 1, 4.0)], after=4.0),
    "no scale has no second try": Case([-1, 0], lambda: None, {}, [(False, 1, 1.0), (True, 1, 1.0)]),
    "the ramp": Case(
        [3, 3, 3, 3, 3],
        ls.RampLossScale,
        {},
        [(True, 1, 1.0), (True, 1, 2.0), (True, 1, 4.0), (True, 1, 8.0), (True, 2, 8.0)],
        after=8.0 * 2.0 ** (1 / 1000),
    ),
}


def run(case: Case, devices: int) -> tuple[str, list[tuple[bool, int, float]], ls.ParallelUpdater, list[float]]:
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.fill_(0.25)
    loss_fn = Overflowing()
    batches = ls.BatchIterator([torch.tensor([float(bear)]) for bear in case.bears], 1, repeat=False)
    outcomes = []
    updater = ls.ParallelUpdater(
        batches,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5),
        model,
        devices=["cpu"] * devices,
        loss_fn=loss_fn,
        loss_scale=case.scale(),
        audit_every=0,
        **case.options,
    )
    try:
        for _ in case.outcomes:
            result = updater.update()
            outcomes.append((result.applied, result.tries, result.loss_scale))
            assert (result.nonfinite is None) == (result.applied and result.tries == 1)
            assert result.nonfinite in {None, "weight"}
            assert all(parameter.isfinite().all() for parameter in model.parameters())
        if case.raises:
            with pytest.raises(ls.NonFiniteError, match=r"The gradient of 'weight' is not finite after") as caught:
                updater.update()
            assert caught.value.parameter == "weight"
            assert caught.value.tries == len(loss_fn.scales)
    finally:
        updater.finalize()
    return ls.digest(model, updater.get_optimizer("main")), outcomes, updater, loss_fn.scales


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_what_follows_an_overflow(name: str, devices: int) -> None:
    case = CASES[name]
    digest, outcomes, updater, scales = run(case, devices)
    assert outcomes == case.outcomes
    left = list(updater.get_iterator())
    assert len(left) == case.batches_left
    assert updater.iteration == len(case.outcomes)
    assert updater.applied_updates == sum(applied for applied, _, _ in outcomes)
    if case.after is not None:
        assert updater.loss_scale.factor == case.after
    if not case.raises:
        assert len(scales) == sum(tries for _, tries, _ in outcomes)
    # Steps of a gradient of 1 in both parameters, whatever the scale: the same state as without overflows.
    applied = updater.applied_updates
    calm = Case([99.0] * max(applied, 1), lambda: None, {}, [(True, 1, 1.0)] * applied)
    assert digest == run(calm, 1)[0]


def test_batches_given_up_for_the_next_count_for_epochs() -> None:
    """The batch that ends the epoch is given up; a trigger still finds the epoch's end in this update."""
    model = nn.Linear(1, 1)
    samples = [torch.tensor([bear]) for bear in (99.0, 1.0, 99.0)]
    updater = ls.ParallelUpdater(
        ls.BatchIterator([samples[0], samples[1]], 1),
        torch.optim.SGD(model.parameters(), lr=0.5),
        model,
        devices=["cpu"],
        loss_fn=Overflowing(),
        loss_scale=ls.DynamicLossScale(factor=8.0),
        on_overflow="next",
    )
    updater.update()
    assert (updater.epoch_detail, updater.is_new_epoch) == (0.5, False)
    updater.update()
    assert (updater.previous_epoch_detail, updater.epoch_detail) == (0.5, 1.5)
    assert updater.is_new_epoch


def test_a_failure_after_batches_were_given_up_takes_them_back() -> None:
    model = nn.Linear(1, 1)
    overflowing = Overflowing()

    def loss_fn(replica: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if x.item() == 7.0:
            raise RuntimeError("seven")
        return overflowing(replica, x)

    with updater_of(
        model,
        torch.tensor([[1.0], [7.0]]),
        batch_size=1,
        loss_fn=loss_fn,
        loss_scale=ls.DynamicLossScale(factor=8.0),
        on_overflow="next",
    ) as updater:
        before = ls.digest(updater.state_dict())
        with pytest.raises(ls.ReplicaError, match="seven"):
            updater.update()
        assert ls.digest(updater.state_dict()) == before


@pytest.mark.parametrize("devices", [1, 2])
def test_the_half_way_steps_the_scale_down_and_moves_nothing(devices: int) -> None:
    model = nn.Linear(1, 1)
    with updater_of(
        model, devices=devices, loss_fn=Overflowing(), loss_scale=ls.DynamicLossScale(factor=8.0)
    ) as updater:
        before = ls.digest(model)
        computed = updater.compute_gradients(torch.tensor([[1.0]]))
        assert computed.nonfinite == "weight"
        assert not updater.apply_gradients().applied
        assert updater.loss_scale.factor == 4.0
        assert ls.digest(model) == before


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_random_streams_and_buffers_are_those_of_the_first_try(devices: int) -> None:
    drawn: list[tuple[float, float]] = []
    overflowing = Overflowing()

    class Net(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.register_buffer("calls", torch.tensor(0.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            drawn.append((torch.rand(()).item(), self.calls.item()))
            return super().forward(x)

    model = Net()
    with updater_of(
        model,
        torch.tensor([[1.0]]),
        devices=devices,
        batch_size=1,
        loss_fn=overflowing,
        loss_scale=ls.DynamicLossScale(factor=8.0),
        audit_every=0,
    ) as updater:
        assert updater.update().tries == 3
    assert len(drawn) == 3
    assert len(set(drawn)) == 1
    assert model.calls.item() == 1.0
