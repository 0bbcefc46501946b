"""Chainer's order of hooks around an update, and the count that each of them sees."""

from __future__ import annotations

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


def build(
    case: Case, events: list[Any], classes: Classes
) -> tuple[HookedOptimizer, dict[str, torch.nn.Parameter]]:
    parameters = {
        name: torch.nn.Parameter(tensor(values, torch.float64)) for name, values in case["init"].items()
    }
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


def replay(case: Case, classes: Classes) -> None:
    events: list[Any] = []
    optimizer, parameters = build(case, events, classes)
    if case.name == "nan_dynamic":
        optimizer.loss_scaling()  # begins at 1, and an overflow leaves it there
    steps = []
    for number in range(len(case["steps"])):
        for name, grad in GRADS.items():
            parameters[name].grad = torch.tensor(grad, dtype=torch.float64)
        if case.name.startswith("nan") and number == 0:
            parameters["a"].grad = torch.tensor([0.5, float("nan")], dtype=torch.float64)
        if case.name == "param_without_grad":
            parameters["b"].grad = None
        optimizer.update()
        values = {name: parameter.tolist() for name, parameter in parameters.items()}
        steps.append({"events": list(events), "t": optimizer.t, **values})
        events.clear()
    case.check({"steps": steps}, {"*.a.*": Tolerance(1e-10), "*.b.*": Tolerance(1e-10)})


@pytest.mark.parametrize("case", cases("chainer-cunn/hook_order.json", num_cases=4, given=GIVEN))
def test_replay(case: Case) -> None:
    replay(case, CLASSES)
