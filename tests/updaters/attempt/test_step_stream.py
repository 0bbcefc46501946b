"""What an optimizer, a hook of its step or a tensor hook draws belongs to the update, wherever it is computed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from random import gauss
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import LRScheduler

import lockstep as ls
from lockstep import Communicator
from lockstep.optim.hooks import GradientClipping, GradientNoise
from lockstep.streams import DefaultStream
from tests.support.ranks import run_on_ranks
from tests.support.runs import cross_entropy, finalized
from tests.support.workloads import CONVNET, MLP, Workload

UPDATES = 4


class Langevin(SGD):
    """Stochastic gradient Langevin dynamics: plain descent, and noise from a function."""

    def __init__(self, params: Any, draw: Callable[[Tensor], Tensor] = torch.randn_like) -> None:
        super().__init__(params, lr=0.05)
        self.draw = draw

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(self.draw(weight), alpha=0.01)


class NoisyMomentum(ls.CorrectedMomentumSGD):
    """An optimizer of lockstep whose arithmetic draws."""

    def advance(self) -> None:
        super().advance()
        for weight in self.moving_parameters():
            weight.detach().add_(torch.randn_like(weight), alpha=0.01)


def stochastic_rounding(optimizer: Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            down = (weight.detach() * 64).floor()
            weight.detach().copy_((down + (torch.rand_like(down) < weight.detach() * 64 - down)) / 64)


def with_step_hook(model: nn.Module, hook: Callable[..., Any]) -> Optimizer:
    optimizer = Adam(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(hook)
    return optimizer


def with_post_hook(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.05)
    optimizer.register_step_post_hook(stochastic_rounding)
    return optimizer


def gradient_dropout(optimizer: Optimizer, weight: Tensor) -> None:
    del optimizer
    assert weight.grad is not None
    weight.grad.mul_(torch.rand_like(weight.grad) > 0.5)


gradient_dropout.per_parameter = True  # type: ignore[attr-defined]


def with_hook_of_ours(model: nn.Module) -> Optimizer:
    optimizer = ls.MomentumSGD(model.parameters(), lr=0.05)
    optimizer.add_hook(gradient_dropout)
    return optimizer


def with_tensor_hooks(model: nn.Module) -> Optimizer:
    for weight in model.parameters():
        weight.register_hook(lambda grad: grad + torch.randn_like(grad))
    return Langevin(model.parameters())


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Langevin dynamics": lambda model: Langevin(model.parameters()),
    "a subclass of an optimizer of ours": lambda model: NoisyMomentum(model.parameters(), lr=0.05),
    "a pre-hook": lambda model: with_step_hook(model, lambda *_: gradient_noise(model)),
    "a post-hook": with_post_hook,
    "a hook of an optimizer of ours": with_hook_of_ours,
    "tensor hooks and the step": with_tensor_hooks,
    "GradientNoise on an optimizer of torch": lambda model: with_step_hook(model, GradientNoise(0.1)),
    "GradientNoise on one of ours": lambda model: hooked(GradientNoise(0.1), model),
}


def gradient_noise(model: nn.Module) -> None:
    for weight in model.parameters():
        assert weight.grad is not None
        weight.grad.add_(torch.randn_like(weight.grad))


def hooked(hook: Callable[..., object], model: nn.Module) -> Optimizer:
    optimizer = ls.CorrectedMomentumSGD(model.parameters(), lr=0.05)
    optimizer.add_hook(hook)
    return optimizer


def updater_for(name: str, work: Workload = CONVNET, devices: int = 1, **options: Any) -> ls.ParallelUpdater:
    model = work.model()
    batches = ls.BatchIterator(work.data(23), 9, shuffle=True, last_batch="short", seed=3)
    given = {"loss_fn": cross_entropy, "num_shards": 3, **options}
    return ls.ParallelUpdater(batches, OPTIMIZERS[name](model), model, devices=["cpu"] * devices, **given)


def trained(name: str, devices: int = 1, *, start: int = 0, resumed: bool = False, **options: Any) -> str:
    """Train from some state of the default generator, with a resume in the middle or without."""
    state = None
    with torch.random.fork_rng():
        torch.manual_seed(start)
        for updates in (UPDATES // 2, UPDATES - UPDATES // 2) if resumed else (UPDATES,):
            with finalized(updater_for(name, devices=devices, **options)) as updater:
                if state is not None:
                    updater.load_state_dict(state)
                for _ in range(updates):
                    updater.update()
                state = updater.state_dict()
    return ls.digest(updater.get_all_models()["main"])


DAILY = ("Langevin dynamics", "a post-hook", "tensor hooks and the step", "GradientNoise on one of ours")


each_optimizer = pytest.mark.parametrize(
    "name", [each if each in DAILY else pytest.param(each, marks=pytest.mark.slow) for each in OPTIMIZERS]
)


@each_optimizer
def test_neither_place_nor_generator_nor_a_resume_matters(name: str) -> None:
    usual = trained(name)
    assert trained(name, start=7) == usual
    assert trained(name, devices=3) == usual
    assert trained(name, start=5, resumed=True) == usual
    if "GradientNoise" not in name:
        assert trained(name, seed=1) != trained(name, seed=2)


def one_step(updater: ls.ParallelUpdater, batch: Any) -> None:
    updater.compute_gradients(batch)
    updater.apply_gradients()


@each_optimizer
def test_step_functions_and_loops_of_your_own_draw_the_same(name: str) -> None:
    usual = trained(name)
    assert trained(name, step_fn=one_step) == usual
    with finalized(updater_for(name)) as updater:
        batches = updater.get_iterator("main")
        for _ in range(UPDATES):
            one_step(updater, next(batches))
            torch.rand(1)  # of no effect
        assert ls.digest(updater.get_all_models()["main"]) == usual


def on_rank(communicator: Communicator, name: str) -> str:
    torch.manual_seed(communicator.rank)
    return trained(name, communicator=communicator, start=communicator.rank)


@pytest.mark.parametrize("name", ["a subclass of an optimizer of ours", "tensor hooks and the step"])
def test_ranks_draw_the_same(name: str) -> None:
    assert run_on_ranks(on_rank, 2, name) == [trained(name)] * 2


def test_each_update_and_each_part_of_it_draws_other_numbers() -> None:
    drawn: list[float] = []
    model = MLP.model()
    next(model.parameters()).register_hook(lambda _: drawn.append(torch.rand(()).item()))

    def draw(weight: Tensor) -> Tensor:
        drawn.append(torch.rand(()).item())
        return torch.zeros_like(weight)

    batches = ls.BatchIterator(MLP.data(23), 9, seed=3)
    optimizer = Langevin(model.parameters(), draw)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=1, loss_fn=cross_entropy, audit_every=0)
    for _ in range(UPDATES):
        updater.update()
    assert len(drawn) == len(set(drawn)) == UPDATES * (1 + len(list(model.parameters())))


class RandomRate(LRScheduler):
    """Draws each learning rate."""

    def get_lr(self) -> list[float | Tensor]:
        return [0.1 * torch.rand(()).item() for _ in self.base_lrs]


def test_a_scheduler_of_your_own_may_draw() -> None:
    def rates(start: int) -> list[float]:
        model = MLP.model()
        optimizer = SGD(model.parameters(), lr=0.1)
        batches = ls.BatchIterator(MLP.data(23), 9, seed=3)
        with finalized(
            ls.ParallelUpdater(
                batches, optimizer, model, devices=1, loss_fn=cross_entropy, scheduler=RandomRate(optimizer)
            )
        ) as updater:
            torch.manual_seed(start)
            found = []
            for _ in range(UPDATES):
                updater.update()
                found.append(optimizer.param_groups[0]["lr"])
            return found

    with torch.random.fork_rng():
        assert rates(1) == rates(2)


def test_the_default_generator_is_left_alone() -> None:
    with finalized(updater_for("tensor hooks and the step")) as updater:
        before = torch.get_rng_state()
        updater.update()
        assert torch.equal(torch.get_rng_state(), before)


def test_optimizers_and_hooks_that_draw_nothing_open_no_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    enter = DefaultStream.__enter__

    def counted(stream: DefaultStream) -> DefaultStream:
        opened.append("stream")
        return enter(stream)

    def count(make: Callable[[nn.Module], Optimizer]) -> int:
        model = MLP.model()
        batches = ls.BatchIterator(MLP.data(23), 9, seed=3)
        with finalized(ls.ParallelUpdater(batches, make(model), model, devices=1, loss_fn=cross_entropy)) as updater:
            updater.update()
            opened.clear()
            updater.update()
            return len(opened)

    monkeypatch.setattr(DefaultStream, "__enter__", counted)
    shards = count(lambda model: SGD(model.parameters(), lr=0.1))
    assert count(lambda model: ls.MomentumSGD(model.parameters(), lr=0.1)) == shards
    assert count(lambda model: with_step_hook(model, GradientClipping(1.0))) == shards
    assert count(lambda model: hooked(GradientClipping(1.0), model)) == shards
    assert count(lambda model: Langevin(model.parameters())) == shards + 1


OWN = torch.Generator()
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Python's `random`": lambda weight: torch.full_like(weight, gauss(0.0, 1.0)),
    "`numpy.random`": lambda weight: torch.full_like(weight, np.random.random()),
    "a `torch.Generator` of your own": lambda weight: torch.randn(weight.shape, generator=OWN),
}


class Draws:
    """A hook that draws, and changes nothing."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        self.draw, self.generator = draw, OWN

    def __call__(self, *_: object) -> None:
        self.draw(torch.zeros(3))


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("where", ["optimizer", "hook", "tensor hook"])
def test_other_generators_are_warned_of_once(name: str, where: str) -> None:
    model, draw = MLP.model(), OTHERS[name]
    weight = next(model.parameters())
    optimizer = SGD(model.parameters(), lr=0.1)
    if where == "optimizer":
        optimizer = Langevin(model.parameters(), draw)
        optimizer.own = OWN  # type: ignore[attr-defined]
    elif where == "hook":
        optimizer.register_step_pre_hook(Draws(draw))
    else:
        weight.register_hook(Draws(draw))
    batches = ls.BatchIterator(MLP.data(23), 9, seed=3)
    with finalized(ls.ParallelUpdater(batches, optimizer, model, devices=1, loss_fn=cross_entropy)) as updater:
        with pytest.warns(
            ls.RandomStreamWarning, match=f"The optimizer, a hook, the step function or a BatchLoss drew from {name}"
        ):
            updater.update()
        assert updater.iteration == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            updater.update()


def test_a_state_without_the_hooks_is_refused() -> None:
    noisy = updater_for("GradientNoise on an optimizer of torch")
    state = noisy.state_dict()
    del state["step_hooks"]
    with pytest.raises(ls.StateError, match="step_hooks"):
        noisy.load_state_dict(state)


def test_a_failed_update_restores_the_state_of_hooks() -> None:
    noise = GradientNoise(0.1)

    def failing(updater: ls.ParallelUpdater, batch: Any) -> None:
        one_step(updater, batch)
        raise RuntimeError("after the step")

    model = MLP.model()
    batches = ls.BatchIterator(MLP.data(23), 9, seed=3)
    updater = ls.ParallelUpdater(
        batches, with_step_hook(model, noise), model, devices=1, loss_fn=cross_entropy, step_fn=failing
    )
    with pytest.raises(RuntimeError, match="after the step"):
        updater.update()
    assert noise.t == 0
