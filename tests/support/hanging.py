"""Hang on purpose, and have a group's clock run only once everybody else has ended or hangs.

A device counts as hung after so many seconds. A test can afford few, and a busy machine may take as many to
run a healthy thread; so what is slow here is given its time before the wait begins that counts them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from lockstep.replicas.pool.replica_set import ReplicaSet
from lockstep.replicas.pool.worker import Worker
from tests.support.waiting import LONG

HUNG = set[int]()
"""The threads that hang."""
RELEASED = threading.Event()


def here_it_hangs() -> None:
    """Wait until the test is over."""
    HUNG.add(threading.get_ident())
    RELEASED.wait(10 * LONG)


@pytest.fixture(name="patiently")
def wait_patiently(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begin to count seconds when nobody is merely slow, and release the threads that hang at the end."""
    wait = ReplicaSet._wait

    def patient(self: ReplicaSet, runs: Sequence[range], workers: Sequence[Worker]) -> Any:
        deadline = time.monotonic() + LONG
        for worker in workers:
            while worker._thread.ident not in HUNG and worker._ends.empty():
                time.sleep(0.01)
                assert time.monotonic() < deadline, "neither done nor hanging"
        return wait(self, runs, workers)

    monkeypatch.setattr(ReplicaSet, "_wait", patient)
    RELEASED.clear()
    yield
    RELEASED.set()
    HUNG.clear()
