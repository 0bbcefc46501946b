"""Chainer's shifts of the learning rate, as functions of the update count, resumed and not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from traces import Case, Tolerance, cases

from lockstep.optim import UpdateSchedule, schedule

GIVEN = ["extension", "kwargs", "lr_before", "resume_after_calls", "status"]


def name(content: Mapping[str, Any]) -> str:
    resumed = "" if content["resume_after_calls"] is None else "_resumed"
    return f"{content['extension']}{resumed}"


def translate(extension: str, options: Mapping[str, Any], lr: float) -> tuple[float, schedule.Factor]:
    """Say a shift as a base rate and a factor of it."""
    base = lr if options.get("init") is None else options["init"]
    target = options["target"] / base if "target" in options else None
    if extension == "WarmupShift":
        start = lr if options["warmup_start"] is None else options["warmup_start"]
        return base, schedule.warmup(options["warmup_iter"], start=start / base)
    if extension == "LinearShift":
        (first, last), (begin, end) = options["value_range"], options["time_range"]
        return first, schedule.delayed(schedule.polynomial(end - begin, final=last / first), begin)
    makers: dict[str, Callable[[], schedule.Factor]] = {
        "MultistepShift": lambda: schedule.steps(options["step_value"], gamma=options["gamma"]),
        "StepShift": lambda: schedule.every(options["step"], gamma=options["gamma"], final=target),
        "ExponentialShift": lambda: schedule.exponential(options["rate"], final=target),
        "PolynomialShift": lambda: schedule.polynomial(options["max_count"], power=options["rate"], bound=target),
        "InverseShift": lambda: schedule.inverse(options["gamma"], power=options["power"], final=target or 0.0),
    }
    return base, makers[extension]()


@pytest.mark.parametrize("case", cases("chainer-cunn/lr_shifts.json", num_cases=28, given=GIVEN, name=name))
def test_replay(case: Case) -> None:
    base, factor = translate(case["extension"], case["kwargs"], case["lr_before"])

    def start() -> tuple[torch.optim.Optimizer, UpdateSchedule]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=case["lr_before"])
        return optimizer, UpdateSchedule(optimizer, factor, base_lr=base)

    optimizer, made = start()
    values, resumed_value = [optimizer.param_groups[0]["lr"]], None
    for call in range(1, len(case["lr_after_initialize_then_each_call"])):
        optimizer.step()
        made.step()
        values.append(optimizer.param_groups[0]["lr"])
        if call == case["resume_after_calls"]:
            state = made.state_dict()
            optimizer, made = start()
            made.load_state_dict(state)
            resumed_value = optimizer.param_groups[0]["lr"]
    ours = {"lr_after_initialize_then_each_call": values, "lr_after_resume_initialize": resumed_value}
    # The original multiplies step by step, ours raises to the power.
    case.check(ours, {"*": Tolerance(1e-12)})
