"""A state is loaded by a trainer with other extensions: reported, accepted, and all or nothing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep import extensions
from lockstep.errors import StateError
from lockstep.trainer import Extension, Trainer
from lockstep.triggers import EarlyStopping, MaxValue, TriggerSpec
from tests.support.plain_updaters import CountingUpdater
from tests.support.ranks import launch_on_ranks

Calls = list[tuple[str, int]]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


class Counter(Extension):
    """Counts its calls, also over a resume."""

    _saved = ("num_calls",)

    def __init__(self, name: str, calls: Calls, trigger: TriggerSpec = (1, "iteration")) -> None:
        self._name = name
        self.calls = calls
        self.trigger = trigger
        self._num_calls = 0

    @property
    def name(self) -> str:
        return self._name

    def __call__(self, trainer: Trainer) -> None:
        self._num_calls += 1
        self.calls.append((self._name, trainer.updater.iteration))


def build(out: Path, names: str, calls: Calls, until: int = 4, **options: Any) -> Trainer:
    """Build a trainer with an extension for each letter; those in capitals are called every second update."""
    triggers: list[tuple[str, TriggerSpec]] = [(name, (1 + name.isupper(), "iteration")) for name in names]
    counters = [Counter(name, calls, trigger) for name, trigger in triggers]
    return Trainer(CountingUpdater(**options), (until, "iteration"), out, extensions=counters)


def saved(trainer: Trainer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(json.dumps(trainer.state_dict()))
    return state


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("ab", "abc", r"saved state: added c\. Extensions"),
        ("abc", "b", r"saved state: removed a, c\. Extensions"),
        ("ab", "bCd", r"saved state: added C, d and removed a\. Extensions"),
        ("ab", "", r"saved state: removed a, b\. Extensions"),
    ],
)
def test_one_warning_lists_what_was_added_and_removed(out: Path, before: str, after: str, message: str) -> None:
    first = build(out, before, [])
    first.run()
    calls: Calls = []
    second = build(out, after, calls, until=6)
    with pytest.warns(UserWarning, match=message) as caught:
        second.load_state_dict(saved(first))
    assert [Path(each.filename).name for each in caught] == [Path(__file__).name]
    kept = [name for name in after if name in before]
    assert [second.state_dict()["extensions"][name]["num_calls"] for name in after] == [  # type: ignore[index]
        4 if name in kept else 0 for name in after
    ]
    second.run()
    assert calls == [
        (name, iteration) for iteration in (5, 6) for name in after if not name.isupper() or iteration == 6
    ]


def test_the_same_extensions_in_another_order_are_the_same(out: Path) -> None:
    first = build(out, "ab", [])
    first.run()
    second = build(out, "ba", [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second.load_state_dict(saved(first), strict=True)
    assert second.updater.iteration == 4


@pytest.mark.parametrize(
    ("after", "message"),
    [("abc", "of the extensions of Trainer must hold 'a', 'b', 'c'; missing: 'c'"), ("a", "unknown: 'b'")],
)
def test_strict_refuses_and_changes_nothing(out: Path, after: str, message: str) -> None:
    first = build(out, "ab", [])
    first.run()
    second = build(out, after, [])
    before = saved(second)
    with pytest.raises(StateError, match=message):
        second.load_state_dict(saved(first), strict=True)
    assert saved(second) == before


def test_a_warning_that_is_an_error_changes_nothing(out: Path) -> None:
    first = build(out, "ab", [])
    first.run()
    second = build(out, "bc", [])
    before = saved(second)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="added c and removed a"):
            second.load_state_dict(saved(first))
    assert saved(second) == before


@pytest.mark.filterwarnings("ignore:The extensions of this Trainer")
def test_a_damaged_state_of_a_kept_extension_changes_nothing(out: Path) -> None:
    first = build(out, "abB", [])
    first.run()
    second = build(out, "bBc", [])
    before, state = saved(second), saved(first)
    state["extensions"]["B"] = {}
    with pytest.raises(StateError, match="missing: 'num_calls'"):
        second.load_state_dict(state)
    assert saved(second) == before


@pytest.mark.filterwarnings("ignore:The extensions of this Trainer")
def test_an_observation_that_cannot_be_read_changes_nothing(out: Path) -> None:
    first = build(out, "ab", [])
    first.run()
    second = build(out, "bc", [])
    before = saved(second)
    with pytest.raises(TypeError):
        second.load_state_dict({**saved(first), "observation": {"main/loss": 3}})
    assert saved(second) == before


class Stop(Extension):
    """Fails once, at one iteration."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __call__(self, trainer: Trainer) -> None:
        if trainer.updater.iteration == self.at:
            self.at = 0
            raise RuntimeError("stop")


@pytest.mark.filterwarnings("ignore:The extensions of this Trainer")
@pytest.mark.filterwarnings("ignore:The saved state lacks what")
@pytest.mark.parametrize("after", ["abc", "ac", "c", "abcd"])
def test_an_iteration_that_was_broken_off_goes_on_without_what_was_removed(out: Path, after: str) -> None:
    first = build(out, "ab", [])
    first.extend(Stop(3))
    for name in "bc":
        first.extend(Counter(name, []))  # the second "b" is named "b_1"
    with pytest.raises(RuntimeError, match="stop"):
        first.run()
    state = saved(first)
    assert (state["due"], state["pending"]) == ("Stop", ["b_1", "c"])
    calls: Calls = []
    second = build(out, after, calls)
    second.load_state_dict(state)
    assert saved(second)["due"] is None
    assert saved(second)["pending"] == ["c"]
    second.run()
    # Of iteration 3 only "c" was still to come; what was added begins with iteration 4.
    assert calls == [("c", 3), *((name, 4) for name in after)]


@pytest.mark.filterwarnings("ignore:The extensions of this Trainer")
def test_an_added_trigger_does_not_fire_for_what_came_before(out: Path) -> None:
    losses = [1.0, 3.0, 2.0, 1.0, 2.5, 4.0]
    first = build(out, "a", [], until=3, losses=losses)
    first.run()
    calls: Calls = []
    second = build(out, "a", calls, until=6, losses=losses)
    second.extend(Counter("late", calls), trigger=(2, "iteration"))
    second.extend(Counter("best", calls), trigger=MaxValue("main/loss", (1, "iteration")))
    second.load_state_dict(saved(first))
    second.run()
    assert [call for call in calls if call[0] == "late"] == [("late", 4), ("late", 6)]
    assert [call for call in calls if call[0] == "best"] == [("best", 4), ("best", 5), ("best", 6)]


@pytest.mark.filterwarnings("ignore:The extensions of this Trainer")
def test_a_table_that_is_added_shows_the_whole_log(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def logged(until: int) -> Trainer:
        updater = CountingUpdater(per_epoch=2, losses=[float(loss) for loss in range(8)])
        return Trainer(updater, (until, "epoch"), out, extensions=[extensions.LogReport()])

    first, second = logged(2), logged(4)
    first.run()
    second.extend(extensions.PrintReport(["epoch", "main/loss"]))
    second.load_state_dict(saved(first))
    second.run()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["epoch", "main/loss"], ["1", "0.5"], ["2", "2.5"], ["3", "4.5"], ["4", "6.5"]]


def load_without_extension(folder: str) -> int:
    """Load a state that names one extension more, and return how many warnings were shown."""
    trainer = ls.Trainer(one_weight_updater(), (1, "iteration"), folder)
    trainer.extend(Counter("removed", []))
    state = trainer.state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ls.Trainer(one_weight_updater(), (1, "iteration"), folder).load_state_dict(state)
    return sum("removed removed" in str(each.message) for each in caught)


def one_weight_updater() -> ls.ParallelUpdater:
    model = torch.nn.Linear(1, 1)
    samples = [torch.ones(1)] * 4
    batches = ls.BatchIterator(samples, batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ls.ParallelUpdater(batches, optimizer, model, num_shards=2, loss_fn=lambda model, x: model(x).mean())


def test_rank_0_warns_for_all(tmp_path: Path) -> None:
    assert launch_on_ranks(load_without_extension, 2, str(tmp_path)) == [1, 0]


@pytest.mark.parametrize(
    ("until", "trigger", "other"),
    [
        (EarlyStopping(monitor="main/loss"), (1, "iteration"), "`until`"),
        ((6, "iteration"), MaxValue("main/loss", trigger=(1, "iteration")), "counter"),
        ((6, "iteration"), (2, "epoch"), ""),
    ],
    ids=["until", "extension", "another interval"],
)
def test_another_kind_of_trigger_starts_without_a_state(
    out: Path, until: TriggerSpec, trigger: TriggerSpec, other: str
) -> None:
    first = build(out, "", [])
    first.extend(Counter("counter", []))
    first.run()
    second = Trainer(CountingUpdater(), until, out, extensions=[Counter("counter", [], trigger)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.load_state_dict(saved(first))
    assert [f"of trigger for {other}," in str(each.message) for each in caught] == [True] * bool(other)
    assert second.updater.iteration == 4
    assert second.state_dict()["extensions"]["counter"] == {"num_calls": 4}  # type: ignore[index]
