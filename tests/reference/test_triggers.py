"""Every trigger trace of Chainer, value by value, but for the differences listed with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.support.plain_updaters import CountingUpdater, Place
from traces import Case, Tolerance, cases

from lockstep.triggers import EarlyStopping, Interval, ManualSchedule, MaxValue, MinValue, Once, Trigger

GIVEN = ["trigger", "args", "kwargs", "iters_per_epoch", "values", "called_every", "resume_after"]


def trigger_of(content: Any) -> str:
    return str(content["trigger"])


def build(case: Case) -> Trigger:
    def tuples(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    args = [tuples(value) for value in case.content.get("args", [])]
    kwargs = {key: tuples(value) for key, value in case.content.get("kwargs", {}).items()}
    if case["trigger"] == "OnceTrigger":
        return Once(call_on_resume=args[0])
    kinds: dict[str, Any] = {
        "IntervalTrigger": Interval,
        "ManualScheduleTrigger": ManualSchedule,
        "EarlyStoppingTrigger": EarlyStopping,
        "MinValueTrigger": MinValue,
        "MaxValueTrigger": MaxValue,
    }
    return kinds[case["trigger"]](*args, **kwargs)


def attributes(trigger: Trigger) -> dict[str, Any]:
    """Return a trigger's attributes under the names they have in the traces."""
    if isinstance(trigger, EarlyStopping):
        nothing_yet = "inf" if trigger.mode == "min" else "-inf"
        return {"best": nothing_yet if trigger.best is None else trigger.best, "count": trigger.count}
    if isinstance(trigger, (MinValue, MaxValue)):
        return {"_best_value": trigger.best}
    return {"finished": trigger.finished}


@pytest.mark.filterwarnings("ignore:.*was not observed at this check:UserWarning")
def replay(case: Case) -> dict[str, list[Any]]:
    place = Place(CountingUpdater(case["iters_per_epoch"]), {})
    name = case.content.get("kwargs", {}).get("monitor", "main/loss")
    trigger = build(case)
    trigger.initialize(place)
    found: dict[str, list[Any]] = {"fired": [], "attrs": []}
    for index in range(len(case["fired"])):
        value = case.content.get("values", [None] * (index + 1))[index]
        place.advance({} if value is None else {name: float(value)})
        asked = (index + 1) % case["called_every"] == 0
        found["fired"].append(trigger(place) if asked else None)
        found["attrs"].append(attributes(trigger))
        if index + 1 == case["resume_after"]:
            state = json.loads(json.dumps(trigger.state_dict()))
            trigger = build(case)
            trigger.load_state_dict(state)
    return found


@pytest.mark.filterwarnings("ignore:.*was not observed at this check:UserWarning")
@pytest.mark.parametrize("case", cases("chainer-cunn/triggers.json", num_cases=135, given=GIVEN, name=trigger_of))
def test_replay(case: Case) -> None:
    found = replay(case)
    # The mean of a few values: numpy's running sum there, the exact sum here.
    mean = Tolerance(1e-14, floor=0.0)
    case.check({field: found[field] for field in found if field in case}, {"attrs.*": mean})
