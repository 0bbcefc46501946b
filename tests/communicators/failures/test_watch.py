"""What ranks know of each other's well-being, without waiting for a real process to die."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

import lockstep as ls
from lockstep.communicators.failures import heartbeat, watch as watch_module
from lockstep.communicators.failures.failure import Failure
from lockstep.communicators.failures.heartbeat import READS, Beat, Heartbeat
from lockstep.communicators.failures.watch import START, Watch
from tests.support.waiting import LONG, await_true


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write heartbeats four times a second instead of once."""
    for each in (heartbeat, watch_module):
        monkeypatch.setattr(each, "INTERVAL", 0.25)


@pytest.fixture
def stores(tmp_path: Path) -> list[dist.Store]:
    """Make three connections to one store."""
    return [dist.FileStore(str(tmp_path / "store"), -1) for _ in range(3)]


def test_alone_there_is_nobody_to_watch() -> None:
    threads = set(threading.enumerate())
    communicator = ls.LocalCommunicator()
    with communicator.watch.waiting():
        communicator.watch.phase = "forward"
    communicator.watch.check()
    assert communicator.watch.explain() is None
    assert type(communicator.watch) is Watch
    assert set(threading.enumerate()) <= threads


def test_all_ranks_hear_of_an_error(stores: list[dist.Store]) -> None:
    watches = [Watch(store, rank, 3, store_rank=None) for rank, store in enumerate(stores)]
    try:
        for watch in watches:
            watch.wait_for_all()
        watches[1].phase = "backward"
        watches[1].report_failure(ZeroDivisionError("in the middle"))
        for rank in (0, 2):
            assert watches[rank]._failure_found.wait(LONG)
            with pytest.raises(ls.PeerError, match=r"Rank 1 raised ZeroDivisionError: in") as raised:
                watches[rank].check()
            assert (raised.value.rank, raised.value.phase) == (1, "backward")
            with pytest.raises(ls.PeerError), watches[rank].waiting():
                pytest.fail("the call is not begun")
    finally:
        for watch in watches:
            watch.close()


def test_a_silent_rank_is_named_with_what_it_was_doing(stores: list[dist.Store]) -> None:
    watches = [Watch(store, rank, 2, timeout=1, store_rank=None) for rank, store in enumerate(stores[:2])]
    watches[1].phase = "optimizer"
    try:
        gather(watches)
        await_true(lambda: _beat(watches[0], 1).phase == "optimizer")
        heartbeat_of(watches[1])._stopping = True  # its thread ends, and tells nobody
        heartbeat_of(watches[1]).store = _Lost()
        assert watches[0]._failure_found.wait(LONG)
        with pytest.raises(ls.PeerError, match=r"Rank 1 has been silent for 0.75 s.*the phase 'optimizer'"):
            watches[0].check()
    finally:
        for watch in watches:
            watch.close()


def gather(watches: list[Watch]) -> None:
    """Let ranks take their time to come, whatever time they have for each other then."""
    for watch in watches:
        assert heartbeat_of(watch).joined.wait(LONG)
        watch.wait_for_all()


def heartbeat_of(watch: Watch) -> Heartbeat:
    """Give the thread of a watch over several ranks."""
    assert watch._heartbeat is not None
    return watch._heartbeat


def _beat(watch: Watch, rank: int) -> Beat:
    return heartbeat_of(watch).beats.get(rank) or Beat(0, False, START)


class _Lost:
    """A store that cannot be reached."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: str) -> None:
            raise RuntimeError("no connection")

        return call


class _Stuck:
    """A store whose host is stopped."""

    def __init__(self) -> None:
        self.freed = threading.Event()

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*_: str) -> None:
            self.freed.wait()
            raise RuntimeError("no connection")

        return call


def test_a_rank_that_did_not_come_is_named(stores: list[dist.Store]) -> None:
    watch = Watch(stores[0], 0, 3, timeout=0.5, store_rank=None)
    try:
        with pytest.raises(ls.PeerError, match=r"Rank 1 has not started within 0.5 s") as raised:
            watch.wait_for_all()
        assert (raised.value.rank, raised.value.phase) == (1, "start-up")
    finally:
        watch.close()


def test_a_call_that_failed_while_a_rank_was_busy_names_that_rank(stores: list[dist.Store]) -> None:
    watches = [Watch(store, rank, 2, timeout=5, store_rank=None) for rank, store in enumerate(stores[:2])]
    try:
        gather(watches)
        watches[1].phase = "forward"
        with watches[0].waiting():
            error = watches[0].explain()
        assert error is not None
        assert str(error).startswith("Rank 1 is alive, but has not joined the call within 5 s.")
        with watches[1].waiting():
            await_true(lambda: _beat(watches[0], 1).waiting)
            assert watches[0].explain() is None, "both wait: nobody is late"
    finally:
        for watch in watches:
            watch.close()


def test_a_rank_that_ended_is_missed_only_by_who_waits_for_it(stores: list[dist.Store]) -> None:
    watches = [Watch(store, rank, 2, timeout=1, store_rank=None) for rank, store in enumerate(stores[:2])]
    try:
        gather(watches)
        watches[1].close()
        assert not watches[0]._failure_found.wait((READS + 1) * heartbeat.INTERVAL), "it ended in order"
        watches[0].check()
        error = watches[0].explain()
        assert error is not None
        assert str(error).startswith("Rank 1 has ended while other ranks waited for it.")
        assert str(error).endswith("and not under `if trainer.is_main:`; rank 0 writes.")
    finally:
        watches[0].close()


def test_who_was_stopped_himself_accuses_nobody(stores: list[dist.Store]) -> None:
    # Silence is counted in looks: however much time passes between two of them, they are two.
    found: list[Failure] = []
    beats = Heartbeat(
        stores[0],
        0,
        2,
        status=lambda: (False, "forward"),
        max_unchanged=READS,
        store_rank=None,
        on_failure=found.append,
    )
    stores[1].set("beat/1", json.dumps(Beat(7, False, "forward")))
    for _ in range(READS):
        beats._round()
    assert found == []
    beats._round()
    assert found == [Failure(1, "has been silent for 0.75 s: it was stopped, or cannot be reached", "forward")]


def test_a_rank_that_was_heard_long_ago_is_dead_if_it_does_not_answer(stores: list[dist.Store]) -> None:
    watches = [Watch(store, rank, 3, store_rank=None) for rank, store in enumerate(stores)]
    try:
        gather(watches)
        assert watches[0].explain() is not None, "rank 1 does not wait"
        numbers = [_beat(watches[0], rank).number for rank in (1, 2)]
        await_true(lambda: heartbeat_of(watches[2]).rounds > max(numbers) + 1)
        heartbeat_of(watches[2]).store = _Lost()
        heartbeat_of(watches[2])._stopping = True
        error = watches[0].explain()
        assert error is not None
        assert str(error).startswith("Rank 2 has died, or cannot be reached.")
    finally:
        for watch in watches:
            watch.close()


def test_a_store_that_is_gone_is_a_failure_of_its_host_only_if_a_call_has_failed(stores: list[dist.Store]) -> None:
    watches = [Watch(store, rank, 2, store_rank=0) for rank, store in enumerate(stores[:2])]
    try:
        gather(watches)
        heartbeat_of(watches[1]).store = _Lost()
        await_true(lambda: heartbeat_of(watches[1]).store_lost)
        watches[1].check()
        error = watches[1].explain()
        assert error is not None
        assert str(error).startswith("Rank 0 has ended, and with it the store that it hosted.")
        assert watches[1].failed_rank_is_exiting
    finally:
        for watch in watches:
            watch.close()


def test_a_store_that_does_not_answer_is_a_failure_of_its_host(stores: list[dist.Store]) -> None:
    watches = [Watch(store, rank, 2, store_rank=0) for rank, store in enumerate(stores[:2])]
    stuck = _Stuck()
    try:
        gather(watches)
        heartbeat_of(watches[1]).store = stuck
        error = watches[1].explain()
        assert error is not None
        assert str(error).startswith("Rank 0 has been silent for 1.5 s: it was stopped, or cannot be reached.")
    finally:
        stuck.freed.set()
        for watch in watches:
            watch.close()


def test_a_store_that_does_not_answer_is_found_while_a_call_waits(stores: list[dist.Store]) -> None:
    watches = [Watch(store, rank, 2, timeout=1, store_rank=0) for rank, store in enumerate(stores[:2])]
    stuck = _Stuck()
    try:
        gather(watches)
        heartbeat_of(watches[1]).store = stuck
        # As long as the calls return, the rank needs nothing from the store.
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            with watches[1].waiting():
                time.sleep(0.01)
        with watches[1].waiting():
            assert watches[1]._failure_found.wait(LONG)
        with pytest.raises(ls.PeerError, match=r"Rank 0 has been silent for \d+\.?\d* s: it was stopped, or cannot"):
            watches[1].check()
    finally:
        stuck.freed.set()
        for watch in watches:
            watch.close()


def test_the_first_failure_is_the_one_that_is_told(stores: list[dist.Store]) -> None:
    watches = [Watch(store, rank, 3, store_rank=None) for rank, store in enumerate(stores)]
    try:
        for watch in watches:
            watch.wait_for_all()
        watches[0].report_failure(ValueError("first"))
        assert watches[2]._failure_found.wait(LONG)
        watches[1].report_failure(ValueError("second"))
        assert watches[1]._failure_found.wait(LONG)
        assert {watch._failure.what for watch in watches[1:]} == {"raised ValueError: first"}
    finally:
        for watch in watches:
            watch.close()
