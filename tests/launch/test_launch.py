"""`launch`: a function on several new processes, whatever becomes of them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import lockstep as ls
from tests.support import zygote
from tests.support.processes import listening

AGENT = "torch.distributed.elastic"
"""Modules by which `lockstep run` starts ranks; other programs and the ranks do not need them."""


@dataclass(frozen=True)
class Seen:
    """What a rank found, before and after it joined the others."""

    threads: int
    was_initialised: bool
    address: str
    place: tuple[int, int]
    summed: list[float]
    listened_on: set[str]
    loaded_agent: bool


def look_around(offset: float) -> Seen:
    before = torch.get_num_threads(), dist.is_initialized(), os.environ["MASTER_ADDR"]
    communicator = ls.find_communicator()
    numbers = torch.full((3,), communicator.rank + offset)
    communicator.all_reduce([numbers])
    return Seen(
        *before, (communicator.rank, communicator.size), numbers.tolist(), listening(os.getpid()), AGENT in sys.modules
    )


@dataclass(frozen=True)
class Launched:
    """What two ranks found, and what the launching process was before and after."""

    ranks: list[Seen]
    variables: tuple[dict[str, str], dict[str, str]]
    listened_on: tuple[set[str], set[str]]


@pytest.fixture(scope="module")
def launched() -> Launched:
    variables, listened_on = dict(os.environ), listening(os.getpid())
    ranks = ls.launch(look_around, 2, args=(0.5,))
    return Launched(ranks, (variables, dict(os.environ)), (listened_on, listening(os.getpid())))


def test_every_rank_returns_its_value(launched: Launched) -> None:
    assert [(seen.place, seen.summed) for seen in launched.ranks] == [((rank, 2), [2.0] * 3) for rank in range(2)]


def test_no_rank_loads_the_agent(launched: Launched) -> None:
    assert not any(seen.loaded_agent for seen in launched.ranks)


def start_methods() -> tuple[str | None, str]:
    """Tell the start method that was set, and that of a DataLoader's workers, whose dataset cannot be pickled."""
    chosen = multiprocessing.get_start_method(allow_none=True)
    dataset = [lambda: None] * 2
    loader = DataLoader(dataset, num_workers=1, collate_fn=lambda _: os.getpid())  # type: ignore[arg-type]
    assert next(iter(loader)) != os.getpid()
    return chosen, multiprocessing.get_start_method()


@pytest.mark.usefixtures("spawned_by_forks")
@pytest.mark.skipif(multiprocessing.get_all_start_methods()[0] != "fork", reason="fork is not this system's default")
@pytest.mark.parametrize("chosen", [None, "fork"])
def test_the_start_method_is_the_users_or_the_systems(chosen: str | None) -> None:
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(chosen, force=True)
    try:
        assert ls.launch(start_methods, 1) == [(chosen, "fork")]
        assert multiprocessing.get_start_method(allow_none=True) == chosen
    finally:
        multiprocessing.set_start_method(before, force=True)


def die_with_workers() -> None:
    """Die as the out-of-memory killer ends a rank, while a worker that it has forked lives on."""
    workers = iter(DataLoader([0] * 64, num_workers=1))  # type: ignore[arg-type]
    next(workers)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.usefixtures("spawned_by_forks")
def test_a_rank_that_dies_is_noticed_while_its_workers_live() -> None:
    with pytest.raises(ls.PeerError, match="Rank 0 was killed by SIGKILL"):
        ls.launch(die_with_workers, 1)


def test_a_rank_computes_on_one_thread_and_joins_nobody_unasked(launched: Launched) -> None:
    for seen in launched.ranks:
        assert (seen.threads, seen.was_initialised, seen.address) == (1, False, "127.0.0.1")
    before, after = launched.variables
    assert after == before


def test_nothing_listens_beyond_the_loopback(launched: Launched) -> None:
    found = [seen.listened_on for seen in launched.ranks]
    assert all(found), "gloo listens somewhere"
    assert {address for each in found for address in each} <= {"127.0.0.1", "::1"}
    before, after = launched.listened_on
    assert after <= before


def leave(code: int | None) -> None:
    sys.exit(code)


@pytest.mark.usefixtures("spawned_by_forks")
def test_an_exit_without_fault_returns_none() -> None:
    assert ls.launch(leave, 1, args=(None,)) == [None]


@pytest.mark.usefixtures("spawned_by_forks")
def test_an_exit_code_is_a_failure() -> None:
    with pytest.raises(ls.PeerError, match="Rank 0 raised SystemExit: 3"):
        ls.launch(leave, 1, args=(3,))


def test_a_function_that_cannot_be_imported() -> None:
    def inner() -> None: ...

    with pytest.raises(ValueError, match=r"`main` must be a function that a new process can import.*top level"):
        ls.launch(inner)
    with pytest.raises(ValueError, match="`main` must be a function that a new process can import"):
        ls.launch(lambda: None)
    with pytest.raises(TypeError, match="`main` must be a function, got a int"):
        ls.launch(3)


def test_an_argument_that_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match=r"`args` must be picklable.*lock"):
        ls.launch(leave, args=(threading.Lock(),))


def return_a_lock() -> object:
    return threading.Lock()


@pytest.mark.usefixtures("spawned_by_forks")
def test_a_value_that_cannot_be_pickled() -> None:
    with pytest.raises(ls.PeerError, match=r"Rank 0 raised TypeError: cannot pickle '_thread.lock' object"):
        ls.launch(return_a_lock, 1)


@pytest.mark.parametrize(("options", "name"), [({"num_processes": 0}, "num_processes"), ({"timeout": 0}, "timeout")])
def test_numbers_out_of_range(options: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        ls.launch(leave, **options)


TYPED = """
import lockstep as ls
def main(): pass
try:
    ls.launch(main)
except ValueError as error:
    print(error)
"""


def test_a_function_typed_into_a_session_gets_the_remedy() -> None:
    done = subprocess.run([sys.executable], input=TYPED, capture_output=True, text=True, timeout=240, check=True)
    assert "main was typed into a notebook or an interactive session" in done.stdout
    assert "%%writefile train.py" in done.stdout


UNGUARDED = """
import lockstep as ls
def main(): pass
ls.launch(main, 1)
"""


def test_a_script_without_its_guard_is_told_where_the_call_belongs(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    done = zygote.run([sys.executable, script])
    assert done.returncode == 1
    assert "Rank 0 exited with code 1 before `main` returned." in done.stderr
    assert 'belongs under `if __name__ == "__main__":`' in done.stderr


ORPHANS = """
import os, sys, time
import lockstep as ls
def main(folder):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    time.sleep(300)
if __name__ == "__main__":
    ls.launch(main, 2, args=(sys.argv[1],))
"""


def test_ranks_end_with_the_process_that_launched_them(tmp_path: Path) -> None:
    script, folder = tmp_path / "orphans.py", tmp_path / "pids"
    script.write_text(ORPHANS)
    folder.mkdir()
    with zygote.Popen([sys.executable, script, folder]) as parent:
        ranks = wait_for(lambda: [int(path.name) for path in folder.iterdir()], count=2)
        os.kill(ranks[0], signal.SIGSTOP)  # not even one that is stopped stays behind
        parent.kill()
    wait_for(lambda: [pid for pid in ranks if not Path(f"/proc/{pid}").exists()], count=2)


def wait_for(look, *, count: int) -> list[int]:
    deadline = time.monotonic() + 240
    while len(found := look()) < count:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def by_name() -> tuple[int, int, list[float]]:
    communicator = ls.ProcessCommunicator()
    numbers = torch.tensor([1.0 + communicator.rank])
    communicator.all_reduce([numbers])
    return communicator.rank, communicator.size, numbers.tolist()


@pytest.mark.usefixtures("spawned_by_forks")
@pytest.mark.parametrize("size", [1, 2])
def test_a_communicator_made_by_name_joins_the_others_too(size: int) -> None:
    total = [1.0] if size == 1 else [3.0]
    assert ls.launch(by_name, size) == [(rank, size, total) for rank in range(size)]
