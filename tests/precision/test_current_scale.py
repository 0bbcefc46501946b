"""A loss scale that moves from the host to a device and back is the same scale."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from lockstep.precision import CurrentScale, DynamicLossScale, LossScale, RampLossScale, StaticLossScale
from tests.support.reads import Reads

CPU = torch.device("cpu")
SCALES: list[LossScale] = [
    StaticLossScale(3.0),
    DynamicLossScale(3.0, growth=1.7, backoff=0.3, interval=2, minimum=0.1, maximum=50.0),
    RampLossScale(interval=3.5, maximum=100.0),
]


@given(st.sampled_from(SCALES), st.lists(st.sampled_from(["finite", "bad", "look", "load", "bring"])))
def test_it_does_what_the_value_does_wherever_it_is(scale: LossScale, events: list[str]) -> None:
    moving = CurrentScale(scale)
    for event in events:
        if event == "look":
            assert moving.value == scale
        elif event == "load":
            moving = CurrentScale(scale)
        elif event == "bring":
            assert moving.factor_on(CPU).item() == scale.factor
        else:
            moving = moving.after(torch.tensor(float(event == "bad")))
            scale = scale.after(finite=event == "finite")
    assert moving.value == scale
    assert moving.factor_on(CPU).dtype == torch.float64
    assert moving.factor_on(CPU).item() == scale.factor


@pytest.mark.parametrize("scale", SCALES)
def test_following_reads_nothing(scale: LossScale) -> None:
    moving = CurrentScale(scale)
    with Reads() as reads:
        for _ in range(5):
            moving.factor_on(CPU)
            moving = moving.after(torch.ones(()))
    assert reads.count == 0
    with Reads() as reads:
        moving.factor_on(CPU).item()
    assert reads.count == 1  # else the count above would say nothing


def test_only_a_static_scale_is_fixed() -> None:
    assert [CurrentScale(scale).fixed_factor is None for scale in SCALES] == [False, True, True]
