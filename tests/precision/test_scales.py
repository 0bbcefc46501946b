"""Loss scales by table: a row of gradients, a row of factors; and the same with a save in the middle."""

from __future__ import annotations

import math
from typing import Any

import pytest

import lockstep as ls
from lockstep.errors import StateError
from lockstep.precision import LossScale, parse_loss_scale, parse_precision

CREEP = 2.0 ** (1 / 4)

TABLE: dict[str, tuple[LossScale, str, list[float]]] = {
    # "+" is a finite gradient, "-" one that is not; after each the factor of the next try.
    "static": (ls.StaticLossScale(3.0), "+-+", [3.0, 3.0, 3.0]),
    "grows after the interval": (
        ls.DynamicLossScale(factor=8.0, interval=3),
        "++++++",
        [8.0, 8.0, 16.0, 16.0, 16.0, 32.0],
    ),
    "an overflow begins the interval anew": (
        ls.DynamicLossScale(factor=8.0, interval=2),
        "+-+++",
        [8.0, 4.0, 4.0, 8.0, 8.0],
    ),
    "floor": (ls.DynamicLossScale(factor=4.0, minimum=1.0), "----", [2.0, 1.0, 1.0, 1.0]),
    "floor between steps": (ls.DynamicLossScale(factor=4.0, minimum=3.0), "--", [3.0, 3.0]),
    "ceiling": (
        ls.DynamicLossScale(factor=8.0, interval=1, maximum=20.0),
        "+++-",
        [16.0, 20.0, 20.0, 10.0],
    ),
    "own growth and backoff": (
        ls.DynamicLossScale(factor=9.0, growth=3.0, backoff=1 / 3, interval=1),
        "+-",
        [27.0, 9.0],
    ),
    "ramp": (ls.RampLossScale(interval=4), "+++", [2.0, 4.0, 8.0]),
    "ramp creeps after an overflow": (
        ls.RampLossScale(factor=8.0, interval=4),
        "-++-",
        [4.0, 4.0 * CREEP, 4.0 * CREEP * CREEP, 2.0 * CREEP * CREEP],
    ),
    "ramp floor": (ls.RampLossScale(factor=1.0), "--", [1.0, 1.0]),
    "ramp ceiling": (ls.RampLossScale(factor=65504.0), "+", [65504.0]),
}


@pytest.mark.parametrize("saved_after", [None, 0, 1, 2])
@pytest.mark.parametrize("case", TABLE)
def test_the_factor_follows_the_table(case: str, saved_after: int | None) -> None:
    scale, gradients, factors = TABLE[case]
    fresh = scale
    found = []
    for index, gradient in enumerate(gradients):
        if index == saved_after:
            scale = fresh.restored(dict(scale.state_dict()))
        scale = scale.after(finite=gradient == "+")
        found.append(scale.factor)
    assert found == factors


def test_no_number_of_bad_gradients_brings_a_factor_to_zero() -> None:
    for fresh in (ls.DynamicLossScale(), ls.RampLossScale(), ls.StaticLossScale()):
        scale: LossScale = fresh
        for _ in range(3000):
            scale = scale.after(finite=False)
        assert scale.factor >= 2.0**-14
    for fresh in (ls.DynamicLossScale(interval=1), ls.RampLossScale(), ls.StaticLossScale()):
        scale = fresh
        for _ in range(3000):
            scale = scale.after(finite=True)
        assert math.isfinite(scale.factor)


BAD: dict[str, tuple[type[LossScale], dict[str, Any], str]] = {
    "factor 0": (ls.StaticLossScale, {"factor": 0.0}, "`factor` must be finite and above 0, got 0.0."),
    "factor inf": (
        ls.DynamicLossScale,
        {"factor": math.inf},
        "`factor` must be finite and above 0, got inf.",
    ),
    "below the floor": (
        ls.DynamicLossScale,
        {"factor": 1.0, "minimum": 2.0},
        "`factor` must lie in `minimum`..`maximum` (2.0..16777216.0), got 1.0.",
    ),
    "no growth": (ls.DynamicLossScale, {"growth": 1.0}, "`growth` must be finite and above 1, got 1.0."),
    "no backoff": (ls.DynamicLossScale, {"backoff": 1.0}, "`backoff` must lie in (0, 1), got 1.0."),
    "no interval": (ls.DynamicLossScale, {"interval": 0}, "`interval` must be at least 1, got 0."),
    "ramp interval": (ls.RampLossScale, {"interval": math.nan}, "`interval` must be at least 1, got nan."),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_scale_is_refused(case: str) -> None:
    kind, options, message = BAD[case]
    with pytest.raises(ValueError, match="must") as caught:
        kind(**options)
    assert str(caught.value) == message


def test_a_state_of_another_scale_is_refused() -> None:
    with pytest.raises(
        StateError, match=r"The state of a DynamicLossScale must hold 'factor', .*unknown: 'overflowed'"
    ):
        ls.DynamicLossScale().restored(ls.RampLossScale().state_dict())


def test_what_the_user_writes_as_a_scale() -> None:
    assert parse_loss_scale(None) == ls.StaticLossScale(1.0)
    assert parse_loss_scale(128) == ls.StaticLossScale(128.0)
    assert parse_loss_scale(ls.RampLossScale()) == ls.RampLossScale()
    with pytest.raises(TypeError, match="must be a number, a LossScale or None, got a bool"):
        parse_loss_scale(True)


def test_what_the_user_writes_as_a_precision() -> None:
    names = ["fp32", "bf16", "fp16", "bf16-true", "fp16-true"]
    assert [parse_precision(name).name for name in names] == names
    with pytest.raises(ValueError, match=r"`precision` must be one of 'fp32', .*, 'fp16-true', got 'tf32'\."):
        parse_precision("tf32")
