"""Tables of which each value runs once a day: the rest is slow."""

from __future__ import annotations

import pytest

from tests.support.selection import leave_repeated_values_to_slow


@pytest.mark.each_value
@pytest.mark.parametrize("first", ["a", "b", "c"])
@pytest.mark.parametrize("second", [1.0, [2.0], None])
def test_a_table(first: str, second: object) -> None:
    assert (first, second) != ("a", "b")


def test_each_value_runs_once_and_the_rest_is_slow(request: pytest.FixtureRequest) -> None:
    items = [item for item in request.node.parent.collect() if item.originalname == "test_a_table"]
    assert len(items) == 9
    leave_repeated_values_to_slow(items)
    daily = [item.callspec.params for item in items if item.get_closest_marker("slow") is None]
    assert len(daily) == 3
    assert {case["first"] for case in daily} == {"a", "b", "c"}
    assert {str(case["second"]) for case in daily} == {"1.0", "[2.0]", "None"}
