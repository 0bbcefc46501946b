"""A worker that is killed or stopped ends a run with an error that names it, and nothing of the run is lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep as ls
from tests.support import zygote
from tests.support.interrupting import newest
from tests.support.waiting import await_true

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


class Signalled(Dataset[Any]):
    """A dataset whose last sample sends a signal to the worker that loads it."""

    def __init__(self, number: int | None) -> None:
        self.number = number

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 11 and self.number is not None and torch.utils.data.get_worker_info() is not None:
            os.kill(os.getpid(), self.number)
        return torch.full((2,), float(index))


SOURCES: dict[str, Callable[[Any], Any]] = {
    "BatchIterator": lambda dataset: ls.BatchIterator(dataset, 2, num_workers=1),
    "DataLoader": lambda dataset: DataLoader(dataset, 2, num_workers=1),
    "a function": lambda dataset: lambda: DataLoader(dataset, 2, num_workers=1),
}


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.data.workers.POLL_INTERVAL", 0.1)
    monkeypatch.setattr("lockstep.data.workers.STOPPED_TIMEOUT", 0.5)


def run(source: Any, out: Path, *, hook: Callable[[], None] | None = None) -> ls.ParallelUpdater:
    """Train until a worker is lost, and return the updater."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if hook is not None:
        optimizer.register_step_pre_hook(lambda *_: hook())
    updater = ls.ParallelUpdater(source, optimizer, model, loss_fn=lambda model, x: model(x).mean())
    trainer = ls.Trainer(updater, until=(30, "iteration"), out=out)
    trainer.extend(ls.extensions.Snapshot(), trigger=(100, "iteration"))
    with pytest.raises(ls.WorkerError) as caught:
        trainer.run()
    assert "pid" in str(caught.value)
    assert newest(out) == (updater.iteration, ("emergency snapshot of rank 0",))
    return updater


@pytest.mark.parametrize("source", SOURCES)
def test_a_killed_worker(source: str, tmp_path: Path) -> None:
    assert run(SOURCES[source](Signalled(signal.SIGKILL)), tmp_path).iteration in {3, 4, 5}


@pytest.mark.parametrize("source", SOURCES)
def test_a_stopped_worker(source: str, tmp_path: Path) -> None:
    assert run(SOURCES[source](Signalled(signal.SIGSTOP)), tmp_path).iteration in {3, 4, 5}
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("source", SOURCES)
def test_a_worker_that_is_killed_while_weights_move(source: str, tmp_path: Path) -> None:
    def kill() -> None:
        # Python delivers the signal of its death here, in the middle of the step.
        for worker in multiprocessing.active_children():
            os.kill(worker.pid or 0, signal.SIGKILL)
            await_true(lambda worker=worker: not worker.is_alive())

    updater = run(SOURCES[source](Signalled(None)), tmp_path, hook=kill)
    assert updater.iteration >= 1


class Slow(Signalled):
    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            signal.sigtimedwait([], 2)
        return super().__getitem__(index)


def test_a_slow_worker_is_waited_for() -> None:
    batches = ls.BatchIterator(Slow(None), 2, num_workers=1)
    assert [len(next(batches)) for _ in range(3)] == [2, 2, 2]
    batches.finalize()


ORPHANED = """
import multiprocessing, os, time
import lockstep as ls

multiprocessing.set_start_method("fork")
os.register_at_fork(after_in_child=lambda: (print(os.getpid(), flush=True), time.sleep(1.0)))
next(ls.BatchIterator(list(range(8)), 2, num_workers=1))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc").exists(), reason="the system does not tell which processes there are")
def test_a_worker_whose_process_is_killed_as_it_starts_ends_too(tmp_path: Path) -> None:
    script = tmp_path / "orphaned.py"
    script.write_text(ORPHANED)
    with zygote.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        process.kill()
        process.wait()
        assert Path(f"/proc/{worker}").exists()
        await_true(lambda: not Path(f"/proc/{worker}").exists())


KILLED = """
import multiprocessing, os, signal, sys
import lockstep as ls

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    next(ls.BatchIterator(list(range(64)), 2, num_workers=2))
    print(*(each.pid for each in multiprocessing.active_children()), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="the system does not tell which processes there are")
@pytest.mark.parametrize(
    "method", ["fork", *(pytest.param(each, marks=pytest.mark.slow) for each in ("forkserver", "spawn"))]
)
def test_workers_end_with_the_process_that_needs_them(method: str, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with zygote.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        workers = process.stdout.readline().split()
        process.wait()
        assert len(workers) == 2
        await_true(lambda: not any(Path(f"/proc/{worker}").exists() for worker in workers))
