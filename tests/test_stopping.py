"""Signals that arrive at any line at which a run begins or ends: none is lost, and every handler is restored."""

from __future__ import annotations

import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.extensions import Snapshot
from lockstep.stopping import STOP, StopRequest

SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"]
OF_REQUEST = {"install", "uninstall", "_set_handlers", "_restore_handlers"}
OF_SNAPSHOT = {"initialize", "_open", "finalize", "_release", "_write_last"}
CODES = {vars(StopRequest)[name].__code__ for name in OF_REQUEST} | {
    vars(Snapshot)[name].__code__ for name in OF_SNAPSHOT
}
"""The functions at whose lines signals arrive."""


@contextmanager
def signal_at(line: int, number: int) -> Iterator[list[str]]:
    """Send a signal to this process at a line, counted over some functions; the list then names the place."""
    left = itertools.count(line, -1)
    sent: list[str] = []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code not in CODES:
            return None
        if event == "line" and next(left) == 0:
            sent.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield sent
    finally:
        sys.settrace(before)


def functions_reached(run: Callable[[int], list[str]], *, step: int = 1) -> set[str]:
    """Call a function for the lines until there is no such line, and return the functions of the lines."""
    reached = set[str]()
    for line in itertools.count(0, step):
        sent = run(line)
        if not sent:
            return reached
        reached.add(sent[0].partition(":")[0])
    raise AssertionError


@pytest.mark.parametrize("name", SIGNALS)
def test_a_handler_of_the_user_sees_each_signal_once(name: str) -> None:
    number = getattr(signal, name)
    seen: list[int] = []

    def note(signal_number: int, _: FrameType | None) -> None:
        seen.append(signal_number)

    def run(line: int) -> list[str]:
        stop = StopRequest()
        with signal_at(line, number) as sent:
            stop.install(alone=True)
            stop.uninstall()
        assert (signal.getsignal(number), stop.installed) == (note, False), sent
        assert seen == [number] * len(sent), sent
        seen.clear()
        return sent

    before = signal.signal(number, note)
    try:
        reached = functions_reached(run)
    finally:
        signal.signal(number, before)
    assert reached == OF_REQUEST


def test_an_interrupt_is_never_lost_and_leaves_nothing_set() -> None:
    def run(line: int) -> list[str]:
        stop, received, raised = StopRequest(), 0, False
        with signal_at(line, signal.SIGINT) as sent:
            try:
                stop.install(alone=True)
                received = stop.uninstall()
            except KeyboardInterrupt:
                raised = True
        assert (received == signal.SIGINT) + raised == len(sent), sent
        assert [signal.getsignal(getattr(signal, name)) for name in SIGNALS] == before
        assert not stop.installed
        # The next run knows nothing of it.
        assert stop.install(alone=True)
        assert (stop.received, stop.agreed, stop.uninstall()) == (0, 0, 0)
        return sent

    before = [signal.getsignal(getattr(signal, name)) for name in SIGNALS]
    assert functions_reached(run) == OF_REQUEST


def trainer(out: Path) -> ls.Trainer:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.zeros(4, 1))
    updater = ls.ParallelUpdater(
        ls.BatchIterator(data, 4),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"],
        loss_fn=ls.supervised(torch.nn.functional.mse_loss),
    )
    made = ls.Trainer(updater, (2, "update"), out=out)
    made.extend(Snapshot(), trigger=(1, "update"))
    return made


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_ends_a_run_that_begins_or_ends_and_locks_no_folder(tmp_path: Path, step: int) -> None:
    def run(line: int) -> list[str]:
        made = trainer(tmp_path / str(line))
        raised = 0
        with signal_at(line, signal.SIGINT) as sent:
            try:
                made.run()
            except (KeyboardInterrupt, ls.SignalExit):
                raised = 1
        assert raised == len(sent), sent
        assert signal.getsignal(signal.SIGINT) is before
        # It goes on in the same process and folder.
        made.run()
        assert [each.update for each in ls.snapshots.list(made.out)][-1:] == [2], sent
        return sent

    before = signal.getsignal(signal.SIGINT)
    reached = functions_reached(run, step=step)
    assert reached & OF_REQUEST
    assert reached & OF_SNAPSHOT
    assert step > 1 or reached == OF_REQUEST | OF_SNAPSHOT


def test_a_run_in_another_thread_forgets_what_the_ranks_have_agreed_on() -> None:
    installed: list[bool] = []

    def run() -> None:
        installed.append(STOP.install(alone=False))
        # As the message of another rank has it.
        STOP.agreed = signal.SIGTERM
        STOP.uninstall()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert installed == [False]
    assert STOP.agreed == 0
