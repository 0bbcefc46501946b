"""The loop: order, ends, errors, and a run that is broken off anywhere and goes on."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import OrderError, StateError
from lockstep.metrics import Mean
from lockstep.trainer import EDITOR, READER, WRITER, Extension, FunctionExtension, Trainer, make_extension
from lockstep.triggers import EarlyStopping, ManualSchedule, MaxValue, Never, Once, Progress, Trigger, TriggerSpec
from tests.support.plain_updaters import CountingUpdater, LoopUpdater

Events = list[tuple[Any, ...]]


class Recorder(Extension):
    """Writes down each call, and fails where it is told to, once."""

    def __init__(
        self,
        name: str,
        events: Events,
        *,
        priority: int = READER,
        trigger: TriggerSpec = (1, "iteration"),
        fail: tuple[str, int] | None = None,
        error: BaseException | None = None,
    ) -> None:
        self._name = name
        self.events = events
        self.priority = priority
        self.trigger = trigger
        self.fail = fail
        self.error = error or ValueError(f"{name} fails")
        self.num_calls = 0

    @property
    def name(self) -> str:
        return self._name

    def __call__(self, trainer: Trainer) -> None:
        self._note("call", trainer)
        self.num_calls += 1

    def initialize(self, trainer: Trainer) -> None:
        self._note("initialize", trainer)

    def finalize(self, trainer: Trainer) -> None:
        self._note("finalize", trainer)

    def on_error(self, trainer: Trainer, error: BaseException) -> None:
        self._note("on_error", trainer, type(error).__name__)

    def state_dict(self) -> dict[str, object]:
        return {"num_calls": self.num_calls}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.keys() != {"num_calls"}:
            raise StateError(f"The state of {self.name} must hold 'num_calls', got {sorted(state)}.")
        self.num_calls = state["num_calls"]

    def _note(self, what: str, trainer: Trainer, *more: str) -> None:
        if self.fail == (what, trainer.updater.iteration):
            self.fail = None
            raise self.error
        self.events.append((self.name, what, trainer.updater.iteration, *more))


def calls(events: Events) -> Events:
    return [(name, iteration) for name, what, iteration, *_ in events if what == "call"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_extensions_run_by_priority_then_in_the_order_they_were_added(out: Path) -> None:
    events: Events = []
    trainer = Trainer(CountingUpdater(), (1, "iteration"), out)
    for name, priority in [("r1", READER), ("w", WRITER), ("r2", READER), ("last", -100), ("e", EDITOR)]:
        trainer.extend(Recorder(name, events, priority=priority))
    trainer.run()
    order = ["w", "e", "r1", "r2", "last"]
    whats = [("initialize", 0), ("call", 1), ("finalize", 1)]
    assert events == [(name, what, at) for what, at in whats for name in order]


def test_extend_overrules_what_the_extension_says_and_leaves_it_alone(out: Path) -> None:
    events: Events = []
    early, late = Recorder("early", events), Recorder("late", events)
    trainer = Trainer(CountingUpdater(), (4, "iteration"), out, extensions=[early])
    trainer.extend(late, name="first", trigger=(2, "iteration"), priority=WRITER)
    trainer.run()
    assert calls(events) == [("early", 1), ("late", 2), ("early", 2), ("early", 3), ("late", 4), ("early", 4)]
    assert (late.name, late.trigger, late.priority) == ("late", (1, "iteration"), READER)
    assert trainer.get_extension("first") is late
    assert trainer.name_of(late) == "first"


def test_names_that_are_taken_get_a_number(out: Path) -> None:
    trainer = Trainer(CountingUpdater(), out=out)
    extensions = [Recorder("x", []) for _ in range(3)]
    for extension in extensions:
        trainer.extend(extension)
    assert [trainer.name_of(extension) for extension in extensions] == ["x", "x_1", "x_2"]
    with pytest.raises(KeyError, match=r"`name` must be one of \['x', 'x_1', 'x_2'\], got 'y'"):
        trainer.get_extension("y")
    with pytest.raises(KeyError, match="`extension` must be one of"):
        trainer.name_of(Recorder("z", []))


def test_functions_and_other_callables_are_extensions(out: Path) -> None:
    seen: list[str] = []

    class Thing:
        def __call__(self, trainer: Trainer) -> None:
            seen.append(f"object {trainer.updater.iteration}")

    @make_extension(trigger=(2, "iteration"), priority=WRITER, name="even")
    def decorated(trainer: Trainer) -> None:
        seen.append(f"even {trainer.updater.iteration}")

    def plain(trainer: Trainer) -> None:
        seen.append(f"plain {trainer.updater.iteration}")

    trainer = Trainer(CountingUpdater(), (2, "iteration"), out, extensions=[plain, decorated, Thing()])
    trainer.run()
    assert seen == ["plain 1", "object 1", "even 2", "plain 2", "object 2"]
    assert trainer.get_extension("even") is decorated
    assert isinstance(trainer.get_extension("plain"), FunctionExtension)
    assert isinstance(trainer.get_extension("Thing"), FunctionExtension)


def test_a_decorated_function_has_its_own_initialize_finalize_and_on_error(out: Path) -> None:
    seen: list[str] = []

    @make_extension(
        trigger=None,
        initialize=lambda _: seen.append("initialize"),
        finalize=lambda _: seen.append("finalize"),
        on_error=lambda _, error: seen.append(f"on_error {error}"),
    )
    def never(_: Trainer) -> None:
        seen.append("call")

    with pytest.raises(RuntimeError, match="boom"):
        Trainer(CountingUpdater(fail_at=1), (2, "iteration"), out, extensions=[never]).run()
    assert seen == ["initialize", "on_error boom", "finalize"]


def test_call_before_training_comes_once_before_the_first_update(out: Path) -> None:
    events: Events = []
    updater = CountingUpdater(fail_at=0)
    trainer = Trainer(updater, (1, "iteration"), out)
    trainer.extend(Recorder("x", events), call_before_training=True)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run()
    trainer.run()
    assert calls(events) == [("x", 0), ("x", 1)]


def test_observation_is_fresh_in_each_iteration(out: Path) -> None:
    seen = []

    def write(trainer: Trainer) -> None:
        if trainer.updater.iteration == 1:
            trainer.observe("once", torch.tensor(2.0, requires_grad=True))

    trainer = Trainer(CountingUpdater(losses=[Mean(6.0, 4), Mean(1.0, 1)]), (2, "iteration"), out)
    trainer.extend(lambda trainer: seen.append(dict(trainer.observation)))
    trainer.extend(write, priority=WRITER)
    trainer.run()
    assert seen == [{"main/loss": Mean(6.0, 4), "once": torch.tensor(2.0)}, {"main/loss": Mean(1.0, 1)}]
    assert not seen[0]["once"].requires_grad


@pytest.mark.parametrize("value", ["0.5", torch.zeros(1), None])
def test_observe_refuses_what_is_no_number(out: Path, value: Any) -> None:
    trainer = Trainer(CountingUpdater(), out=out)
    with pytest.raises(TypeError, match="An observed"):
        trainer.observe("x", value)
    assert trainer.observation == {}


def test_the_trainer_connects_itself_when_it_is_whole(out: Path) -> None:
    class Curious(CountingUpdater):
        def connect_trainer(self, trainer: Trainer) -> None:
            self.names = (trainer.name_of(extension), trainer.out, trainer.elapsed_time)

    extension, updater = Recorder("x", []), Curious()
    Trainer(updater, out=out, extensions=[extension])
    assert updater.names == ("x", out, 0.0)
    assert not out.exists()


# Ends


@pytest.mark.parametrize(
    ("until", "iterations"),
    [
        ((0, "iteration"), 0),
        ((3, "iteration"), 3),
        ((2, "epoch"), 8),
        ((0.5, "epoch"), 2),
        (ManualSchedule([2, 3], "iteration"), 2),
        (lambda trainer: trainer.updater.iteration == 5, 5),
        (EarlyStopping("main/loss", patience=2, check_trigger=(1, "iteration")), 3),
        (EarlyStopping("main/loss", patience=9, check_trigger=(1, "iteration"), max_trigger=(1, "epoch")), 4),
    ],
)
def test_a_run_ends_and_a_finished_run_stays_as_it_is(out: Path, until: TriggerSpec, iterations: int) -> None:
    events: Events = []
    updater = CountingUpdater(losses=[1.0] * 100)
    trainer = Trainer(updater, until, out, extensions=[Recorder("x", events)])
    trainer.run()
    assert updater.iteration == iterations
    ended, time = list(events), trainer.elapsed_time
    trainer.run()
    assert events == ended
    assert (updater.iteration, updater.num_finalized) == (iterations, 1 if iterations else 0)
    assert trainer.elapsed_time == time


def test_a_finished_run_that_is_resumed_does_nothing_and_with_a_later_bound_goes_on(out: Path) -> None:
    first = Trainer(CountingUpdater(), (1, "epoch"), out)
    first.run()
    for bound, iterations in [(1, 4), (2, 8)]:
        resumed = Trainer(CountingUpdater(), (bound, "epoch"), out)
        resumed.load_state_dict(first.state_dict())
        resumed.run()
        assert resumed.updater.iteration == iterations
        assert isinstance(resumed.updater, CountingUpdater)
        assert resumed.updater.num_finalized == (1 if bound == 2 else 0)


def test_a_run_ended_by_early_stopping_stays_ended_after_a_resume(out: Path) -> None:
    def build() -> Trainer:
        stop = EarlyStopping("main/loss", patience=1, check_trigger=(1, "iteration"))
        return Trainer(CountingUpdater(losses=[1.0] * 9), stop, out)

    first, resumed = build(), build()
    first.run()
    resumed.load_state_dict(first.state_dict())
    resumed.run()
    assert resumed.updater.iteration == first.updater.iteration == 2


def test_a_run_ended_by_the_limit_of_early_stopping_goes_on_with_a_later_one(out: Path) -> None:
    def build(limit: int) -> Trainer:
        stop = EarlyStopping("main/loss", patience=5, max_trigger=(limit, "epoch"))
        return Trainer(CountingUpdater(losses=[9.0 - step for step in range(9)]), stop, out)

    first, later, straight = build(1), build(2), build(2)
    first.run()
    later.load_state_dict(first.state_dict())
    later.run()
    straight.run()
    assert (first.updater.iteration, later.updater.iteration) == (4, 8)
    assert later.state_dict()["until"] == straight.state_dict()["until"]


# Errors


def test_an_error_in_an_update_ends_the_run_and_it_goes_on_where_it_stopped(out: Path) -> None:
    events: Events = []
    updater = CountingUpdater(fail_at=2)
    trainer = Trainer(updater, (3, "iteration"), out, extensions=[Recorder("x", events)])
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run()
    assert events == [
        ("x", "initialize", 0),
        ("x", "call", 1),
        ("x", "call", 2),
        ("x", "on_error", 2, "RuntimeError"),
        ("x", "finalize", 2),
    ]
    assert updater.num_finalized == 1
    trainer.run()
    assert events[5:] == [("x", "initialize", 2), ("x", "call", 3), ("x", "finalize", 3)]


@pytest.mark.parametrize("error", [ValueError("bad"), KeyboardInterrupt()])
def test_an_interrupted_extension_is_called_again_and_the_others_once(out: Path, error: BaseException) -> None:
    events: Events = []
    trainer = Trainer(CountingUpdater(), (2, "iteration"), out)
    trainer.extend(Recorder("a", events))
    trainer.extend(Recorder("b", events, fail=("call", 1), error=error))
    trainer.extend(Recorder("c", events))
    with pytest.raises(type(error)):
        trainer.run()
    trainer.run()
    assert calls(events) == [("a", 1), ("b", 1), ("c", 1), ("a", 2), ("b", 2), ("c", 2)]


def test_an_error_in_an_extension_that_fires_for_the_last_time_is_made_good(out: Path) -> None:
    events: Events = []
    trainer = Trainer(CountingUpdater(), (2, "iteration"), out)
    trainer.extend(Recorder("x", events, fail=("call", 1)), trigger=Once())
    with pytest.raises(ValueError, match="x fails"):
        trainer.run()
    trainer.run()
    assert [event for event in events if event[1] != "on_error"] == [
        ("x", "initialize", 0),
        ("x", "finalize", 1),
        ("x", "initialize", 1),
        ("x", "call", 1),
        ("x", "finalize", 2),
    ]


def test_what_fails_while_a_run_ends_hides_neither_the_error_nor_the_others(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events: Events = []
    trainer = Trainer(CountingUpdater(fail_at=0), (1, "iteration"), out)
    trainer.extend(Recorder("a", events, fail=("on_error", 0)))
    trainer.extend(Recorder("b", events, fail=("finalize", 0)))
    with pytest.raises(RuntimeError, match="boom") as caught:
        trainer.run()
    assert events[2:] == [("b", "on_error", 0, "RuntimeError"), ("a", "finalize", 0)]
    printed = capsys.readouterr().err
    assert "`on_error` of a raised while the run ended with RuntimeError:\nTraceback" in printed
    assert "`finalize` of b raised while the run ended with RuntimeError:\nTraceback" in printed
    if sys.version_info >= (3, 11):
        assert caught.value.__notes__ == [
            "`on_error` of a raised, too: ValueError: a fails",
            "`finalize` of b raised, too: ValueError: b fails",
        ]


def test_an_error_in_finalize_is_raised_after_all_are_finalized(out: Path) -> None:
    events: Events = []
    updater = CountingUpdater()
    trainer = Trainer(updater, (1, "iteration"), out)
    trainer.extend(Recorder("a", events, fail=("finalize", 1)))
    trainer.extend(Recorder("b", events))
    with pytest.raises(ValueError, match="a fails"):
        trainer.run()
    assert events[-1] == ("b", "finalize", 1)
    assert updater.num_finalized == 1
    trainer.run()
    assert updater.num_finalized == 1


def test_those_that_were_not_initialized_are_not_finalized(out: Path) -> None:
    events: Events = []
    trainer = Trainer(CountingUpdater(), (1, "iteration"), out)
    for name, fail in [("a", None), ("b", ("initialize", 0)), ("c", None)]:
        trainer.extend(Recorder(name, events, fail=fail))
    with pytest.raises(ValueError, match="b fails"):
        trainer.run()
    assert events == [("a", "initialize", 0), ("a", "on_error", 0, "ValueError"), ("a", "finalize", 0)]


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer: trainer.run(),
        lambda trainer: trainer.extend(Recorder("x", [])),
        lambda trainer: trainer.load_state_dict(trainer.state_dict()),
    ],
)
def test_what_a_run_under_way_refuses(out: Path, call: Callable[[Trainer], None]) -> None:
    trainer = Trainer(CountingUpdater(), (1, "iteration"), out, extensions=[call])
    with pytest.raises(OrderError, match="during a run"):
        trainer.run()


def test_a_model_is_no_updater(out: Path) -> None:
    with pytest.raises(TypeError, match="`updater` must be a lockstep Updater, got a Linear"):
        Trainer(torch.nn.Linear(1, 1), out=out)


def test_extend_refuses_what_cannot_be_called(out: Path) -> None:
    trainer = Trainer(CountingUpdater(), out=out)
    with pytest.raises(TypeError, match="`extension` must be an Extension or a function of the trainer, got 3"):
        trainer.extend(3)
    with pytest.raises(ValueError, match=r"`trigger\[1\]` must be 'iteration'"):
        trainer.extend(Recorder("x", []), trigger=(1, "day"))
    with pytest.raises(TypeError, match="`priority` must be an integer, got 'high'"):
        trainer.extend(Recorder("x", []), priority="high")
    with pytest.raises(TypeError, match="`priority` must be an integer, got 'low'"):
        trainer.extend(Recorder("x", [], priority="low"))  # type: ignore[arg-type]
    assert trainer.state_dict()["extensions"] == {}


def test_a_trigger_that_two_extensions_would_ask_is_refused(out: Path) -> None:
    trainer, shared = Trainer(CountingUpdater(), out=out), ManualSchedule(3, "iteration")
    trainer.extend(Recorder("x", []), trigger=shared)
    with pytest.raises(ValueError, match="`trigger` must be called for one purpose only, got that of x"):
        trainer.extend(Recorder("y", []), trigger=shared)
    ending = ManualSchedule(3, "iteration")
    trainer = Trainer(CountingUpdater(), ending, out=out)
    with pytest.raises(ValueError, match="`trigger` must be called for one purpose only, got that of `until`"):
        trainer.extend(Recorder("y", []), trigger=ending)


def test_what_is_observed_is_a_copy(out: Path) -> None:
    trainer, value = Trainer(CountingUpdater(), out=out), torch.tensor(1.0)
    trainer.observe("value", value)
    value.zero_()
    assert trainer.observation["value"] == 1.0


# Resume


class Doubling(Trigger):
    """Fires after 1, 2, 4, 8, ... updates, by an attribute."""

    def __init__(self) -> None:
        self.next = 1

    def __call__(self, progress: Progress) -> bool:
        fires = progress.updater.iteration >= self.next
        self.next *= 2 if fires else 1
        return fires


class Saving(Doubling):
    """The same with a state."""

    def state_dict(self) -> dict[str, object]:
        return {"next": self.next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


class Caller:
    """Counts its calls."""

    calls = 0

    def __call__(self, _: Trainer) -> None:
        self.calls += 1


@pytest.mark.parametrize(
    ("action", "trigger", "named"),
    [
        (len, Doubling, "Doubling remembers in 'next'"),
        (len, Saving, ""),
        (Caller(), Saving, "Caller remembers in 'calls'"),
    ],
)
def test_what_no_state_holds_is_named(out: Path, action: Any, trigger: type[Doubling], named: str) -> None:
    trainer = Trainer(CountingUpdater(), (5, "iteration"), out=out)
    trainer.extend((lambda _: None) if action is len else action, name="action", trigger=trigger())
    trainer.run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.state_dict()
        trainer.state_dict()
    found = [str(each.message) for each in caught]
    assert len(found) == bool(named)
    assert all(named in text for text in found)


class Saver(Extension):
    """Saves the trainer's state at one iteration, and then may pull the plug."""

    def __init__(self, at: int, *, plug: bool) -> None:
        self.at = at
        self.plug = plug
        self.state = ""

    def __call__(self, trainer: Trainer) -> None:
        if trainer.updater.iteration == self.at:
            self.state = json.dumps(trainer.state_dict())
            if self.plug:
                raise SystemExit


LOSSES = [3.0, 1.0, 2.0, 0.5, 4.0, 0.25, 0.75, 0.125, 2.0, 1.0, 0.0625, 3.0]


def busy_trainer(out: Path, events: Events, saver: Saver) -> Trainer:
    """Build a run with a saver in the middle and triggers of every kind on both sides of it."""
    trainer = Trainer(CountingUpdater(losses=LOSSES), (3, "epoch"), out)
    trainer.extend(lambda trainer: trainer.observe("seen", trainer.updater.iteration % 5), priority=400, name="observe")
    trainer.extend(Recorder("before/best", events), priority=300, trigger=MaxValue("seen", (2, "iteration")))
    trainer.extend(Recorder("before/3", events), priority=200, trigger=(3, "iteration"))
    trainer.extend(saver, priority=150)
    trainer.extend(Recorder("after/3", events), trigger=(3, "iteration"))
    trainer.extend(Recorder("after/best", events), trigger=MaxValue("main/loss", (2, "iteration")))
    trainer.extend(Recorder("after/points", events), trigger=ManualSchedule([4, 6, 9], "iteration"))
    trainer.extend(Recorder("after/epoch", events), trigger=(1, "epoch"), priority=-1000)
    return trainer


def undisturbed(out: Path) -> Events:
    events: Events = []
    busy_trainer(out, events, Saver(0, plug=False)).run()
    return calls(events)


@pytest.mark.parametrize("at", range(1, 13))
def test_a_run_killed_by_a_saver_amid_an_iteration_loses_and_repeats_no_call(out: Path, at: int) -> None:
    events: Events = []
    saver = Saver(at, plug=True)
    with pytest.raises(SystemExit):
        busy_trainer(out, events, saver).run()
    resumed = busy_trainer(out, events, Saver(0, plug=False))
    resumed.load_state_dict(json.loads(saver.state))
    resumed.run()
    assert calls(events) == undisturbed(out)


@pytest.mark.parametrize("at", range(1, 13))
def test_a_state_saved_amid_an_iteration_goes_on_there_and_fires_nothing_late(out: Path, at: int) -> None:
    earlier: Events = []
    later: Events = []
    saver = Saver(at, plug=False)
    busy_trainer(out, earlier, saver).run()
    resumed = busy_trainer(out, later, Saver(0, plug=False))
    resumed.load_state_dict(json.loads(saver.state))
    resumed.run()
    whole = undisturbed(out)
    assert calls(earlier) == whole  # saving changes nothing
    still_to_come = [call for call in whole if call[1] > at or (call[1] == at and call[0].startswith("after"))]
    assert calls(later) == still_to_come


def test_a_state_saved_after_an_error_has_the_failed_extension_still_to_come(out: Path) -> None:
    events: Events = []

    def build(fail: tuple[str, int] | None) -> Trainer:
        trainer = Trainer(CountingUpdater(losses=LOSSES), (4, "iteration"), out)
        trainer.extend(Recorder("a", events))
        trainer.extend(Recorder("b", events, fail=fail), trigger=(2, "iteration"))
        trainer.extend(lambda trainer: events.append(("loss", "call", float(trainer.observation["main/loss"]))))
        return trainer

    first, resumed = build(("call", 2)), build(None)
    with pytest.raises(ValueError, match="b fails"):
        first.run()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed.run()
    assert calls(events) == [
        ("a", 1),
        ("loss", 3.0),
        ("a", 2),
        ("b", 2),
        ("loss", 1.0),
        ("a", 3),
        ("loss", 2.0),
        ("a", 4),
        ("b", 4),
        ("loss", 0.5),
    ]


def test_elapsed_time_goes_on(out: Path) -> None:
    first = Trainer(CountingUpdater(), (2, "iteration"), out)
    times = [first.elapsed_time]
    first.extend(lambda trainer: times.append(trainer.elapsed_time))
    first.run()
    times.append(first.elapsed_time)
    assert times == sorted(set(times))
    assert times[0] == 0
    resumed = Trainer(CountingUpdater(), (3, "iteration"), out, extensions=[lambda _: None])
    state = json.loads(json.dumps(first.state_dict()))
    state["triggers"] = state["extensions"] = {"<lambda>": {}}
    state["triggers"] = {"<lambda>": {"previous": 2}}
    resumed.load_state_dict(state)
    assert resumed.elapsed_time == times[-1]
    resumed.run()
    assert resumed.elapsed_time > times[-1]


def test_an_extension_added_to_a_run_under_way_does_not_fire_for_what_came_before(out: Path) -> None:
    events: Events = []
    updater = CountingUpdater(fail_at=5)
    trainer = Trainer(updater, (8, "iteration"), out)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run()
    trainer.extend(Recorder("x", events), trigger=(4, "iteration"))
    trainer.run()
    assert calls(events) == [("x", 8)]


def damaged(state: dict[str, Any], path: str) -> dict[str, Any]:
    state = json.loads(json.dumps(state))
    *folders, key = path.split(".")
    place = state
    for folder in folders:
        place = place[folder]
    if key in place:
        del place[key]
    else:
        place[key] = {}
    return state


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("until", "The state of Trainer must hold .* missing: 'until'"),
        ("surplus", "The state of Trainer must hold .* unknown: 'surplus'"),
        ("triggers.a", "The state of the triggers of Trainer must hold 'a', 'b'; missing: 'a'"),
        ("triggers.c", "unknown: 'c'"),
        ("extensions.a", "The state of the triggers of Trainer must hold 'b'; unknown: 'a'"),
        ("triggers.b.previous", "The state of Interval must hold 'previous'; missing: 'previous'"),
        ("extensions.b.num_calls", "The state of b must hold 'num_calls'"),
        ("until.surplus", "The state of Until must hold no key; unknown: 'surplus'"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(out: Path, path: str, message: str) -> None:
    def build() -> Trainer:
        return Trainer(CountingUpdater(), (2, "iteration"), out, extensions=[Recorder("a", []), Recorder("b", [])])

    first, second = build(), build()
    first.run()
    before = second.state_dict()
    with pytest.raises(StateError, match=message):
        second.load_state_dict(damaged(first.state_dict(), path), strict=True)
    assert second.state_dict() == before


def test_a_state_whose_pending_extensions_are_unknown_is_refused(out: Path) -> None:
    trainer = Trainer(CountingUpdater(), out=out)
    with pytest.raises(StateError, match=r"must name its extensions as pending, got \['gone'\]"):
        trainer.load_state_dict({**trainer.state_dict(), "pending": ["gone"]})


def test_an_updater_that_refuses_leaves_triggers_and_extensions_as_they_were(out: Path) -> None:
    events: Events = []
    trainer = Trainer(CountingUpdater(), (2, "iteration"), out, extensions=[Recorder("a", events)])
    trainer.run()
    before = trainer.state_dict()
    fresh = Trainer(CountingUpdater(), (2, "iteration"), out, extensions=[Recorder("a", events)]).state_dict()
    with pytest.raises(KeyError, match="num_done"):
        trainer.load_state_dict({**fresh, "updater": {}})
    assert trainer.state_dict() == before


def test_a_resumed_training_reaches_the_same_bits(out: Path) -> None:
    def build(until: int) -> tuple[Trainer, torch.nn.Module]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        x, t = torch.randn(12, 4), torch.randint(3, (12,))
        return Trainer(LoopUpdater(model, x, t, batch_size=5), (until, "iteration"), out), model

    whole, expected = build(7)
    whole.run()
    first, half = build(3)
    first.run()
    resumed, found = build(7)
    resumed.load_state_dict(first.state_dict())
    resumed.run()
    assert torch.equal(expected.weight, found.weight)
    assert not torch.equal(expected.weight, half.weight)


def test_never_keeps_an_extension_silent(out: Path) -> None:
    events: Events = []
    trainer = Trainer(CountingUpdater(), (3, "iteration"), out)
    trainer.extend(Recorder("x", events), trigger=Never())
    trainer.run()
    assert calls(events) == []


def test_the_attributes_of_a_function_are_read(tmp_path: Path) -> None:
    events: list[str] = []

    class Watch:
        trigger = (2, "iteration")
        priority = WRITER
        call_before_training = True

        def __call__(self, trainer: Trainer) -> None:
            events.append(f"call {trainer.updater.iteration}")

        def initialize(self, trainer: Trainer) -> None:
            events.append(f"initialize {trainer.updater.iteration}")

        def finalize(self, trainer: Trainer) -> None:
            events.append(f"finalize {trainer.updater.iteration}")

        def on_error(self, trainer: Trainer, error: BaseException) -> None:
            events.append(f"{error} {trainer.updater.iteration}")

    trainer = Trainer(CountingUpdater(4, fail_at=4), (8, "iteration"), tmp_path)
    trainer.extend(
        lambda trainer: events.append(f"later {trainer.updater.iteration}"), name="later", trigger=(2, "iteration")
    )
    trainer.extend(Watch())
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run()
    assert events == ["initialize 0", "call 0", "call 2", "later 2", "call 4", "later 4", "boom 4", "finalize 4"]


def test_the_error_that_ends_a_run_is_known_while_extensions_end(tmp_path: Path) -> None:
    seen: list[str] = []
    trainer = Trainer(CountingUpdater(4, fail_at=1), (2, "iteration"), tmp_path)

    @make_extension(
        finalize=lambda trainer: seen.append(f"finalize {trainer.error}"),
        on_error=lambda trainer, error: seen.append(f"on_error {trainer.error is error}"),
    )
    def watch(trainer: Trainer) -> None:
        seen.append(str(trainer.error))

    trainer.extend(watch)
    for end in (pytest.raises(RuntimeError, match="boom"), contextlib.nullcontext()):
        with end:
            trainer.run()
        assert trainer.error is None
    assert seen == ["None", "on_error True", "finalize boom", "None", "finalize None"]


def test_a_trainer_lists_what_is_attached() -> None:
    trainer = Trainer(CountingUpdater(4), (2, "epoch"), "runs/a")
    trainer.extend(Recorder("low", [], priority=5), trigger=Once())
    trainer.extend(Recorder("high", [], priority=50))
    assert repr(trainer).splitlines() == [
        "Trainer(CountingUpdater, until=(2, 'epoch'), out='runs/a'), 0 updates done",
        "  high: trigger (1, 'iteration'), priority 50",
        "  low: trigger Once(), priority 5",
    ]


def test_before_each_update_extensions_are_called_by_priority(out: Path) -> None:
    events: Events = []

    class Early(Recorder):
        def before_update(self, trainer: Trainer) -> None:
            self._note("before", trainer)

    trainer = Trainer(CountingUpdater(fail_at=1), (2, "iteration"), out)
    silent = Early("silent", events, trigger=(9, "iteration"))
    for extension in (Early("late", events, priority=1, trigger=Never()), silent, Early("early", events, priority=9)):
        trainer.extend(extension)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.run()
    trainer.run()
    before = [(name, iteration) for name, what, iteration, *_ in events if what == "before"]
    # The second update failed, and was announced again.
    assert before == [(name, count) for count in (0, 1, 1) for name in ("silent", "early", "late")]


def test_stop_ends_the_run_after_the_iteration_and_another_call_continues_it(out: Path) -> None:
    seen: list[int] = []
    trainer = Trainer(CountingUpdater(), (5, "iteration"), out)

    def stop(trainer: Trainer) -> None:
        if trainer.updater.iteration == 2:
            trainer.stop()

    trainer.extend(stop, priority=300)
    trainer.extend(lambda trainer: seen.append(trainer.updater.iteration))
    trainer.run()
    assert (trainer.updater.iteration, seen) == (2, [1, 2])
    state = trainer.state_dict()
    trainer.run()
    assert seen == [1, 2, 3, 4, 5]
    other = Trainer(CountingUpdater(), (5, "iteration"), out)
    other.extend(stop, priority=300)
    other.extend(lambda trainer: seen.append(trainer.updater.iteration))
    other.load_state_dict(state)
    other.run()
    assert other.updater.iteration == 5
