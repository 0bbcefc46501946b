"""Positions of random streams: no two uses share one while a run is of ordinary length."""

from __future__ import annotations

from hypothesis import given, strategies as st

from lockstep.streams.seeds import INITIALISATION, STEP, computation_substream, substream

positions = st.integers(0, 2**28 - 1)


def test_the_first_computation_counts_from_the_start() -> None:
    assert computation_substream(0) == 0


@given(st.integers(0, 15), positions, st.integers(0, 15), positions)
def test_sixteen_lanes_never_share_a_position_within_as_many_shards(
    first: int, at: int, second: int, other: int
) -> None:
    same = (substream(first) + at) % 2**32 == (substream(second) + other) % 2**32
    assert same == ((first, at) == (second, other))


def test_every_use_has_a_lane_of_its_own() -> None:
    uses = [substream(STEP), substream(INITIALISATION), *map(computation_substream, range(50))]
    assert len(set(uses)) == len(uses)
