"""NNabla's dynamic loss scaling through the updater that stands in for it: state machine and real runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from nnabla_rules import RULES, solver_of
from torch import nn
from torch.nn import functional
from traces import Case, Tolerance, cases, tensor

import lockstep as ls
from lockstep.data import Iterator
from lockstep.optim import MomentumSGD, hooks
from lockstep.precision import nnabla_loss_scale

MAX_TRIES = 101
"""NNabla tries once and then up to 100 times again."""

SMALLEST = 1e-300
"""NNabla's scale has no floor; the traces go down to 2**-199."""


class Feeder(Iterator):
    """Gives what a function makes of a batch's number; may raise once, at a given feed counted from 1."""

    def __init__(self, batch: Callable[[int], Any], raises_at: int | None = None) -> None:
        self.batch = batch
        self.raises_at = raises_at
        self.position = 0
        self.num_fed = 0

    def peek(self, ahead: int = 0) -> Sequence[Any]:
        if self.position + ahead >= self.num_fed:
            if self.num_fed + 1 == self.raises_at:
                self.raises_at = None
                raise StopIteration
            self.num_fed += 1
        batch: Sequence[Any] = self.batch(self.position + ahead)
        return batch

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
        """Hold nothing that would have to be released."""

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
        sample = torch.ones(1, 1, dtype=torch.float64)
        self.feeder = Feeder(lambda _: sample, case["feed_raises_at_call"])
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
            audit_every=0,
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
        # NNabla sums the gradients of the batches, and the updater computes their mean.
        self.scaled = grad.item() * self.accumulate
        self.events.append(["backward", self.scaled, self.clears])
        return grad * float("inf") if self.bad else None

    def see_gradient(self, optimizer: MomentumSGD) -> None:
        (gradient,) = (parameter.grad for parameter in optimizer.param_groups[0]["params"])
        self.events += [["check", False], ["scale_grad", gradient.item() / self.scaled]]

    def update(self, number: int, *, with_events: bool) -> dict[str, Any]:
        self.events.clear()
        self.num_tries = 0
        passed, error, applied = self.feeder.position, None, False
        try:
            applied = self.updater.update().applied
            if not applied:
                self.events.append(["check", True])
        except StopIteration as stop:
            # Ours is a StopIteration with a text of its own.
            self.events.append(["feed_raises", StopIteration.__name__])
            error = {"type": StopIteration.__name__, "message": str(stop.__cause__ or stop)}
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
    # The share of each batch in the mean is rounded once: 1/3 and 1/5 are no floating-point numbers.
    case.check({"updates": ours}, {"updates.*.events.*": Tolerance(2.0**-51)})


class Net(nn.Module):
    """The traces' net in their format; an amplifier makes backward overflow where forward does not."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.dtype = {"float": torch.float32, "half": torch.float16}[case["dtype"]]
        for name, array in case["params_init"].items():
            setattr(self, name, nn.Parameter(tensor(array)))

    def forward(self, x: torch.Tensor, amplifier: torch.Tensor) -> torch.Tensor:
        fc1_w, fc1_b, fc2_w, fc2_b = (parameter.to(self.dtype) for parameter in self.parameters())
        output = torch.tanh(x.to(self.dtype) @ fc1_w + fc1_b) @ fc2_w + fc2_b
        return output / amplifier.to(self.dtype) * amplifier.to(self.dtype)


class Run:
    """Runs a case with real nets. The batches of other ranks are further batches of the same update."""

    def __init__(self, case: Case, stack: ExitStack) -> None:
        self.case, options = case, case["updater"]
        self.accumulate, self.num_ranks = options["accum_grad"], options["ranks"]
        self.group = self.accumulate * self.num_ranks
        self.feeds = [case, *case["peer_feeds"]] if self.num_ranks > 1 else [case]
        self.model = Net(case)
        solver = solver_of(case, self.model.parameters())
        optimizer = solver.optimizer
        self.raw: dict[str, torch.Tensor] = {}
        self.applied_grads: dict[str, torch.Tensor] = {}
        optimizer.register_step_pre_hook(lambda *_: self.raw.update(self.grads()))
        if options["weight_decay"] is not None and solver.default_decay is None:
            optimizer.register_step_pre_hook(hooks.WeightDecay(options["weight_decay"]))
        elif options["weight_decay"] is not None:
            solver.set_own_decay(options["weight_decay"])
        optimizer.register_step_pre_hook(lambda *_: self.applied_grads.update(self.grads()))
        self.feeder = Feeder(self.batch)
        self.tries: list[dict[str, Any]] = []
        self.updater = ls.ParallelUpdater(
            self.feeder,
            optimizer,
            self.model,
            devices=["cpu"],
            loss_fn=self.loss_of,
            accumulate=self.group,
            loss_scale=nnabla_loss_scale(
                options["scale"], options["scaling_factor"], options["N"], minimum=SMALLEST, maximum=1e300
            ),
            on_overflow="next",
            max_tries=MAX_TRIES,
            audit_every=0,
        )
        stack.callback(self.updater.finalize)

    def grads(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}

    def batch(self, number: int) -> tuple[torch.Tensor, ...]:
        """Give a batch: all of rank 0's of a try, then all of rank 1's."""
        turn, place = divmod(number, self.group)
        rank, nth = divmod(place, self.accumulate)
        call = turn * self.accumulate + nth
        sequence = self.feeds[rank]["feed_sequence"]
        if call >= len(sequence):
            raise StopIteration
        feed = self.feeds[rank]["feed_pool"][sequence[call]]
        x = tensor(feed["x"])
        amplifier = torch.full((len(x), 1), 2.0 ** (feed["log2amp"] or 0))
        mine = torch.full((len(x),), call if rank == 0 else -1)
        return x, tensor(feed["y"]), amplifier, mine

    def loss_of(
        self, model: nn.Module, x: torch.Tensor, y: torch.Tensor, amplifier: torch.Tensor, mine: torch.Tensor
    ) -> torch.Tensor:
        loss = functional.cross_entropy(model(x, amplifier), y) * self.case["loss_multiplier"]
        call = int(mine[0])
        if call % self.accumulate == 0 and call >= 0:
            self.tries.append({"feeds": [], "losses": []})
        if call >= 0:
            self.tries[-1]["feeds"].append(call)
            self.tries[-1]["losses"].append(loss.detach())
        # NNabla adds up what ranks and accumulated batches give; the mean over them is 1/group of that.
        return loss * self.group

    def update(self, number: int) -> dict[str, Any]:
        self.tries.clear()
        scale = self.updater.loss_scale
        result = self.updater.update()
        for index, attempt in enumerate(self.tries):
            last = index == len(self.tries) - 1
            attempt |= {"scale": scale.factor, "overflow": not (last and result.applied)}
            if last and result.applied:
                attempt["grads_scaled"] = {name: grad * scale.factor for name, grad in self.raw.items()}
            scale = scale.after(finite=False)
        after = self.updater.loss_scale
        assert isinstance(after, ls.DynamicLossScale)
        elided = len(self.tries) > 6
        record = {
            "update": number,
            "n_attempts": result.tries,
            "attempts": [*self.tries[:2], *self.tries[-2:]] if elided else self.tries,
            "attempts_elided": elided,
            "applied": result.applied,
            "grads_applied": self.applied_grads if result.applied else None,
            "scale_after": after.factor,
            "counter_after": after.finite_updates + 1,
            "recursive_count_after": 0,  # an update's tries are its own
            "params_after": {name: parameter.detach() for name, parameter in self.model.named_parameters()},
            "feeds_used_total": self.feeder.position // self.num_ranks,
        }
        return copy.deepcopy(record)


RUN_GIVEN = [
    "seed",
    "dtype",
    "solver",
    "updater",
    "loss_multiplier",
    "has_amp",
    "dims",
    "params_init",
    "feed_pool",
    "feed_sequence",
    "peer_feeds",
    "all_reduce_calls",
]
RUNS = [
    *cases("mxnet-nnabla/nnabla_updater_fp32.json", num_cases=16, given=RUN_GIVEN),
    *cases("mxnet-nnabla/nnabla_updater_half.json", num_cases=3, given=RUN_GIVEN),
    *cases("mxnet-nnabla/nnabla_updater_comm.json", num_cases=3, given=RUN_GIVEN),
]
# The traces' description: of |value| + 1e-3; in half precision absolute.
NEAR = {
    "float": {
        "*.losses.*": Tolerance(1e-5, floor=0.0, offset=1e-3),
        "*.grads_*": Tolerance(1e-4, floor=0.0, offset=1e-3, peak=1e-6),  # what is left of larger terms
        "*.params_after.*": Tolerance(3e-5, floor=0.0, offset=1e-3),
    },
    "half": {
        "*.losses.*": Tolerance(3e-3, floor=1.0),  # a few units in the last place of float16
        "*.grads_applied.*": Tolerance(2e-3, floor=100.0),  # the last bits of a loss times up to 100
        "*.grads_scaled.*": Tolerance(2e-2, floor=1e3),
        "*.params_after.*": Tolerance(1e-3, floor=1.0),
    },
}


def near(case: Case) -> dict[str, Tolerance]:
    """Give the tolerances of a case: the description's small number is one of gradients that are not scaled."""
    tolerances = NEAR[case["dtype"]]
    if case["dtype"] == "half":
        return tolerances
    scaled = replace(tolerances["*.grads_*"], offset=1e-3 * max(case["updater"]["scale"], 1.0))
    return {"*.grads_scaled.*": scaled, **tolerances}


@pytest.mark.parametrize("case", RUNS)
def test_run(case: Case) -> None:
    if case["solver"]["name"] not in RULES:
        case.check({"updates": "no such rule"})
        return
    with ExitStack() as stack:
        run = Run(case, stack)
        ours = [run.update(number) for number in range(len(case["updates"]))]
    case.check({"updates": ours}, near(case))
