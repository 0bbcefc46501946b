"""NNabla's updater through its own name: state machine, real runs, and the sum over ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from nnabla_rules import RULES, Lamb, SgdW, solver_of
from test_nnabla_scaling import RUN_GIVEN, SMALLEST, Net, near
from torch import nn
from torch.nn import functional
from traces import Case, cases, each_word, tensor

from lockstep.compat.nnabla import DynamicLossScalingUpdater


class Solver(torch.optim.SGD):
    """One weight at rest; writes down what is asked of it in NNabla's words.

    Its gradient is 1 in float64, in which every scale of the traces is exact.
    """

    def __init__(self, events: list[Any], script: list[bool]) -> None:
        self.events, self.script = events, script
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        super().__init__([self.weight], lr=0.0)
        # No step() of its own: PyTorch runs the hooks once for each class of those that make up one.
        self.register_step_post_hook(lambda *_: self.events.append(["update"]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.events.append(["zero_grad"])
        super().zero_grad(set_to_none)


class Updater(DynamicLossScalingUpdater):
    """Writes down its own steps in NNabla's words."""

    def __init__(self, case: Case) -> None:
        self.events: list[Any] = []
        self.num_feeds, self.num_tries = 0, 0
        self.raises_at = case["feed_raises_at_call"]
        self.script = list(case["overflow_script"])
        solver = Solver(self.events, self.script)
        exchanged = [torch.zeros(1) for _ in range(case["n_grads"])]
        super().__init__(
            solver,
            lambda: self.loss_of(solver.weight),
            self.feed,
            **case["updater"],
            comm=self if case["comm"] else None,
            grads=exchanged,
        )
        self.minimum, self.maximum = SMALLEST, 1e300
        solver.register_step_pre_hook(self.see_unscaled)
        solver.register_step_post_hook(self.see_decayed)

    def feed(self) -> None:
        if self.num_feeds + 1 == self.raises_at:
            self.raises_at = None
            self.events.append(["feed_raises", "StopIteration"])
            raise StopIteration
        self.num_feeds += 1
        self.events.append(["feed"])

    def loss_of(self, weight: torch.Tensor) -> torch.Tensor:
        self.events.append(["forward", self.clear_buffer])
        loss = weight * 1.0
        loss.register_hook(self.see_backward)
        return loss

    def see_backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        self.events.append(["backward", grad.item(), self.clear_buffer])
        self.scaled = grad.item() * self.accum_grad
        return grad * float("inf") if self.bad else None

    def all_reduce(self, data: Sequence[torch.Tensor], division: bool, inplace: bool) -> None:
        self.events.append(["all_reduce", len(data), division, inplace])

    def see_unscaled(self, solver: Solver, *_: Any) -> None:
        """Look at the gradient that was divided by the scale, before the decay."""
        gradient = solver.weight.grad
        if gradient is not None:
            self.unscaled = gradient.item()
            assert self.unscaled * self.scale == self.scaled

    def see_decayed(self, solver: Solver, *_: Any) -> None:
        gradient = solver.weight.grad
        if gradient is not None:
            decay = gradient.item() - self.unscaled
            assert decay == pytest.approx(self.weight_decay or 0.0, abs=1e-12)

    def _attempt(self) -> bool:
        self.bad = self.script.pop(0) if self.script else False
        self.num_tries += 1
        scale, begun = self.scale, len(self.events)
        try:
            finite = super()._attempt()
        except StopIteration:
            self.script.insert(0, self.bad)  # the answer was not asked for
            raise
        checked = [["check", not finite]]
        if finite:
            checked.append(["scale_grad", 1.0 / scale])
            if self.weight_decay is not None:
                checked.append(["weight_decay", self.weight_decay])
        done = self.events[begun:]
        stepped = done[-1:] if finite else []
        self.events[begun:] = done[: len(done) - len(stepped)] + checked + stepped
        return finite


def record(updater: Updater, number: int, *, with_events: bool) -> dict[str, Any]:
    updater.events.clear()
    fed, updater.num_tries = updater.num_feeds, 0
    error, applied = None, False
    try:
        applied = updater.update()
    except StopIteration as stop:
        error = {"type": type(stop).__name__, "message": str(stop)}
    return {
        "update": number,
        "n_attempts": updater.num_tries,
        "n_feeds": updater.num_feeds - fed,
        "applied": applied,
        "scale_after": updater.scale,
        "counter_after": updater.state_dict()["counter"],
        "recursive_count_after": 0,  # an update's tries are its own
        "error": error,
        "events": list(updater.events) if with_events else None,
    }


@pytest.mark.parametrize(
    "case",
    cases(
        "mxnet-nnabla/nnabla_state_machine.json",
        num_cases=51,
        given=["updater", "comm", "n_grads", "overflow_script", "feed_raises_at_call"],
        through="compat",
    ),
)
def test_state_machine(case: Case) -> None:
    try:
        updater = Updater(case)
    except ValueError as error:
        case.check({"updates": f"ValueError: {error}"})
        return
    ours = [
        record(updater, number, with_events=original["events"] is not None)
        for number, original in enumerate(case["updates"])
    ]
    case.check({"updates": ours})


class Run:
    """Runs a case with real nets; the other ranks of a case are simulated where gradients are exchanged."""

    def __init__(self, case: Case) -> None:
        self.case = case
        options = dict(case["updater"])
        self.num_ranks = options.pop("ranks", 1)
        self.model = Net(case)
        self.rank, self.call = case, 0
        self.tries: list[dict[str, Any]] = []
        self.exchanges: list[list[Any]] = []
        self.raw: dict[str, torch.Tensor] = {}
        self.applied_grads: dict[str, torch.Tensor] = {}
        solver = solver_of(case, self.model.parameters())
        fused = solver.default_decay is not None
        if fused and not isinstance(solver, SgdW | Lamb) and options["weight_decay"] is not None:
            solver.set_own_decay(options.pop("weight_decay"))  # the updater gives its rate to SGDW and LAMB
        optimizer = solver.optimizer
        optimizer.register_step_pre_hook(lambda *_: self.raw.update(self.grads()))
        self.updater = DynamicLossScalingUpdater(
            optimizer,
            self.loss_of,
            self.feed,
            **options,
            comm=self if self.num_ranks > 1 else None,
            grads=list(self.model.parameters()),
        )
        self.updater.minimum, self.updater.maximum = SMALLEST, 1e300
        # A solver that decays by itself may do so in the gradients, and the original shows those before.
        watch = optimizer.register_step_pre_hook if fused else optimizer.register_step_post_hook
        watch(lambda *_: self.applied_grads.update(self.grads()))

    def grads(self) -> dict[str, torch.Tensor]:
        return {name: parameter.grad.clone() for name, parameter in self.model.named_parameters()}

    def feed(self) -> None:
        if self.call >= len(self.case["feed_sequence"]):
            raise StopIteration
        nth = self.call % max(self.case["updater"]["accum_grad"], 1)
        if nth == 0:
            self.tries.append({"scale": self.updater.scale, "overflow": True, "feeds": [], "losses": []})
        self.tries[-1]["feeds"].append(self.call)
        self.call += 1

    def loss_of(self) -> torch.Tensor:
        loss = self.loss_on(self.case, self.call - 1)
        self.tries[-1]["losses"].append(loss.detach())
        return loss

    def loss_on(self, feeds: Any, call: int) -> torch.Tensor:
        feed = feeds["feed_pool"][feeds["feed_sequence"][call]]
        amplifier = torch.full((1,), 2.0 ** (feed["log2amp"] or 0))
        output = self.model(tensor(feed["x"]), amplifier)
        return functional.cross_entropy(output, tensor(feed["y"])) * self.case["loss_multiplier"]

    def all_reduce(self, data: Sequence[torch.Tensor], division: bool, inplace: bool) -> None:
        """Add what the other ranks would bring: equal weights, batches of their own, the same scale."""
        self.exchanges.append([len(data), division, inplace])
        own = [each.clone() for each in data]
        for peer in self.case["peer_feeds"]:
            for call in self.tries[-1]["feeds"]:
                (self.loss_on(peer, call) * self.updater.scale).backward()
        assert all(each is parameter.grad for each, parameter in zip(data, self.model.parameters(), strict=True))
        assert any(not torch.equal(before, after) for before, after in zip(own, data, strict=True))

    def update(self, number: int) -> dict[str, Any]:
        self.tries.clear()
        self.applied_grads.clear()
        applied = False
        with suppress(StopIteration):  # the recorded feeds end where the original needed no further one
            applied = self.updater.update()
        if applied:
            scale = self.tries[-1]["scale"]
            self.tries[-1] |= {
                "overflow": False,
                "grads_scaled": {name: grad * scale for name, grad in self.raw.items()},
            }
        elided = len(self.tries) > 6
        return copy.deepcopy(
            {
                "update": number,
                "n_attempts": len(self.tries),
                "attempts": [*self.tries[:2], *self.tries[-2:]] if elided else self.tries,
                "attempts_elided": elided,
                "applied": applied,
                "grads_applied": dict(self.applied_grads) if applied else None,
                "scale_after": self.updater.scale,
                "counter_after": self.updater.state_dict()["counter"],
                "recursive_count_after": 0,  # an update's tries are its own
                "params_after": {name: each.detach() for name, each in self.model.named_parameters()},
                "feeds_used_total": self.call,
            }
        )


RUNS = [
    *cases("mxnet-nnabla/nnabla_updater_fp32.json", num_cases=16, given=RUN_GIVEN, through="compat"),
    *cases("mxnet-nnabla/nnabla_updater_half.json", num_cases=3, given=RUN_GIVEN, through="compat"),
    *cases("mxnet-nnabla/nnabla_updater_comm.json", num_cases=3, given=RUN_GIVEN, through="compat"),
]


@pytest.mark.parametrize("case", each_word(RUNS))
def test_run(case: Case) -> None:
    if case["solver"]["name"] not in RULES:
        case.check({"updates": "no such rule"})
        return
    run = Run(case)
    ours = [run.update(number) for number in range(len(case["updates"]))]
    case.check({"updates": ours}, near(case))
    assert run.exchanges == case.content.get("all_reduce_calls", [])
