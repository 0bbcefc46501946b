"""Which cases of a long table run every day."""

from __future__ import annotations

import pytest


@pytest.mark.each_value
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("second", ["a", "b", "c", "d"])
def test_a_table_runs_few_cases_every_day(first: int, second: str, request: pytest.FixtureRequest) -> None:  # noqa: ARG001 - the table
    function: pytest.Function = request.node
    table = [item for item in request.session.items if item.nodeid.startswith(function.nodeid.partition("[")[0])]
    daily = [item for item in table if item.get_closest_marker("slow") is None]
    assert len(daily) <= 6
