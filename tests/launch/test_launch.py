"""`launch`: a function on several new processes, whatever becomes of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lockstep as ls
from tests.support.processes import listening


def rank_and_sum(offset: float) -> tuple[int, int, list[float]]:
    communicator = ls.find_communicator()
    numbers = torch.full((3,), communicator.rank + offset)
    communicator.all_reduce([numbers])
    return communicator.rank, communicator.size, numbers.tolist()


def test_every_rank_returns_its_value() -> None:
    assert ls.launch(rank_and_sum, 3, args=(0.5,)) == [(rank, 3, [4.5] * 3) for rank in range(3)]


def own_conditions() -> tuple[int, bool, str, float]:
    return torch.get_num_threads(), dist.is_initialized(), os.environ["MASTER_ADDR"], time.monotonic()


def test_a_rank_computes_on_one_thread_and_joins_nobody_unasked() -> None:
    before = dict(os.environ)
    ((threads, initialised, address, _),) = ls.launch(own_conditions, 1)
    assert (threads, initialised, address) == (1, False, "127.0.0.1")
    assert dict(os.environ) == before


def addresses_listened_on() -> set[str]:
    ls.find_communicator().barrier()
    return listening(os.getpid())


def test_nothing_listens_beyond_the_loopback() -> None:
    before = listening(os.getpid())
    found = ls.launch(addresses_listened_on, 2)
    assert all(found), "gloo listens somewhere"
    assert {address for each in found for address in each} <= {"127.0.0.1", "::1"}
    assert listening(os.getpid()) <= before


def leave(code: int | None) -> None:
    sys.exit(code)


def test_an_exit_without_fault_returns_none() -> None:
    assert ls.launch(leave, 1, args=(None,)) == [None]


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
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=240, check=False)
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
    with subprocess.Popen([sys.executable, script, folder]) as parent:
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


@pytest.mark.parametrize("size", [1, 2])
def test_a_communicator_made_by_name_joins_the_others_too(size: int) -> None:
    total = [1.0] if size == 1 else [3.0]
    assert ls.launch(by_name, size) == [(rank, size, total) for rank in range(size)]
