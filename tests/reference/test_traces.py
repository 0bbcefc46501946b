"""The comparison itself: it must notice whatever is wrong, missing, left over, or no longer so."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import traces
from differences import Difference, for_replay, leaves, read_differences
from traces import EXACT, Case, Tolerance, equal, read, reference_folder, tensor

FILE = "some-system/some.json"
RECORD = {"name": "a", "n": 3, "steps": [{"lr": 0.1, "w": 1.0}, {"lr": 0.1, "w": 2.0}]}
GIVEN = ["name", "n", "steps.*.lr"]
OURS = {"steps": [{"w": 1.0}, {"w": 2.0}]}


def difference(field: str, ours: object, case: str = "a") -> Difference:
    return Difference(FILE, case, field, ours, "a test")


def test_equal_records_pass() -> None:
    Case("a", RECORD, {}, GIVEN).check(OURS)


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ({"steps": [{"w": 1.0}, {"w": 2.5}]}, "steps.1.w: the original has 2.0, ours has 2.5"),
        ({"steps": [{"w": 1.0}]}, "steps: the original has"),
        ({"steps": [{"w": 1.0}, {}]}, "steps.1.w: the original has 2.0, ours has '<absent>'"),
        ({"steps": [{"w": 1.0}, {"w": 2.0}], "more": 1}, "more: the original has '<absent>', ours has 1"),
        ({}, "steps: the original has"),
        ({"steps": [{"w": 1.0}, {"w": 2}]}, None),
        ({"steps": [{"w": True}, {"w": 2.0}]}, "steps.0.w"),
        ({"steps": [{"w": None}, {"w": 2.0}]}, "steps.0.w"),
    ],
)
def test_what_differs_is_named(ours: dict[str, object], message: str | None) -> None:
    case = Case("a", RECORD, {}, GIVEN)
    if message is None:
        case.check(ours)
    else:
        with pytest.raises(AssertionError, match=message):
            case.check(ours)


def test_a_field_that_is_neither_given_nor_ours_is_noticed() -> None:
    with pytest.raises(AssertionError, match="n: the original has 3, ours has '<absent>'"):
        Case("a", RECORD, {}, ["name", "steps.*.lr"]).check(OURS)


def test_a_tolerance_is_for_the_places_of_its_pattern() -> None:
    case = Case("a", RECORD, {}, GIVEN)
    near = {"steps": [{"w": 1.0}, {"w": 2.0 + 1e-7}]}
    case.check(near, {"steps.*.w": Tolerance(1e-7)})
    with pytest.raises(AssertionError, match=r"steps\.1\.w"):
        case.check(near, {"steps.0.w": Tolerance(1e-7)})


def test_a_listed_difference_must_be_ours() -> None:
    case = Case("a", RECORD, {}, GIVEN, [difference("steps.1.w", 5.0)])
    case.check({"steps": [{"w": 1.0}, {"w": 5.0}]})
    with pytest.raises(AssertionError, match=r"listed as a difference with 5\.0, ours has 6\.0"):
        case.check({"steps": [{"w": 1.0}, {"w": 6.0}]})


def test_a_listed_difference_must_still_differ() -> None:
    with pytest.raises(AssertionError, match=r"ours is what the original has, 2\.0"):
        Case("a", RECORD, {}, GIVEN, [difference("steps.1.w", 2.0)]).check(OURS)


def test_a_listed_difference_must_be_reached() -> None:
    with pytest.raises(AssertionError, match=r"steps\.7\.w: listed as a difference, but"):
        Case("a", RECORD, {}, GIVEN, [difference("steps.7.w", 2.0)]).check(OURS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "some-system" / "traces").mkdir(parents=True)
    return tmp_path


def write(folder: Path, variant: str, contents: list[dict[str, Any]]) -> None:
    trace = {"variant": variant, "notes": "shared", "cases": contents}
    (folder / "some-system" / "traces" / "some.json").write_text(json.dumps(trace), encoding="utf-8")


def read_here(folder: Path, num_cases: int, *differences: Difference) -> list[Case]:
    def name(content: Any) -> str:
        return str(content["name"])

    return read(folder, FILE, num_cases, given=GIVEN, key="cases", name=name, differences=differences)


def test_the_number_of_cases_is_checked(folder: Path) -> None:
    write(folder, "dev", [RECORD, RECORD])
    found = read_here(folder, 2)
    assert [case.name for case in found] == ["a", "a#2"]
    assert found[0].shared["notes"] == "shared"
    with pytest.raises(AssertionError, match="must hold 3 cases, got 2"):
        read_here(folder, 3)


def test_another_variant_may_hold_another_number_but_not_none(folder: Path) -> None:
    write(folder, "other", [RECORD])
    assert len(read_here(folder, 2, difference("n", 4, case="elsewhere"))) == 1
    write(folder, "other", [])
    with pytest.raises(AssertionError, match="must hold 2 cases, got 0"):
        read_here(folder, 2)


def test_differences_go_to_the_cases_of_their_pattern(folder: Path) -> None:
    write(folder, "dev", [RECORD, RECORD, RECORD | {"name": "b"}])
    listed = difference("n", 4, case="a*")
    assert [len(case.differences) for case in read_here(folder, 3, listed)] == [1, 1, 0]
    with pytest.raises(AssertionError, match="has no case for the difference"):
        read_here(folder, 3, difference("n", 4, case="c"))


def test_a_listed_difference_may_be_for_one_replay_of_two() -> None:
    both, core, compat = (
        Difference(FILE, "a", "n", number, "a test", through=through)
        for number, through in ((4, None), (5, "core"), (6, "compat"))
    )
    assert for_replay([both, core, compat], "core") == [both, core]
    assert for_replay([both, core, compat], "compat") == [both, compat]
    with pytest.raises(AssertionError, match="through one of the two"):
        Difference(FILE, "a", "n", 4, "a test", through="another")


def test_arrays() -> None:
    array = {"dtype": "float32", "shape": [2, 1], "data": [0.1, "nan"]}
    ours = torch.tensor([[0.1], [math.nan]])
    assert equal(array, ours)
    assert equal(tensor(array).tolist(), ours.tolist())
    assert not equal(array, ours.double())
    assert not equal(array, ours.flatten())
    assert not equal(array, torch.tensor([[0.1], [math.inf]]))
    assert equal([1.0, 2.0], torch.tensor([[1.0], [2.0]]))
    assert equal([[1.0], [2.0]], torch.tensor([[1.0], [2.0]]))
    assert not equal([[1.0, 2.0]], torch.tensor([[1.0], [2.0]]))
    assert equal(3, torch.tensor(3))


@pytest.mark.parametrize(
    ("original", "ours", "same"),
    [
        ("nan", math.nan, True),
        ("-inf", -math.inf, True),
        ("inf", 1.0, False),
        ("text", "text", True),
        ("text", "other", False),
        (None, None, True),
        (None, 0, False),
        (True, 1, False),
        (1, 1.0, True),
        ({"a": [1, 2]}, {"a": (1, 2)}, True),
        ({"a": [1, 2]}, {"a": [1, 2], "b": 3}, False),
        ([1, 2], {"a": 1}, False),
    ],
)
def test_values(original: object, ours: object, same: bool) -> None:
    assert equal(original, ours, EXACT) is same


def test_a_tolerance_is_relative_above_its_floor() -> None:
    assert Tolerance(1e-3).accepts(1000.9, 1000.0)
    assert not Tolerance(1e-3).accepts(1001.1, 1000.0)
    assert Tolerance(1e-3).accepts(0.0009, 0.0)
    assert not Tolerance(1e-3, floor=1e-3).accepts(0.0009, 0.0)
    assert Tolerance(0.0).accepts(math.inf, math.inf)
    # A share of an infinity is infinite, too.
    assert not Tolerance(1e-3).accepts(0.5, math.inf)
    assert not Tolerance(1e-3).accepts(math.inf, -math.inf)
    assert not Tolerance(1e-3).accepts(-math.inf, 0.5)
    assert not Tolerance(1.0).accepts(1.0, math.nan)
    assert Tolerance(1e-3, floor=0.0, offset=1.0).accepts(1.0019, 1.0)
    assert not Tolerance(1e-3, floor=0.0, offset=1.0).accepts(1.0021, 1.0)


def test_a_tolerance_may_be_a_share_of_the_largest_number_of_an_array() -> None:
    array = {"dtype": "float32", "shape": [3], "data": [1e-6, 100.0, "inf"]}
    near = torch.tensor([9e-5, 100.0, math.inf])
    assert equal(array, near, Tolerance(1e-4, floor=0.0, peak=1e-6))
    assert not equal(array, near, Tolerance(1e-4, floor=0.0, peak=1e-7))
    assert not equal(array, near, Tolerance(1e-4, floor=0.0))


def test_every_listed_difference_is_for_a_trace_that_a_test_replays() -> None:
    tests = [path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py")]
    for listed in read_differences():
        assert any(listed.file in text for text in tests), listed


def test_a_replay_goes_by_what_a_case_holds_and_not_by_its_name(folder: Path) -> None:
    write(folder, "dev", [RECORD])
    assert "name" not in read_here(folder, 1)[0]
    drivers = {*Path(__file__).parent.glob("*.py")} - {Path(__file__), Path(traces.__file__)}
    for path in drivers:
        assert not re.search(r"\bcase\.name\b", path.read_text(encoding="utf-8")), path


def test_a_named_folder_must_be_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCKSTEP_REFERENCE", str(tmp_path))
    assert reference_folder() == tmp_path
    monkeypatch.setenv("LOCKSTEP_REFERENCE", str(tmp_path / "absent"))
    with pytest.raises(AssertionError, match="LOCKSTEP_REFERENCE must name a folder"):
        reference_folder()


def test_a_difference_may_point_to_another_case() -> None:
    other = {**RECORD, "name": "b", "steps": [{"lr": 0.1, "w": 1.0}, {"lr": 0.1, "w": 7.0}]}
    pointing = Difference(FILE, "a", "steps.1.w", reason="a test", as_in="b")
    case = Case("a", RECORD, {}, GIVEN, [pointing], {"b": other})
    case.check({"steps": [{"w": 1.0}, {"w": 7.0}]})
    with pytest.raises(AssertionError, match=r"listed as a difference with 7\.0, ours has 5\.0"):
        case.check({"steps": [{"w": 1.0}, {"w": 5.0}]})


def test_a_difference_may_point_to_the_case_that_lacks_one_field() -> None:
    plain = {"n": None, "lr": 0.1, "note": "plain", "w": 1.0}
    scaled = {**plain, "n": 3, "note": "scaled", "w": 5.0}
    pointing = Difference(FILE, field="w", reason="a test", as_without="n")
    case = Case("b", scaled, {}, ["n", "lr", "note"], [pointing], {"a": plain, "b": scaled})
    case.check({"w": 1.0})
    with pytest.raises(AssertionError, match=r"listed as a difference with 1\.0, ours has 5\.0"):
        case.check({"w": 5.0})


def test_a_difference_may_point_to_another_place() -> None:
    counts = {"steps": [{"t": 1, "rule_t": 1}, {"t": 2, "rule_t": 1}]}
    pointing = Difference(FILE, field="steps.*.t", reason="a test", as_at="steps.{}.rule_t")
    case = Case("a", counts, {}, ["steps.*.rule_t"], [pointing])
    case.check({"steps": [{"t": 1}, {"t": 1}]})
    for wrong in ([{"t": 1}, {"t": 2}], [{"t": 2}, {"t": 1}]):
        with pytest.raises(AssertionError, match=r"steps\.\d\.t"):
            case.check({"steps": wrong})


def test_a_difference_may_say_what_its_cases_hold() -> None:
    listed = Difference(FILE, where={"steps.*.w": "[!1]*", "n": "3"}, ours=4, reason="a test")
    assert listed.is_for("any", list(leaves(RECORD)))
    assert not listed.is_for("any", list(leaves({**RECORD, "n": 33})))
    assert not listed.is_for("any", list(leaves({**RECORD, "steps": RECORD["steps"][:1]})))  # type: ignore[index]


def test_in_another_variant_a_listed_place_is_passed_over_and_no_other(folder: Path) -> None:
    write(folder, "other", [{**RECORD, "n": 7}])
    (case,) = read_here(folder, 2, difference("steps.1.w", 5.0, case="*"), difference("lost", 1, case="*"))
    case = replace(case, given=["n", "steps.*.lr"])
    case.check({"steps": [{"w": 1.0}, {"w": 6.0}]})
    with pytest.raises(AssertionError, match=r"steps\.0\.w"):
        case.check({"steps": [{"w": 1.5}, {"w": 6.0}]})


def test_in_another_variant_an_entry_may_be_for_other_places(folder: Path) -> None:
    listed = replace(
        difference("steps.1.w", 5.0), where={"n": "3"}, elsewhere={"field": "steps.0.w", "where": {"n": "7"}}
    )
    for variant, content, changed in (("dev", RECORD, 1), ("other", {**RECORD, "n": 7}, 0)):
        write(folder, variant, [content])
        (case,) = read_here(folder, 1, listed)
        steps = [{"w": 1.0}, {"w": 2.0}]
        steps[changed] = {"w": 5.0}
        replace(case, given=["n", "steps.*.lr"]).check({"steps": steps})
        with pytest.raises(AssertionError, match=rf"steps\.{1 - changed}\.w"):
            replace(case, given=["n", "steps.*.lr"]).check({"steps": steps[::-1]})


def test_a_difference_may_follow_from_what_a_case_holds() -> None:
    content = {"loads": [1, 1], "sizes": [1, 3, 5], "lengths": ["refused", [2, 1], [2, 3]]}
    by_rule = Difference(FILE, field="lengths", rule="fair_slices", reason="a test")
    case = Case("a", content, {}, ["loads", "sizes"], [by_rule])
    case.check({"lengths": [[1, 0], [2, 1], [3, 2]]})
    with pytest.raises(AssertionError, match="lengths: listed as a difference with"):
        case.check({"lengths": ["refused", [2, 1], [2, 3]]})
    same = replace(case, content={**content, "sizes": [3], "lengths": [[2, 1]]})
    same.check({"lengths": [[2, 1]]})


def test_ours_is_said_in_one_way() -> None:
    with pytest.raises(AssertionError, match="must say in one way"):
        Difference(FILE, field="w", ours=1.0, as_in="b", reason="a test")
