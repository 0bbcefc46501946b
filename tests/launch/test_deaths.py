"""How the end of a rank reaches the process that launched it."""

from __future__ import annotations

import os
import signal

import pytest

import lockstep as ls
from tests.support.processes import children, listening

pytestmark = pytest.mark.usefixtures("spawned_by_forks")


def raise_on(rank: int) -> None:
    communicator = ls.find_communicator()
    if communicator.rank == rank:
        raise FloatingPointError(f"rank {rank} has had enough")
    communicator.barrier()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_ranks_real_traceback_reaches_the_caller(rank: int) -> None:
    before = listening(os.getpid())
    with pytest.raises(ls.PeerError, match=f"Rank {rank} raised FloatingPointError: rank {rank} has") as raised:
        ls.launch(raise_on, 2, args=(rank,))
    assert raised.value.rank == rank
    assert 'raise FloatingPointError(f"rank {rank} has had enough")' in raised.value.traceback
    assert children() == []
    assert listening(os.getpid()) <= before


def die_by(way: str) -> None:
    communicator = ls.find_communicator()
    if communicator.rank == 1:
        if way == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, way))
    communicator.barrier()


@pytest.mark.parametrize(("way", "words"), [("exit", "exited with code 7"), ("SIGKILL", "killed by SIGKILL")])
def test_a_death_without_a_word_is_named(way: str, words: str) -> None:
    with pytest.raises(ls.PeerError, match=f"Rank 1 (was )?{words}"):
        ls.launch(die_by, 2, args=(way,))
    assert children() == []
