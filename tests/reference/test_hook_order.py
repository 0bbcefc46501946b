"""Chainer's order of hooks around an update, and the count that each of them sees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from test_optimizers import CLASSES, Classes
from traces import Case, Tolerance, cases, tensor

from lockstep.optim import HookedOptimizer

GIVEN = ["optimizer", "lr", "momentum", "init"]
GRADS = {"a": [0.5, 1.0], "b": [0.25]}


class Recorder:
    """A hook that writes down its name, whom it was called for and the count it saw."""

    def __init__(
        self,
        name: str,
        events: list[Any],
        parameters: dict[str, torch.nn.Parameter],
        *,
        timing: str = "pre",
        per_parameter: bool = False,
    ) -> None:
        self.name, self.timing, self.per_parameter = name, timing, per_parameter
        self.events, self.parameters = events, parameters

    def __call__(self, optimizer: HookedOptimizer, *which: torch.Tensor) -> None:
        named = [name for name, each in self.parameters.items() if any(each is one for one in which)]
        groups = [group["params"] for group in optimizer.param_groups]
        if not named and len(groups) == 1:
            named = [name for name, each in self.parameters.items() if each is groups[0][0]]
        self.events.append([self.name, named[0] if named else "optimizer", optimizer.t])


def build(case: Case, events: list[Any], classes: Classes) -> tuple[HookedOptimizer, dict[str, torch.nn.Parameter]]:
    parameters = {name: torch.nn.Parameter(tensor(values, torch.float64)) for name, values in case["init"].items()}
    optimizer = classes[case["optimizer"]](
        [{"params": [parameter]} for parameter in parameters.values()],
        lr=case["lr"],
        momentum=case["momentum"],
        missing_grad="zero",
    )
    optimizer.add_hook(Recorder("pre_once", events, parameters))
    optimizer.add_hook(Recorder("post_once", events, parameters, timing="post"))
    optimizer.add_hook(Recorder("pre_each", events, parameters, per_parameter=True))
    optimizer.add_hook(Recorder("post_each", events, parameters, per_parameter=True), timing="post")
    # Chainer warns of a hook with an unknown timing and calls it before the update; here it is refused.
    bad = Recorder("bad_timing", events, parameters, timing="whenever")
    with pytest.raises(ValueError, match=r"`hook\.timing` must be 'pre' or 'post', got 'whenever'"):
        optimizer.add_hook(bad)
    optimizer.add_hook(bad, timing="pre")
    optimizer.add_hook(Recorder("rule_pre", events, parameters), group=0)
    optimizer.add_hook(Recorder("rule_post", events, parameters), timing="post", group=0)
    return optimizer, parameters


def was_skipped(step: Mapping[str, Any]) -> bool:
    """Say whether no rule ran: only a dynamic scale skips an update, and only one that overflows."""
    return not any(event[0] == "rule_pre" for event in step["events"])


def gradients(case: Case) -> Iterator[dict[str, torch.Tensor | None]]:
    """Give the gradients of each step, as what became of the weights tells them.

    A weight that turned into NaN had one for a gradient, a skipped update had one somewhere, and a
    parameter that never moved in an update had none.
    """
    before = case["init"]
    for step in case["steps"]:
        skipped, found = was_skipped(step), {}
        for name, values in GRADS.items():
            grad = torch.tensor(values, dtype=torch.float64)
            old, new = tensor(before[name], torch.float64), tensor(step[name], torch.float64)
            grad[new.isnan() & ~old.isnan()] = math.nan
            found[name] = grad if skipped or not torch.equal(old, new) else None
        if skipped:
            found["a"] = torch.tensor([GRADS["a"][0], math.nan], dtype=torch.float64)
        yield found
        before = step


def replay(case: Case, classes: Classes) -> None:
    events: list[Any] = []
    optimizer, parameters = build(case, events, classes)
    if any(map(was_skipped, case["steps"])):
        optimizer.loss_scaling()  # begins at 1, and an overflow leaves it there
    steps = []
    for found in gradients(case):
        # The original divides only what a backward has multiplied; here what comes is taken to be multiplied.
        factor = 1.0 if optimizer.loss_scale is None else optimizer.loss_scale.factor
        for name, gradient in found.items():
            parameters[name].grad = None if gradient is None else gradient * factor
        optimizer.update()
        values = {name: parameter.tolist() for name, parameter in parameters.items()}
        steps.append({"events": list(events), "t": optimizer.t, **values})
        events.clear()
    case.check({"steps": steps}, {"*.a.*": Tolerance(1e-10), "*.b.*": Tolerance(1e-10)})


@pytest.mark.parametrize("case", cases("chainer-cunn/hook_order.json", num_cases=4, given=GIVEN))
def test_replay(case: Case) -> None:
    replay(case, CLASSES)
