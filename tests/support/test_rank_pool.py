"""The processes that tests share: what reaches them, what they refuse, and that a dead one is replaced."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lockstep as ls
from tests.support.rank_pool import RankError, RankPool, _answer
from tests.support.ranks import launch_on_ranks

NAME = "TESTS_OF_THE_POOL"


def what_is_here() -> tuple[int, str | None, str, float]:
    return ls.find_communicator().rank, os.environ.get(NAME), str(Path.cwd()), torch.rand(1).item()


def test_a_program_finds_what_a_new_process_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = str(Path.cwd())
    first = launch_on_ranks(what_is_here, 2)
    with monkeypatch.context() as patch:
        patch.setenv(NAME, "set")
        patch.chdir(tmp_path)
        second = launch_on_ranks(what_is_here, 2)
    third = launch_on_ranks(what_is_here, 2)
    drawn = [found[3] for found in first]
    assert drawn[0] != drawn[1]
    assert first == third == [(rank, None, home, drawn[rank]) for rank in range(2)]
    assert second == [(rank, "set", str(tmp_path), drawn[rank]) for rank in range(2)]


def raises() -> None:
    raise ValueError("boom")


def changes_a_setting() -> None:
    torch.set_grad_enabled(False)


STOP = threading.Event()


def leaves_a_thread() -> None:
    threading.Thread(target=STOP.wait, name="left behind").start()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (raises, "ValueError: boom"),
        (changes_a_setting, "the program left changes behind: {'grad mode': (True, False)}"),
        (leaves_a_thread, "the program left threads behind: ['left behind']"),
    ],
)
def test_a_program_that_fails_or_leaves_something_is_refused(program: Callable[[], None], words: str) -> None:
    try:
        STOP.clear()
        succeeded, told = pickle.loads(_answer(pickle.dumps((program, ()))))  # noqa: S301 - our own
    finally:
        torch.set_grad_enabled(True)
        STOP.set()
    assert not succeeded
    assert words in told


def own_number(dies: bool) -> Any:
    if dies:
        os._exit(7)
    return os.getpid()


def test_a_process_that_died_is_named_and_replaced() -> None:
    pool = RankPool()
    try:
        (first,) = pool.call(own_number, [(False,)])
        assert pool.call(own_number, [(False,)]) == [first]
        with pytest.raises(RankError, match="Rank 0: The process ended with 7"):
            pool.call(own_number, [(True,)])
        assert pool.call(own_number, [(False,)]) != [first]
    finally:
        pool.close()
    assert not Path(f"/proc/{first}").exists()
