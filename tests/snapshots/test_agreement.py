"""Ranks compare the digests of their snapshots: a flipped bit does not come back by a restart."""

from __future__ import annotations

import json
import shutil
import time
import warnings
import weakref
from pathlib import Path

import pytest
import torch

import lockstep as ls
from lockstep.cli import main
from lockstep.snapshots import Agreement, Record, list as list_snapshots
from tests.support.rank_pool import RankError
from tests.support.ranks import run_on_ranks
from tests.support.resuming import Place, digests, run_at, trainer


class Flip(ls.Extension):
    """Flips a bit of the memory of one rank after an update."""

    priority = 1000

    def __init__(self, at: int, *, here: bool) -> None:
        self.at, self.here = at, here

    def __call__(self, trainer: ls.Trainer) -> None:
        if self.here and trainer.updater.iteration == self.at:
            weight = next(iter(trainer.updater.get_all_models()["main"].parameters()))
            weight.detach().view(torch.int32)[0, 0] ^= 1 << 18


def run(
    communicator: ls.Communicator, out: str, updates: int, rank: int = -1, options: tuple[int, bool] = (9, False)
) -> tuple[str, list[str]]:
    """Resume and train, with a bit that flips after update 6 of one rank. Return the error and what was warned of."""
    mine = out.format(rank=communicator.rank)
    made = trainer("adamw", Place(1, 2, 0), communicator, out=Path(mine), updates=updates, every=4)
    snapshot = made.get_extension("Snapshot")
    assert isinstance(snapshot, ls.extensions.Snapshot)
    snapshot.keep, snapshot.per_machine = options
    if rank >= 0:
        made.extend(Flip(6, here=communicator.rank == rank), trigger=(1, "iteration"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made.run(resume="auto")
        except ls.DisagreementError as error:
            return f"{error.update}: {error}", [str(each.message) for each in caught]
    return "", [str(each.message) for each in caught]


def found(out: Path) -> list[tuple[int, int]]:
    return [(each.update, each.ranks) for each in list_snapshots(out)]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("keep", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_a_flipped_bit_does_not_come_back(tmp_path: Path, rank: int, keep: int) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    run_at(Place(1, 1, 0), "adamw", whole, 12)
    (error, told), (other, _) = run_on_ranks(run, 2, str(out), 12, rank, (keep, False))
    assert error == other
    assert error.startswith("8: Rank 1 must have rank 0's state after update 8, but it has other bits in ")
    assert [each for each in told if "are renamed: unverified-00000008-" in each]
    # The one before is kept, although one newer one was to be kept and was there.
    assert found(out) == [(4, 2)]
    assert run_on_ranks(run, 2, str(out), 12, -1, (keep, False))[1][0] == ""
    assert found(out)[-1] == (12, 2)
    assert digests(out)[12] == digests(whole)[12]


def test_each_machine_has_its_own_snapshots_verified(tmp_path: Path) -> None:
    run_on_ranks(run, 2, f"{tmp_path}/out{{rank}}", 12, 1, (9, True))
    for rank in (0, 1):
        assert found(tmp_path / f"out{rank}") == [(4, 2)]
        assert len(list((tmp_path / f"out{rank}/snapshots").glob("unverified-00000008-*"))) == 1


def test_a_run_does_not_start_anew_where_ranks_never_agreed(tmp_path: Path) -> None:
    run_on_ranks(run, 2, str(tmp_path), 12, 0)
    shutil.rmtree(tmp_path / "snapshots/00000004")
    with pytest.raises(RankError, match=r"is whole: unverified-00000008-.* Remove them to start anew"):
        run_on_ranks(run, 2, str(tmp_path), 12)


def test_what_ranks_have_compared_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_on_ranks(run, 2, str(tmp_path), 8)
    assert main(["snapshots", str(tmp_path), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.endswith("  equal on 2 ranks  whole") for line in lines)
    mark = tmp_path / "snapshots/00000004/verified.json"
    text = mark.read_text()
    for wrong in (b"", b"[]", b"\xff", json.dumps({**json.loads(text), "digest": "0" * 64}).encode(), b"[" * 900):
        mark.write_bytes(wrong)
        assert found(tmp_path) == [(4, 0), (8, 2)]


def late(communicator: ls.Communicator) -> list[tuple[int, int]]:
    """Compare three snapshots, of which one rank has the digests only after some updates, and one of them never."""
    seen: list[tuple[int, int]] = []
    agreement = Agreement(communicator, lambda record, ranks: seen.append((record.update, ranks)))
    for update in range(1, 40):
        agreement.compare()
        if update in {1, 2, 5}:
            agreement.open(update)
        ready = {0: {2: 1, 3: 2, 6: 5}, 1: {9: 1, 12: 5}}[communicator.rank]
        if update in ready:
            agreement.add(Record(ready[update], "same", {}))
        if communicator.rank and update == 9:
            time.sleep(0.01)
    return seen


def test_a_digest_that_is_late_or_missing_delays_nobody() -> None:
    assert run_on_ranks(late, 2) == [[(1, 2), (5, 2)]] * 2


class Names(dict[str, str]):
    """The names of a record, to which there can be a weak reference."""


def test_a_single_rank_keeps_no_digests() -> None:
    agreement = Agreement(ls.LocalCommunicator(), lambda *_: pytest.fail("there is nothing to compare"))
    names = Names(weight="12345678")
    kept = weakref.ref(names)
    agreement.open(1)
    agreement.add(Record(1, "digest", names))
    agreement.compare(now=True)
    del names
    assert kept() is None


def counting(communicator: ls.Communicator) -> int:
    before = communicator.bytes_sent  # type: ignore[attr-defined]
    agreement = Agreement(communicator, lambda *_: None)
    for _ in range(100):
        agreement.compare()
    assert communicator.bytes_sent == before  # type: ignore[attr-defined]
    agreement.open(1)
    sent = 0
    for _ in range(100):
        agreement.compare()
        sent += communicator.bytes_sent > before  # type: ignore[attr-defined]
        before = communicator.bytes_sent  # type: ignore[attr-defined]
    return sent


def test_ranks_ask_each_other_less_and_less_often() -> None:
    assert run_on_ranks(counting, 2) == [6, 6]


def asked(communicator: ls.Communicator, late: int) -> int:
    """Compare ten snapshots whose digests are late by some updates, and return how often the ranks ask."""
    agreement = Agreement(communicator, lambda *_: None)
    before, count = communicator.bytes_sent, 0  # type: ignore[attr-defined]
    for update in range(1, 201):
        agreement.compare()
        count += communicator.bytes_sent > before  # type: ignore[attr-defined]
        before = communicator.bytes_sent  # type: ignore[attr-defined]
        if update % 20 == 0:
            agreement.open(update)
        if update % 20 == late - 1:
            agreement.add(Record(update - late + 1, "same", {}))
    return count


@pytest.mark.parametrize(("late", "times"), [(1, 9), (3, 15), (6, 15)])
def test_ranks_begin_to_ask_as_late_as_they_ended_before(late: int, times: int) -> None:
    found = run_on_ranks(asked, 2, late)
    assert found[0] == found[1] <= times


def frequent(communicator: ls.Communicator) -> list[int]:
    """Compare a snapshot after every update, whose digests are late by two updates."""
    seen: list[int] = []
    agreement = Agreement(communicator, lambda record, _: seen.append(record.update))
    for update in range(1, 101):
        agreement.compare()
        agreement.open(update)
        agreement.add(Record(update - 2, "same", {}))
    return seen


def test_snapshots_that_are_more_frequent_than_digests_are_compared() -> None:
    found = run_on_ranks(frequent, 2)
    assert found[0] == found[1]
    assert found[0][-1] == 97
    assert len(found[0]) > 90


def other_counter(communicator: ls.Communicator) -> None:
    agreement = Agreement(communicator, lambda *_: None)
    agreement.open(3)
    agreement.add(Record(3, f"digest of {communicator.rank}", {"a.b": "12345678"}))
    agreement.compare()


def test_a_difference_outside_of_tensors_is_one() -> None:
    with pytest.raises(RankError, match="other bits in a counter, an option or a position"):
        run_on_ranks(other_counter, 2)
