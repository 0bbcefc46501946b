"""The self-test has one digest at all placements, and `lockstep doctor` tells by its exit code if not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli import doctor, main
from lockstep.doctor import Outcome, are_equal, run_self_test
from lockstep.doctor.self_test import train


@pytest.mark.usefixtures("spawned_by_forks")
def test_one_digest_at_all_placements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--out", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    outcomes = found["self_test"][0]
    assert [len(each["digests"]) for each in outcomes] == [1, 1, 2]
    assert len({digest for each in outcomes for digest in each["digests"]}) == 1
    assert (found["passed"], next(iter(found["machine"]))) == (True, "processor")


def test_what_counts_as_equal() -> None:
    one, other = Outcome("a", ("1",), 0.0), Outcome("b", ("1", "2"), 0.0)
    assert are_equal([one, one])
    assert not are_equal([one, other])
    assert not are_equal([one, Outcome("c", (), 0.0, "RuntimeError: no")])
    assert not are_equal([])


def test_text_of_80_columns_and_no_self_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["doctor", "--no-self-test", "--out", str(tmp_path / "file")]) == 1
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= max(80, len(str(tmp_path)) + 20)
    assert text.endswith("1 problem was found. No self-test was made.\n")
    assert "  problem  The folder" in text


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome("x", ("1", "2"), 1.0), "digests of devices of one kind differ"),
        (Outcome("x", (), 1.0, "OSError: no"), "a placement could not be trained"),
        (Outcome("x", ("1", "1"), 1.0), "All digests are equal."),
    ],
)
def test_the_conclusion(outcome: Outcome, expected: str) -> None:
    assert expected in doctor._conclusion([], [[outcome]])
    assert all(len(line) <= 80 for line in doctor._outcome_text(outcome).splitlines())


def test_the_digest_depends_on_what_is_trained() -> None:
    digest = train(["cpu"], alone=True)
    assert train(["cpu", "cpu", "cpu"], alone=True) == digest
    assert train(["cpu"], alone=True, num_shards=2) != digest


def test_an_error_is_an_outcome() -> None:
    def fail() -> list[str]:
        raise OSError("no gloo")

    seen: list[Outcome] = []
    ((outcome,),) = run_self_test([[("x", fail)]], on_outcome=seen.append)
    assert (outcome.error, outcome.digests, seen) == ("OSError: no gloo", (), [outcome])
