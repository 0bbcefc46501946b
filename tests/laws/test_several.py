"""The laws hold for several networks and updates of several computations."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from tests.support.faults import fail, interrupt
from tests.support.gan import PHASES, GanStep, gan, generator_loss, run, snapshot
from tests.support.runs import DAILY, UNEVEN, Placement, digests
from tests.support.workloads import Workload

UPDATES = 7
"""More than three epochs of the main iterator."""
FAULT_AT = 3


@pytest.fixture(scope="module")
def undisturbed() -> str:
    return run(gan(), UPDATES)


@DAILY
def test_devices_are_only_places_for_a_gan(placements: list[Placement]) -> None:
    found = {placement: run(gan(placement=placement), UPDATES) for placement in placements}
    assert len(set(found.values())) == 1, found
    assert run(gan(num_shards=6), UPDATES) not in found.values()


def test_devices_are_only_places_for_a_gan_in_low_precision_with_a_loss_scale() -> None:
    recipe: dict[str, Any] = {"precision": "bf16", "loss_scale": ls.DynamicLossScale(interval=3)}
    found = {placement: run(gan(placement=placement, **recipe), UPDATES) for placement in UNEVEN}
    assert len(set(found.values())) == 1, found


def test_a_gan_resumes_on_other_devices(undisturbed: str) -> None:
    first = gan(placement=Placement(2))
    run(first, FAULT_AT)
    resumed = gan(placement=Placement(3))
    resumed.load_state_dict(first.state_dict())
    assert run(resumed, UPDATES) == undisturbed


class TwoViews(nn.Module):
    """Embeds two noisy views of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (self.body(x + 0.1 * torch.randn_like(x)) for _ in range(2))
        return functional.normalize(first, dim=1), functional.normalize(second, dim=1)


def contrast(model: nn.Module, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Tell each sample's other view from those of the other samples of its shard."""
    first, second = model(x)
    return functional.cross_entropy(first @ second.T / 0.2, torch.arange(len(x)))


@pytest.mark.filterwarnings("ignore:`loss_fn` must return the mean:UserWarning")  # it compares samples of a shard
@DAILY
def test_devices_are_only_places_for_a_contrastive_model(placements: list[Placement]) -> None:
    views = Workload("two views", TwoViews, (6,))
    found = digests(views, placements, num_shards=2, loss_fn=contrast, batch_size=8)
    assert len(set(found.values())) == 1, found


class Trap:
    """Does something once when armed."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
        self.armed = False

    def spring(self, *_: Any) -> None:
        if self.armed:
            self.armed = False
            self.action()


def set_in_phase(phase: str) -> Callable[[Trap], ls.ParallelUpdater]:
    def build(trap: Trap) -> ls.ParallelUpdater:
        return gan(GanStep(lambda name: trap.spring() if name == phase else None), Placement(2))

    return build


def set_in_loss(name: str) -> Callable[[Trap], ls.ParallelUpdater]:
    def build(trap: Trap) -> ls.ParallelUpdater:
        step = GanStep()
        usual = getattr(step, name)

        def loss_fn(nets: Any, real: torch.Tensor) -> Any:
            trap.spring()
            return usual(nets, real)

        setattr(step, name, loss_fn)
        return gan(step, Placement(2))

    return build


def set_in_hook(timing: str, name: str) -> Callable[[Trap], ls.ParallelUpdater]:
    def build(trap: Trap) -> ls.ParallelUpdater:
        updater = gan(placement=Placement(2))
        optimizer = updater.get_optimizer(name)
        if timing == "pre":
            optimizer.register_step_pre_hook(trap.spring)
        else:
            optimizer.register_step_post_hook(trap.spring)
        return updater

    return build


def set_in_iterator(trap: Trap) -> ls.ParallelUpdater:
    class Springing(ls.BatchIterator):
        def advance(self, num_batches: int = 1) -> None:
            super().advance(num_batches)
            trap.spring()

    updater = gan(placement=Placement(2))
    updater.get_iterator("further").__class__ = Springing
    return updater


def set_in_scheduler(trap: Trap) -> ls.ParallelUpdater:
    class Springing(torch.optim.lr_scheduler.LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            trap.spring()

    updater = gan(placement=Placement(2))
    updater._training.schedulers["gen"].__class__ = Springing
    return updater


TRAPS: dict[str, Callable[[Trap], ls.ParallelUpdater]] = {
    **{f"phase {phase}": set_in_phase(phase) for phase in PHASES},
    "judge's loss": set_in_loss("judge_loss"),
    "generator's loss": set_in_loss("generator_loss"),
    **{f"{timing} hook of {name}": set_in_hook(timing, name) for timing in ("pre", "post") for name in ("gen", "dis")},
    "scheduler": set_in_scheduler,
    "iterator": set_in_iterator,
}


DAILY_TRAPS = {"phase judge moved", "judge's loss", "post hook of gen", "pre hook of dis", "scheduler", "iterator"}
each_trap = pytest.mark.parametrize(
    "where", [each if each in DAILY_TRAPS else pytest.param(each, marks=pytest.mark.slow) for each in TRAPS]
)


@each_trap
def test_a_failed_step_leaves_the_last_update(where: str, undisturbed: str) -> None:
    trap = Trap(fail)
    updater = TRAPS[where](trap)
    run(updater, FAULT_AT)
    before = snapshot(updater), torch.get_rng_state()
    trap.armed = True
    with pytest.raises((RuntimeError, ls.ReplicaError), match="sprung"):
        updater.update()
    assert not trap.armed
    assert snapshot(updater) == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert run(updater, UPDATES) == undisturbed


@each_trap
def test_an_interrupted_step_applies_nothing_or_all(where: str, undisturbed: str) -> None:
    trap = Trap(interrupt)
    updater = TRAPS[where](trap)
    run(updater, FAULT_AT)
    before = snapshot(updater)
    trap.armed = True
    with pytest.raises(KeyboardInterrupt):
        updater.update()
    assert not trap.armed
    done = where == "iterator"  # the update is complete but for counting when the iterator moves
    assert updater.iteration == FAULT_AT + done
    assert done or snapshot(updater) == before
    assert run(updater, UPDATES) == undisturbed


def test_a_second_interrupt_in_a_step_is_not_kept_waiting(undisturbed: str) -> None:
    def twice() -> None:
        interrupt()
        interrupt()
        raise AssertionError("the second one must end the step at once")

    trap = Trap(twice)
    updater = set_in_phase("judge moved")(trap)
    run(updater, FAULT_AT)
    before = snapshot(updater)
    trap.armed = True
    with pytest.raises(KeyboardInterrupt):
        updater.update()
    assert snapshot(updater) == before
    assert run(updater, UPDATES) == undisturbed


def test_a_handler_that_lets_the_work_go_on_changes_no_bit(undisturbed: str) -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        for where in ("phase judged", "judge's loss", "generator's loss"):
            trap = Trap(interrupt)
            updater = TRAPS[where](trap)
            trap.armed = True
            assert run(updater, UPDATES) == undisturbed
        assert heard == [signal.SIGINT] * 3
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_same_computation_again_has_other_random_numbers() -> None:
    drawn: list[torch.Tensor] = []

    def loss_fn(nets: Any, real: torch.Tensor) -> torch.Tensor:
        drawn.append(torch.rand(4))
        return generator_loss(nets, real)

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        drawn.append(torch.rand(4))
        for _ in range(3):
            updater.compute_gradients(batch, loss_fn=loss_fn, optimizer="gen")

    run(gan(step, num_shards=2, audit_every=0), 4)
    assert len(drawn) == 4 * (1 + 3 * 2)
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(drawn)
