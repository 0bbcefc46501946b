"""Audits over two ranks: equal bits, a fault of one rank named on both, and a repeated update."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import lockstep as ls
from tests.support.ranks import launch_on_ranks
from tests.updaters.attempt.test_audit import Extremes, Fault, averaging, counter, digest_of, run, updater_of

EVERY: dict[str, int | None] = {"none": None, "each": 1, "third": 3}


def found_by(updater: ls.ParallelUpdater) -> tuple[Any, ...]:
    """Run two updates, and return what is raised or warned of."""
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            run(updater, 2)
    except ls.FaultError as error:
        return error.rank, error.update, error.shard, updater.iteration
    finally:
        updater.finalize()
    return tuple(str(each.message) for each in warned)


def work() -> dict[str, Any]:
    """Run on each of two ranks. A rank computes two of four shards, and then audits one of the other rank."""
    communicator = ls.find_communicator()
    is_last = communicator.rank == 1

    def fault(*calls: int) -> Fault:
        return Fault(0, lambda call: is_last and call in calls)

    options: dict[str, Any] = {"communicator": communicator, "audit_every": 1}
    return {
        "clean": {name: digest_of(updater_of(1, **{**options, "audit_every": each})) for name, each in EVERY.items()},
        "audits wrongly": found_by(updater_of(1, fault(2), **options)),
        "is always wrong": found_by(updater_of(1, fault(*range(100)), **options)),
        "repeated": digest_of(updater_of(1, fault(2), on_fault="repeat", **options)),
        "counts": found_by(updater_of(1, loss_fn=counter(), communicator=communicator)),
        # Each rank computes a single shard, and one of them the other's once more.
        "buffer": found_by(averaging(Extremes(), "mean", devices=1, num_shards=2, communicator=communicator)),
    }


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return launch_on_ranks(work, 2)


def test_audits_over_ranks_change_no_bit(two: list[dict[str, Any]]) -> None:
    alone = digest_of(updater_of(1, audit_every=0))
    assert [each["clean"] for each in two] == [dict.fromkeys(EVERY, alone)] * 2


def test_a_rank_that_is_wrong_once_is_named_on_both(two: list[dict[str, Any]]) -> None:
    for each in two:
        rank, update, shard, done = each["audits wrongly"]
        assert (rank, update, done) == (1, 0, 0)
        assert shard in (0, 1)


def test_of_two_ranks_that_repeat_their_results_neither_is_named(two: list[dict[str, Any]]) -> None:
    for each in two:
        rank, update, _, done = each["is always wrong"]
        assert (rank, update, done) == (None, 0, 0)


def test_both_ranks_repeat_an_update(two: list[dict[str, Any]]) -> None:
    assert [each["repeated"] for each in two] == [two[0]["clean"]["each"]] * 2


def test_a_buffer_is_named_where_each_rank_has_one_shard(two: list[dict[str, Any]]) -> None:
    (text,) = two[0]["buffer"] + two[1]["buffer"]
    assert "different values in the buffer 'largest'" in text


def test_both_ranks_warn_of_hidden_state(two: list[dict[str, Any]]) -> None:
    for each in two:
        (text,) = each["counts"]
        assert "Something decides that is no part of the model" in text
