"""Loss scales where their numbers are tensors do what they do as values; and NNabla's way to count."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, strategies as st

from lockstep.precision import DynamicLossScale, LossScale, RampLossScale, StaticLossScale, nnabla_loss_scale

# F a finite gradient, N one that is not; the factor after each.
TABLES: list[tuple[LossScale, str, list[float]]] = [
    (StaticLossScale(128.0), "FNF", [128, 128, 128]),
    (DynamicLossScale(8.0, interval=1), "FFNF", [16, 32, 16, 32]),
    (DynamicLossScale(8.0, interval=3), "FFFFFNFFF", [8, 8, 16, 16, 16, 8, 8, 8, 16]),
    (
        DynamicLossScale(8.0, interval=2, minimum=4.0, maximum=16.0),
        "NNNFFFFFF",
        [4, 4, 4, 4, 8, 8, 16, 16, 16],
    ),
    (DynamicLossScale(9.0, growth=3.0, backoff=None, interval=1), "NFF", [3, 9, 27]),
    (DynamicLossScale(8.0, growth=4.0, backoff=0.25, interval=2), "FFNFF", [8, 32, 8, 8, 32]),
    (RampLossScale(), "FFFF", [2, 4, 8, 16]),
    (RampLossScale(interval=1), "FFNFN", [2, 4, 2, 4, 2]),
    (RampLossScale(), "NNF", [1, 1, 2 ** (1 / 1000)]),
    (RampLossScale(32768.0), "FF", [65504, 65504]),
    (RampLossScale(interval=2), "FNFF", [2, 1, 2**0.5, 2**0.5 * 2**0.5]),
    (nnabla_loss_scale(interval=0), "FFFNFFF", [8, 16, 32, 16, 16, 32, 64]),
    (nnabla_loss_scale(interval=1), "FFFFFNFFFFF", [8, 8, 16, 16, 32, 16, 16, 16, 32, 32, 64]),
    (nnabla_loss_scale(interval=-1), "FFNF", [16, 32, 16, 32]),
]


@dataclass(frozen=True)
class AlternatingLossScale(LossScale):
    """A user's own policy, which knows only `after`."""

    def after(self, *, finite: bool) -> AlternatingLossScale:
        return AlternatingLossScale(4.0 if finite else 2.0)


def walk(scale: LossScale, events: str) -> list[LossScale]:
    found = []
    for event in events:
        scale = scale.after(finite=event == "F")
        found.append(scale)
    return found


def on_device(scale: LossScale, events: str) -> list[LossScale]:
    moving, found = scale.moving_on(torch.device("cpu")), []
    for event in events:
        moving = scale.after_on_device(moving, torch.tensor(float(event == "N")))
        found.append(scale.with_moving(moving))
    return found


@pytest.mark.parametrize(("scale", "events", "factors"), TABLES)
def test_table(scale: LossScale, events: str, factors: list[float]) -> None:
    assert [each.factor for each in walk(scale, events)] == factors


@pytest.mark.parametrize(("scale", "events", "factors"), TABLES)
def test_table_with_a_save_and_a_load_in_the_middle(scale: LossScale, events: str, factors: list[float]) -> None:
    for middle in range(len(events)):
        before = [scale, *walk(scale, events[:middle])]
        saved = json.loads(json.dumps(before[-1].state_dict()))
        after = walk(scale.restored(saved), events[middle:])
        assert [each.factor for each in [*before[1:], *after]] == factors


@pytest.mark.parametrize(("scale", "events"), [table[:2] for table in TABLES])
def test_table_on_the_device(scale: LossScale, events: str) -> None:
    assert on_device(scale, events) == walk(scale, events)


@given(
    st.sampled_from(
        [
            DynamicLossScale(3.0, growth=1.7, backoff=0.3, interval=3, minimum=0.1, maximum=50.0),
            RampLossScale(interval=3.5, maximum=100.0),
            nnabla_loss_scale(3.0, 1.3, 2, minimum=0.1, maximum=50.0),
        ]
    ),
    st.text("FN", max_size=60),
)
def test_the_device_does_what_the_values_do_and_stays_in_bounds(scale: LossScale, events: str) -> None:
    values = walk(scale, events)
    assert on_device(scale, events) == values
    bounds = scale.state_dict()
    assert all(bounds["minimum"] <= each.factor <= bounds["maximum"] for each in values)


def test_a_policy_that_knows_only_after_works_on_the_device_too() -> None:
    scale = AlternatingLossScale(1.0)
    assert on_device(scale, "FNF") == walk(scale, "FNF")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"uncounted": -1}, "`uncounted` must be at least 0, got -1."),
        (
            {"interval": 3, "finite_updates": 3},
            "`finite_updates` must lie in -`uncounted`..`interval` - 1 (0..2), got 3.",
        ),
    ],
)
def test_bad_numbers_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match="must") as caught:
        DynamicLossScale(**options)
    assert str(caught.value) == message
