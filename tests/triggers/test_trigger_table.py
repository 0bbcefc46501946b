"""Triggers by table: when they are asked, what they answer, and the same with a save and load in between."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from lockstep.errors import StateError
from lockstep.metrics import Mean, Observed
from lockstep.triggers import (
    AllOf,
    AnyOf,
    BestValue,
    EarlyStopping,
    Interval,
    Latch,
    ManualSchedule,
    MaxValue,
    MinValue,
    Never,
    Once,
    Progress,
    Time,
    Trigger,
    TriggerSpec,
    Until,
    get_trigger,
    get_until,
)
from tests.support.plain_updaters import CountingUpdater, Place

NAN = math.nan


def early(**options: Any) -> EarlyStopping:
    return EarlyStopping("x", **{"patience": 2, "check_trigger": (1, "iteration"), "max_trigger": None, **options})


# build, updates per epoch, observed values (None: not observed) or the number of updates, answers
TABLE: list[tuple[Callable[[], Trigger], float, Sequence[Observed | None], str]] = [
    (lambda: Interval(1, "iteration"), 5, [None] * 5, "11111"),
    (lambda: Interval(2, "update"), 5, [None] * 6, "010101"),
    (lambda: Interval(3, "epoch"), 1, [None] * 7, "0010010"),
    (lambda: Interval(1.5, "epoch"), 2, [None] * 7, "0010010"),
    (lambda: Interval(1, "epoch"), 2.5, [None] * 8, "00101001"),
    (lambda: Interval(1, "epoch"), 0.5, [None] * 3, "111"),
    # 3 / 10 divided by 0.1 is a little less than 3, and 0.1 of an epoch is due all the same.
    (lambda: Interval(0.1, "epoch"), 10, [None] * 10, "1111111111"),
    (lambda: Interval(10, "second"), 4, [None] * 9, "001001001"),
    (lambda: ManualSchedule([7, 3], "iteration"), 4, [None] * 8, "00100010"),
    (lambda: ManualSchedule(0.3, "epoch"), 10, [None] * 5, "00100"),
    (lambda: ManualSchedule([0.3, 0.5], "epoch"), 2, [None] * 3, "100"),
    (Once, 4, [None] * 3, "100"),
    (lambda: Time(10), 4, [None] * 9, "001001001"),
    (
        lambda: early(min_delta=0.5),
        4,
        [3.0, 2.6, 2.5, 2.4, 1.9],
        "00100",
    ),
    # One tenth of 2.0 is 0.2: from 2.0 only a mean below 1.8 improves.
    (lambda: early(min_delta=0.1, relative=True), 4, [2.0, 1.9, 1.75, 1.6], "0000"),
    (lambda: early(min_delta=0.1, relative=True), 4, [2.0, 1.9, 1.85, 1.6], "0010"),
    (lambda: early(min_delta=0.1, relative=True, mode="max"), 4, [-2.0, -1.9, -1.7, -1.6, -1.6], "00001"),
    (lambda: early(stop_at=1.0, patience=9), 4, [2.0, 1.5, 1.0, 1.5, 0.5], "00101"),
    (lambda: early(stop_at=0.9, patience=9, mode="max"), 4, [0.5, 0.95, 0.8], "010"),
    (lambda: early(diverge_at=4.0, patience=9), 4, [2.0, 4.0, 4.5, 1.0], "0010"),
    (lambda: early(diverge_at=0.1, patience=9, mode="max"), 4, [0.5, 0.1, 0.05], "001"),
    (lambda: early(patience=9), 4, [1.0, NAN, math.inf], "000"),
    (lambda: early(patience=9, check_finite=True), 4, [1.0, NAN, math.inf, 1.0], "0110"),
    (lambda: early(min_epochs=2, patience=1), 2, [1.0, 1.0, 1.0, 1.0, 0.5, 0.5], "000101"),
    (lambda: early(min_epochs=1.5, stop_at=9.0), 2, [1.0, 1.0, 1.0], "001"),
    (lambda: Interval(2, "iteration") & Interval(3, "iteration"), 4, [None] * 7, "0000010"),
    (lambda: Interval(2, "iteration") | Interval(3, "iteration"), 4, [None] * 7, "0111010"),
    (lambda: Until(2, "epoch") & early(patience=1), 2, [1.0, 1.0, 1.0, 0.5, 0.5], "00001"),
    # Each of them sees every update, whatever the others return.
    (lambda: AllOf(Never(), Once()) | AnyOf(Interval(4, "iteration"), Once()), 4, [None] * 5, "10010"),
    (Never, 4, [None] * 3, "000"),
    (lambda: Until(2, "epoch"), 2, [None] * 6, "000111"),
    (lambda: Latch(Interval(2, "iteration")), 4, [None] * 5, "01111"),
    (
        lambda: Latch(EarlyStopping("x", patience=1, check_trigger=(1, "iteration"))),
        4,
        [3.0, 2.0, 2.0, 1.0],
        "0011",
    ),
    (lambda: MinValue("x", (1, "iteration")), 4, [3.0, 3.0, 2.0, NAN, 2.5, 1.0], "101001"),
    (lambda: MinValue("x", (1, "iteration")), 4, [NAN, 3.0, math.inf, -math.inf, NAN], "01010"),
    (lambda: MaxValue("x", (2, "iteration")), 4, [1.0, 3.0, None, 2.0, 2.0, 2.5], "010001"),
    (
        lambda: BestValue("x", lambda best, new: abs(new) < abs(best), (1, "iteration")),
        4,
        [-2.0, 3.0, 1.0],
        "101",
    ),
    # Samples count equally: (1·30 + 5·2) / 32 = 1.25 is less than the 2 before, though (1 + 5) / 2 is not.
    (lambda: MinValue("x", (2, "iteration")), 4, [2.0, 2.0, Mean(30.0, 30), Mean(10.0, 2)], "0101"),
    (
        lambda: EarlyStopping("main/accuracy", patience=3, check_trigger=(1, "iteration"), max_trigger=None),
        4,
        [0.5, 0.5, 0.6, 0.7, 0.6, 0.4, 0.3, 0.2],
        "00000011",
    ),
    (
        lambda: EarlyStopping("x", patience=2, mode="max", check_trigger=(2, "iteration"), max_trigger=None),
        4,
        [None, torch.tensor(1.0), None, torch.tensor(0.5), torch.tensor(0.25), torch.tensor(0.75)],
        "000001",
    ),
    # As in Chainer, checks at 2, 4, 8 and 10 find no value; those at 6 and 12 judge the mean of all since.
    (
        lambda: EarlyStopping("x", patience=1, check_trigger=(2, "iteration"), max_trigger=None),
        4,
        [None, None, 1.0, None, None, 2.0, None, None, 3.0, None, None, 4.0],
        "000000000001",
    ),
    (
        lambda: EarlyStopping("x", patience=1, check_trigger=(2, "iteration"), max_trigger=None),
        4,
        [3.0, None, 2.0, None, 1.0, 6.0, 1.0, 4.0, 0.5, None, 0.5, 2.75],
        "000000000000",
    ),
    (
        lambda: EarlyStopping("x", patience=1, check_trigger=(1, "iteration"), max_trigger=None),
        4,
        [NAN, 1.0, 0.5],
        "100",
    ),
    (
        lambda: EarlyStopping("x", patience=9, check_trigger=(1, "iteration"), max_trigger=(3, "iteration")),
        4,
        [3.0, 2.0, 1.0, 0.5],
        "0010",
    ),
]


def run(
    build: Callable[[], Trigger], per_epoch: float, values: Sequence[Observed | None], saved_after: int | None
) -> str:
    trigger, answers = build(), ""
    place = Place(CountingUpdater(per_epoch), {})
    trigger.initialize(place)
    for index, value in enumerate(values):
        names = ("x", "main/accuracy")
        place.advance({} if value is None else dict.fromkeys(names, value))
        place.elapsed_time = 3.5 * (index + 1)
        answers += str(int(trigger(place)))
        if index + 1 == saved_after:
            state = json.loads(json.dumps(trigger.state_dict()))
            trigger = build()
            trigger.load_state_dict(state)
            trigger.initialize(place)
    return answers


UNOBSERVED = pytest.mark.filterwarnings("ignore:'x' was not observed at this check:UserWarning")


@UNOBSERVED
@pytest.mark.parametrize("row", range(len(TABLE)))
def test_table(row: int) -> None:
    build, per_epoch, values, answers = TABLE[row]
    assert run(build, per_epoch, values, saved_after=None) == answers


@UNOBSERVED
@pytest.mark.parametrize("row", range(len(TABLE)))
def test_table_with_a_save_and_load_after_every_call(row: int) -> None:
    build, per_epoch, values, answers = TABLE[row]
    for saved_after in range(1, len(values) + 1):
        assert run(build, per_epoch, values, saved_after) == answers, f"saved after {saved_after}"


def test_the_table_tells_a_lost_state_from_a_kept_one() -> None:
    place = Place(CountingUpdater(4), {})
    answers = ""
    for _ in range(4):
        place.advance()
        forgetful = Interval(3, "iteration")
        answers += str(int(forgetful(place)))
    assert answers == "0011"  # not 0010


def test_an_interval_that_was_not_asked_fires_once_for_all_it_missed() -> None:
    place, trigger = Place(CountingUpdater(4), {}), Interval(2, "iteration")
    place.updater.num_done = 7
    assert trigger(place)
    assert not trigger(place)


@pytest.mark.parametrize("build", [lambda: Interval(100, "iteration"), lambda: ManualSchedule(3, "iteration")])
def test_a_trigger_that_joins_late_does_not_fire_for_what_came_before(build: Callable[[], Trigger]) -> None:
    place, trigger = Place(CountingUpdater(4), {}), build()
    place.updater.num_done = 501
    trigger.initialize(place)
    place.advance()
    assert not trigger(place)


def test_once_fires_again_after_a_resume_if_told_so() -> None:
    place, trigger = Place(CountingUpdater(4), {}), Once(call_on_resume=True)
    assert [trigger(place), trigger(place)] == [True, False]
    resumed = Once(call_on_resume=True)
    resumed.load_state_dict(trigger.state_dict())
    assert [resumed(place), resumed(place)] == [True, False]


def test_time_catches_up_one_appointment_a_call() -> None:
    place, trigger = Place(CountingUpdater(4), {}, elapsed_time=10.0), Time(10)
    assert not trigger(place)
    place.elapsed_time = 35.0
    assert [trigger(place) for _ in range(4)] == [True, True, True, False]


def test_a_manual_schedule_is_finished_behind_its_last_point() -> None:
    place, trigger = Place(CountingUpdater(4), {}), ManualSchedule([1, 2], "iteration")
    finished = []
    for _ in range(3):
        place.advance()
        trigger(place)
        finished.append(trigger.finished)
    assert finished == [False, True, True]


def test_best_value_names_what_was_there_instead() -> None:
    place, trigger = Place(CountingUpdater(4), {}), MinValue("main/loss", (1, "iteration"))
    place.advance({"main/losses": 1.0})
    with pytest.raises(KeyError, match=r"`key` must be observed .* got 'main/loss'; there is 'main/losses'"):
        trigger(place)


def test_early_stopping_warns_of_a_check_without_a_value_and_leaves_it_out() -> None:
    place, trigger = (
        Place(CountingUpdater(4), {}),
        EarlyStopping("x", patience=1, check_trigger=(1, "iteration")),
    )
    place.advance()
    with pytest.warns(UserWarning, match="'x' was not observed at this check"):
        assert not trigger(place)
    assert trigger.count == 0


def test_early_stopping_keeps_the_values_before_a_check_without_one() -> None:
    place = Place(CountingUpdater(4), {})
    trigger = EarlyStopping("x", patience=1, check_trigger=(2, "iteration"))
    for value in (1.0, None, 3.0):
        place.advance({} if value is None else {"x": value})
        if value is None:
            with pytest.warns(UserWarning, match="'x' was not observed at this check"):
                assert not trigger(place)
            assert trigger.best is None
        else:
            assert not trigger(place)
    place.advance({"x": 5.0})
    assert not trigger(place)
    assert trigger.best == 3.0


def test_a_latch_shows_an_observation_once() -> None:
    place = Place(CountingUpdater(4), {})
    inner = EarlyStopping("x", patience=3, check_trigger=(2, "iteration"))
    trigger = Latch(inner)
    for value in (1.0, 3.0):
        place.advance({"x": value})
        assert not any(trigger(place) for _ in range(5))
    assert inner.best == 2.0


def stopping(limit: int | None = None, patience: int = 99) -> EarlyStopping:
    limit_trigger = None if limit is None else (limit, "iteration")
    return EarlyStopping("x", patience=patience, check_trigger=(1, "iteration"), max_trigger=limit_trigger)


BOUNDS: dict[str, Callable[[int], TriggerSpec]] = {
    "a pair": lambda bound: (bound, "iteration"),
    "Until": lambda bound: Until(bound, "iteration"),
    "Interval": lambda bound: Interval(bound, "iteration"),
    "ManualSchedule": lambda bound: ManualSchedule(bound, "iteration"),
    "Time": lambda bound: Time(10 * (bound - 1)),
    "a function": lambda bound: lambda progress: progress.updater.iteration >= bound,
    "a limit": stopping,
    "patience": lambda bound: stopping(patience=bound - 1),
    "a function as a limit": lambda bound: EarlyStopping(
        "x",
        patience=99,
        check_trigger=(1, "iteration"),
        max_trigger=lambda progress: progress.updater.iteration >= bound,
    ),
    "a limit in a latch": lambda bound: Latch(stopping(bound)),
}


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize(("later", "stops_at"), [(7, 7), (4, 4), (2, 4)])
def test_a_run_goes_on_that_is_loaded_with_a_later_bound(name: str, later: int, stops_at: int) -> None:
    place, first, second = Place(CountingUpdater(4), {}), *(get_until(BOUNDS[name](n)) for n in (4, later))

    def run_on(trigger: Trigger) -> int:
        trigger.initialize(place)
        while not trigger(place):
            assert place.updater.iteration < 20
            place.advance({"x": 1.0})
            place.elapsed_time += 10.0
        return place.updater.iteration

    assert run_on(first) == 4
    for _ in range(2):
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert run_on(second) == stops_at
        first = second
    assert [run_on(first), run_on(second)] == [stops_at, stops_at]


def test_what_has_fired_stays_fired_where_a_trigger_says_nothing_of_bounds() -> None:
    class Third(Trigger):
        def __call__(self, progress: Progress) -> bool:
            return progress.updater.iteration == 3

    place, first, second = Place(CountingUpdater(4), {}), get_until(Third()), get_until(Third())
    while not first(place):
        place.advance()
    second.load_state_dict(first.state_dict())
    place.advance()
    assert second(place)


def test_get_trigger() -> None:
    place, interval = Place(CountingUpdater(4), {}), Interval(1, "epoch")
    assert get_trigger(interval) is interval
    assert isinstance(get_trigger(None), Never)
    pair = get_trigger((2, "epoch"))
    assert isinstance(pair, Interval)
    assert (pair.period, pair.unit) == (2, "epoch")
    assert get_trigger(lambda progress: progress.updater.iteration == 0)(place)


def test_get_until() -> None:
    assert isinstance(get_until((2, "epoch")), Until)
    assert isinstance(get_until(None), Latch)
    assert isinstance(get_until(EarlyStopping()), Latch)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: Interval(1, "day"), ValueError, "`unit` must be 'iteration', .* got 'day'"),
        (lambda: Interval(0, "epoch"), ValueError, "`period` must be above 0, got 0"),
        (lambda: Interval(NAN, "epoch"), ValueError, "`period` must be above 0, got nan"),
        (
            lambda: Interval(1.5, "iteration"),
            ValueError,
            "`period` must be a whole number of iterations, got 1.5",
        ),
        (lambda: ManualSchedule(1, "day"), ValueError, "`unit` must be 'iteration'"),
        (lambda: ManualSchedule([], "epoch"), ValueError, "`points` must be one or more numbers above 0"),
        (
            lambda: ManualSchedule([1, 0], "epoch"),
            ValueError,
            "`points` must be one or more numbers above 0",
        ),
        (lambda: Time(0), ValueError, "`seconds` must be above 0, got 0"),
        (lambda: Until(-1, "epoch"), ValueError, "`bound` must be at least 0, got -1"),
        (lambda: EarlyStopping(patience=0), ValueError, "`patience` must be at least 1, got 0"),
        (
            lambda: EarlyStopping(mode="best"),
            ValueError,
            "`mode` must be 'auto', 'min' or 'max', got 'best'",
        ),
        (lambda: get_trigger((1, 2, 3)), TypeError, r"must be a pair .* and a unit, got \(1, 2, 3\)"),
        (lambda: get_trigger(("epoch", 1)), TypeError, r"must be a pair .* and a unit, got \('epoch', 1\)"),
        (lambda: get_trigger("epoch"), TypeError, "`trigger` must be a Trigger, .* got 'epoch'"),
    ],
)
def test_refusals(build: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_a_state_that_does_not_fit_is_refused_by_name(row: int) -> None:
    trigger = TABLE[row][0]()
    before = trigger.state_dict()
    with pytest.raises(StateError, match="unknown: 'surplus'"):
        trigger.load_state_dict({**before, "surplus": 1})
    if before:
        with pytest.raises(StateError, match="missing: "):
            trigger.load_state_dict({})
    assert trigger.state_dict() == before


def test_a_nested_state_that_does_not_fit_changes_nothing() -> None:
    trigger = EarlyStopping("x")
    state = EarlyStopping("x").state_dict()
    state.update(best=1.0, count=2, max_trigger={})
    with pytest.raises(StateError, match="Interval must hold 'previous'"):
        trigger.load_state_dict(state)
    assert (trigger.best, trigger.count) == (None, 0)


@pytest.mark.parametrize("options", [{"min_delta": -1.0}, {"min_delta": NAN}, {"min_epochs": -1}])
def test_early_stopping_refuses_numbers_below_zero(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=rf"`{name}` must be at least 0, got"):
        EarlyStopping(**options)


def test_a_run_that_diverged_continues_with_another_threshold() -> None:
    trigger = early(diverge_at=1.0)
    place = Place(CountingUpdater(4), {})
    place.advance({"x": 2.0})
    assert trigger(place)
    wider = early(diverge_at=3.0)
    wider.load_state_dict(trigger.state_dict())
    assert (trigger.stays_fired(place), wider.stays_fired(place)) == (True, False)


def test_combined_triggers_refuse_pairs_and_the_same_trigger_twice() -> None:
    with pytest.raises(
        TypeError, match=r"`triggers` must be Trigger objects, got \(1, 'epoch'\). Use triggers.Interval"
    ):
        AnyOf(Once(), (1, "epoch"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unsupported operand"):
        Once() & (1, "epoch")  # type: ignore[operator]
    once = Once()
    for triggers in ((), (once, once)):
        with pytest.raises(ValueError, match="`triggers` must be at least one trigger, and none of them twice"):
            AllOf(*triggers)


def test_combined_triggers_restore_all_or_nothing() -> None:
    trigger = AllOf(Interval(1, "iteration"), Once())
    before = trigger.state_dict()
    with pytest.raises(StateError):
        trigger.load_state_dict({"0": {"previous": 3}, "1": {}})
    assert trigger.state_dict() == before


@pytest.mark.parametrize(
    ("trigger", "text"),
    [
        (Interval(2, "epoch") & Once(), "AllOf((2, 'epoch'), Once())"),
        (MaxValue("x") | Never(), "AnyOf(MaxValue('x', trigger=(1, 'epoch')), Never())"),
        (EarlyStopping("x"), "EarlyStopping('x', patience=3, mode='min')"),
        (get_trigger(math.isnan), "isnan"),  # type: ignore[arg-type]
    ],
)
def test_triggers_are_described(trigger: Trigger, text: str) -> None:
    assert repr(trigger) == text


def test_combined_triggers_are_finished_as_their_parts_are() -> None:
    fired = Once()
    fired(Place(CountingUpdater(4), {}))
    assert ((fired & Never()).finished, (fired | Never()).finished, AnyOf(fired).finished) == (True, False, True)
    assert ((fired & Never()).stays_fired(Place(CountingUpdater(4), {}))) is False
