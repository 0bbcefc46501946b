"""NNabla's dynamic loss scaling: its state machine, through the updater that stands in for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from traces import Case, cases

import lockstep as ls
from lockstep.data import Iterator
from lockstep.optim import MomentumSGD, hooks
from lockstep.precision import nnabla_loss_scale

MAX_TRIES = 101
"""NNabla tries once and then up to 100 times again."""

SMALLEST = 1e-300
"""NNabla's scale has no floor; the traces go down to 2**-199."""


class Feeder(Iterator):
    """Gives batches of one sample without end, but raises once at a given feed."""

    def __init__(self, raises_at: int | None) -> None:
        self.raises_at = raises_at
        self.position = 0
        self.num_fed = 0

    def peek(self, ahead: int = 0) -> Sequence[Any]:
        if self.position + ahead >= self.num_fed:
            if self.num_fed + 1 == self.raises_at:
                self.raises_at = None
                raise StopIteration
            self.num_fed += 1
        return torch.ones(1, 1, dtype=torch.float64)

    def advance(self, num_batches: int = 1) -> None:
        self.position += num_batches

    @property
    def epoch(self) -> int:
        return 0

    @property
    def epoch_detail(self) -> float:
        return 0.0

    @property
    def previous_epoch_detail(self) -> float | None:
        return None

    @property
    def is_new_epoch(self) -> bool:
        return False

    def reset(self) -> None:
        self.position = self.num_fed = 0

    def finalize(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.position = state_dict["position"]


class Replay:
    """Runs the updater of a case and writes down what happens in NNabla's words.

    The model is one weight with a gradient of 1, in float64, in which every scale of the traces is exact.
    """

    def __init__(self, case: Case, stack: ExitStack) -> None:
        options = case["updater"]
        self.events: list[Any] = []
        self.script = list(case["overflow_script"])
        self.clears = options["clear_buffer"]  # only echoed: torch frees the graph as backward goes
        self.accumulate = options["accum_grad"]
        self.num_shards_done = 0
        self.num_tries = 0
        self.scaled = 0.0
        self.model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        optimizer = MomentumSGD(self.model.parameters(), lr=0.0)
        optimizer.add_hook(self.see_gradient, name="scale_grad")
        if options["weight_decay"] is not None:
            decay = hooks.WeightDecay(options["weight_decay"])
            optimizer.add_hook(decay)
            optimizer.add_hook(lambda _: self.events.append(["weight_decay", decay.rate]), name="decayed")
        optimizer.add_hook(lambda _: self.events.append(["update"]), name="update", timing="post")
        self.feeder = Feeder(case["feed_raises_at_call"])
        self.updater = ls.ParallelUpdater(
            self.feeder,
            optimizer,
            self.model,
            devices=["cpu"],
            loss_fn=self.loss_of,
            accumulate=self.accumulate,
            loss_scale=nnabla_loss_scale(
                options["scale"], options["scaling_factor"], options["N"], minimum=SMALLEST, maximum=1e300
            ),
            on_overflow="next",
            max_tries=MAX_TRIES,
        )
        stack.callback(self.updater.finalize)

    def loss_of(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.num_shards_done % self.accumulate == 0:
            self.begin_try()
        self.num_shards_done += 1
        self.events += [["feed"], ["forward", self.clears]]
        loss = model(x).sum()
        loss.register_hook(self.see_backward)
        return loss

    def begin_try(self) -> None:
        if self.num_tries > 0:
            self.events.append(["check", True])  # or there would not be another try
        self.num_tries += 1
        self.bad = self.script.pop(0) if self.script else False
        if all(parameter.grad is None for parameter in self.model.parameters()):
            self.events.append(["zero_grad"])

    def see_backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        # Where there are several shards the updater weights them, by a power of two that cancels.
        lift = 2.0 ** (self.accumulate - 1).bit_length()
        self.scaled = grad.item() * lift
        self.events.append(["backward", self.scaled, self.clears])
        return grad * float("inf") if self.bad else None

    def see_gradient(self, optimizer: MomentumSGD) -> None:
        (gradient,) = (parameter.grad for parameter in optimizer.param_groups[0]["params"])
        self.events += [["check", False], ["scale_grad", gradient.item() / self.scaled]]

    def update(self, number: int, *, with_events: bool) -> dict[str, Any]:
        self.events.clear()
        self.num_tries = 0
        passed, applied = self.feeder.position, False
        error: Any = None
        try:
            applied = self.updater.update().applied
            if not applied:
                self.events.append(["check", True])
                error = None if self.num_tries == MAX_TRIES else "given up: the data has ended"
        except StopIteration as stop:
            self.events.append(["feed_raises", type(stop).__name__])
            error = {"type": type(stop).__name__, "message": str(stop)}
        scale = self.updater.loss_scale
        assert isinstance(scale, ls.DynamicLossScale)
        return {
            "update": number,
            "n_attempts": self.num_tries,
            "n_feeds": self.feeder.position - passed,
            "applied": applied,
            "scale_after": scale.factor,
            "counter_after": scale.finite_updates + 1,
            "recursive_count_after": 0,  # an update's tries are its own
            "error": error,
            "events": list(self.events) if with_events else None,
        }


def without_exchange(update: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the calls of a communicator, which a single process does not make."""
    events = update["events"]
    kept = None if events is None else [event for event in events if event[0] != "all_reduce"]
    return {**update, "events": kept}


STATE_MACHINE = cases(
    "mxnet-nnabla/nnabla_state_machine.json",
    num_cases=51,
    given=["updater", "comm", "n_grads", "overflow_script", "feed_raises_at_call"],
)


@pytest.mark.parametrize("case", STATE_MACHINE)
def test_state_machine(case: Case) -> None:
    case = replace(case, content={**case.content, "updates": list(map(without_exchange, case["updates"]))})
    with ExitStack() as stack:
        try:
            replay = Replay(case, stack)
        except ValueError as error:
            case.check({"updates": f"ValueError: {error}"})
            return
        ours = [
            replay.update(number, with_events=original["events"] is not None)
            for number, original in enumerate(case["updates"])
        ]
    case.check({"updates": ours})
