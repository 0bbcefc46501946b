"""Every trigger trace of Chainer, asserted value by value, but for the differences listed with a reason."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.triggers import EarlyStopping, Interval, ManualSchedule, MaxValue, MinValue, Once, Trigger
from small_updaters import CountingUpdater, Place

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve()
REFERENCE = Path(os.environ.get("LOCKSTEP_REFERENCE") or HERE.parents[2].parent / "shared" / "reference")
TRACE = REFERENCE / "chainer-cunn" / "traces" / "triggers.json"
NUM_CASES = 135

if not TRACE.exists():
    pytest.skip(f"the reference traces are not at {TRACE}; set LOCKSTEP_REFERENCE", allow_module_level=True)

CASES: list[dict[str, Any]] = json.loads(TRACE.read_text())["cases"]
DIFFERENCES: list[dict[str, Any]] = tomllib.loads(HERE.with_name("trigger_differences.toml").read_text())[
    "difference"
]


def build(case: dict[str, Any]) -> Trigger:
    def tuples(value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    args = [tuples(value) for value in case.get("args", [])]
    kwargs = {key: tuples(value) for key, value in case.get("kwargs", {}).items()}
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


@pytest.mark.filterwarnings("ignore:.*was not observed since the last check:UserWarning")
def replay(case: dict[str, Any]) -> dict[str, list[Any]]:
    place = Place(CountingUpdater(case["iters_per_epoch"]), {})
    name = case.get("kwargs", {}).get("monitor", "main/loss")
    trigger = build(case)
    trigger.initialize(place)
    found: dict[str, list[Any]] = {"fired": [], "attrs": []}
    for index in range(len(case["fired"])):
        value = case.get("values", [None] * (index + 1))[index]
        place.advance({} if value is None else {name: value})
        asked = (index + 1) % case["called_every"] == 0
        found["fired"].append(trigger(place) if asked else None)
        found["attrs"].append(attributes(trigger))
        if index + 1 == case["resume_after"]:
            state = json.loads(json.dumps(trigger.state_dict()))
            trigger = build(case)
            trigger.load_state_dict(state)
    return found


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in found)
    if isinstance(found, float) and isinstance(expected, float):
        # The mean of a few values: numpy's running sum there, the exact sum here.
        return math.isclose(found, expected, rel_tol=1e-14)
    return bool(found == expected)


def expected_values(number: int, field: str) -> list[Any]:
    values = list(CASES[number][field])
    for difference in DIFFERENCES:
        if difference["case"] == number and difference["field"] == field:
            for index, value in zip(difference["at"], difference["values"], strict=True):
                values[index] = value
    return values


@pytest.mark.filterwarnings("ignore:.*was not observed since the last check:UserWarning")
@pytest.mark.parametrize("number", range(len(CASES)))
def test_agrees_with_the_trace(number: int) -> None:
    found = replay(CASES[number])
    for field in {"fired", "attrs"} & CASES[number].keys():
        expected = expected_values(number, field)
        wrong = [i for i, pair in enumerate(zip(found[field], expected, strict=True)) if not same(*pair)]
        assert not wrong, (
            f"{field} {wrong}: {[found[field][i] for i in wrong]}, not {[expected[i] for i in wrong]}"
        )


@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: f"case{difference['case']}")
def test_every_listed_difference_still_differs(difference: dict[str, Any]) -> None:
    recorded = CASES[difference["case"]][difference["field"]]
    assert difference["reason"]
    for index, value in zip(difference["at"], difference["values"], strict=True):
        assert not same(value, recorded[index]), f"entry {index} no longer differs; take it off the list"


def test_every_case_is_replayed() -> None:
    assert len(CASES) == NUM_CASES
