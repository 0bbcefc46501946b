"""A signal ends a run after a finished update, with a snapshot and the right exit code, and the run resumes exactly."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lockstep as ls
from tests.support import zygote
from tests.support.interrupting import (
    INTERVAL,
    UPDATES,
    await_points,
    check_ended,
    ending,
    lockstep_run,
    newest,
    resume,
    start,
)
from tests.support.processes import children
from tests.support.resuming import vectors
from tests.support.waiting import await_true

SIGNALS = ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"]
CODES = {"SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "SIGUSR1": 138}
LAST_FINISHED = {"sample": 1, "loss": 1, "step": 1, "batch": 0, "evaluation": 0, "extension": 0}
"""How many updates more than at the point are finished when the run ends; samples are loaded during an update."""
MOMENTS = [
    (point, update, name)
    for name in SIGNALS
    for point in LAST_FINISHED
    for update in range(1, UPDATES)
    if point != "batch" or update < UPDATES - 1
]
SAMPLE = [("step", 5, "SIGHUP"), random.Random(18).choice(MOMENTS)]  # noqa: S311 - a choice of tests
MANY = [each for each in random.Random(1).sample(MOMENTS, 100) if each not in SAMPLE]  # noqa: S311 - as above


def skip_after_nohup() -> None:
    """Skip a test of hangups where processes inherit that SIGHUP is ignored."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        pytest.skip("the tests were started with nohup, so SIGHUP is ignored")


@pytest.mark.parametrize(
    ("point", "update", "name"), [*SAMPLE, *(pytest.param(*each, marks=pytest.mark.slow) for each in MANY)]
)
def test_moments(tmp_path: Path, point: str, update: int, name: str) -> None:
    if name == "SIGHUP":
        skip_after_nohup()
    iterable = "1" if point == "batch" else ""
    with start(tmp_path, [f"{point}:{update}"], ITERABLE=iterable) as process:
        assert await_points(process).processes == {f"{point}:{update}": process.pid}
        process.send_signal(getattr(signal, name))
        code, _, errors = ending(process)
    assert code == CODES[name], errors
    finished = update + LAST_FINISHED[point]
    update_of_snapshot, reasons = newest(tmp_path)
    assert update_of_snapshot == finished
    # The snapshot of the interval is as good.
    assert reasons == (f"signal {name}",) or (reasons == ("interval",) and finished % INTERVAL == 0)
    check_ended(tmp_path, resume(tmp_path, ITERABLE=iterable), resumed_from=finished, iterable=iterable)


@pytest.mark.parametrize("interactive", [False, True])
@pytest.mark.parametrize("moment", ["call", "finalize"])
def test_an_interactive_session_outlives_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, interactive: bool
) -> None:
    if interactive:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    batches = ls.BatchIterator(vectors(), 8)
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = ls.supervised(torch.nn.functional.cross_entropy)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=1, num_shards=2, loss_fn=loss)
    trainer = ls.Trainer(updater, (2, "iteration"), tmp_path, extensions=[ls.extensions.Snapshot()])
    press = ls.trainer.make_extension(
        trigger=(2, "iteration") if moment == "call" else None,
        finalize=lambda _: os.kill(os.getpid(), signal.SIGINT) if moment == "finalize" else None,
    )(lambda _: os.kill(os.getpid(), signal.SIGINT))
    trainer.extend(press)
    with pytest.raises(KeyboardInterrupt if interactive else ls.SignalExit):
        trainer.run()
    assert newest(tmp_path)[0] == 2
    trainer.until = (4, "iteration")
    trainer.remove("<lambda>")
    trainer.run()
    assert updater.iteration == 4


@pytest.mark.parametrize("point", ["writing:*", pytest.param("loss:9", marks=pytest.mark.slow)])
def test_second_interrupt_ends_at_once_and_harms_no_snapshot(tmp_path: Path, point: str) -> None:
    whole = [4, 8] if point == "loss:9" else []
    with start(tmp_path, [point], HOLD="1") as process:
        assert set(await_points(process).processes) == {point}
        # The thread that writes has a low priority, and may be behind the updates.
        await_true(lambda: [each.update for each in ls.snapshots.list(tmp_path)] == whole)
        # The system merges signals that are not handled yet, so there may be more than two.
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        code, _, _ = ending(process)
    # The point would have held the process for longer than the test waits, and then the code would have been 130.
    assert code == -signal.SIGINT
    assert [each.update for each in ls.snapshots.list(tmp_path)] == whole
    check_ended(tmp_path, resume(tmp_path), resumed_from=None)


def test_workers_are_shielded(tmp_path: Path) -> None:
    with start(tmp_path, ["loss:5"], WORKERS="2") as process:
        await_points(process)
        workers = children(process.pid)
        assert len(workers) == 2
        # A scheduler sends the signal to every process.
        for each in [*workers, process.pid]:
            os.kill(each, signal.SIGTERM)
        code, _, errors = ending(process)
    assert code == 143, errors
    assert newest(tmp_path) == (6, ("signal SIGTERM",)), errors
    assert not any(Path(f"/proc/{each}").exists() for each in workers)
    check_ended(tmp_path, resume(tmp_path), resumed_from=6)


@pytest.mark.parametrize(
    ("point", "finished"), [("rank1.loss:5", 6), pytest.param("rank0.evaluation:6", 6, marks=pytest.mark.slow)]
)
def test_one_rank_suffices(tmp_path: Path, point: str, finished: int) -> None:
    with start(tmp_path, [point], launcher=lockstep_run("-n", "2")) as process:
        reached = await_points(process)
        os.kill(reached.processes[point], signal.SIGTERM)
        code, _, errors = ending(process)
    assert code == 143, errors
    assert newest(tmp_path) == (finished, ("signal SIGTERM",))
    check_ended(tmp_path, resume(tmp_path), resumed_from=finished)


@pytest.mark.parametrize("name", ["SIGUSR1", *(pytest.param(each, marks=pytest.mark.slow) for each in SIGNALS[:2])])
def test_the_agent_passes_signals_on(tmp_path: Path, name: str) -> None:
    with start(tmp_path, ["rank0.step:5", "rank1.loss:5"], launcher=lockstep_run("-n", "2")) as process:
        await_points(process, 1)
        process.send_signal(getattr(signal, name))
        code, _, errors = ending(process)
    assert code == CODES[name], errors
    update, reasons = newest(tmp_path)
    assert reasons == (f"signal {name}",)
    check_ended(tmp_path, resume(tmp_path), resumed_from=update)


@pytest.fixture
def nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("nohup")
@pytest.mark.parametrize("launcher", [[], lockstep_run("-n", "1")], ids=["alone", "lockstep run"])
def test_a_hangup_that_is_ignored_ends_nothing(tmp_path: Path, launcher: list[str]) -> None:
    with start(tmp_path, ["loss:5"], launcher=launcher) as process:
        await_points(process)
        os.killpg(process.pid, signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        code, _, errors = ending(process)
    assert code == 143, errors
    assert newest(tmp_path) == (6, ("signal SIGTERM",))


PRINTING = """
import fcntl, sys, termios, torch
import lockstep as ls

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.ones(4, 2), torch.zeros(4, 1))
updater = ls.ParallelUpdater(
    ls.BatchIterator(data, 4), torch.optim.SGD(model.parameters(), lr=0.1), model, devices=["cpu"], num_shards=1,
    loss_fn=ls.supervised(torch.nn.functional.mse_loss),
)
trainer = ls.Trainer(updater, (10**9, "update"), out=sys.argv[1])
trainer.extend(ls.extensions.LogReport(), trigger=(1, "update"))
trainer.extend(ls.extensions.PrintReport(), trigger=(1, "update"))
trainer.extend(ls.extensions.ProgressBar())
trainer.extend(ls.extensions.Snapshot(), trigger=(10**9, "update"))
trainer.run()
"""


def test_a_run_whose_terminal_is_closed_while_it_prints_writes_its_state(tmp_path: Path) -> None:
    skip_after_nohup()
    script = tmp_path / "printing.py"
    script.write_text(PRINTING)
    ours, theirs = os.openpty()
    process = zygote.Popen(
        [sys.executable, script, tmp_path / "run"], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    printed = b""
    while printed.count(b"\n") < 30:
        printed += os.read(ours, 4096)
    os.close(ours)
    assert process.wait(timeout=600) == 129, printed
    assert newest(tmp_path / "run")[1] == ("signal SIGHUP",)


def test_a_killed_agent_leaves_time_to_write(tmp_path: Path) -> None:
    with start(tmp_path, ["rank0.writing:*"], launcher=lockstep_run("-n", "1", "--shutdown-timeout", "60")) as process:
        reached = await_points(process)
        process.kill()
        ending(process)
        worker = reached.processes["rank0.writing:*"]
        while Path(f"/proc/{worker}").exists():
            signal.sigtimedwait([], 0.05)
    update, reasons = newest(tmp_path)
    # Where the signal is heard after an update whose snapshot is due anyway, that one is enough, also if it is the one
    # that was being written when the agent was killed.
    assert reasons == ("signal SIGTERM",) or (reasons == ("interval",) and update % INTERVAL == 0)
    check_ended(tmp_path, resume(tmp_path), resumed_from=update)


def test_exit_codes() -> None:
    exits = [ls.SignalExit(getattr(signal, name)) for name in SIGNALS]
    assert [each.code for each in exits] == [143, 130, 129, 138]
    assert [each.name for each in exits] == SIGNALS
    assert str(exits[0]) == "The run was ended by SIGTERM."


@pytest.mark.slow
def test_a_rank_that_waits_for_a_stopped_one_writes_its_state(tmp_path: Path) -> None:
    # A rank may be silent for a third of the timeout.
    launcher = lockstep_run("-n", "2", "--timeout", "15", "--shutdown-timeout", "60")
    with start(tmp_path, ["rank1.loss:5"], launcher=launcher) as process:
        os.kill(await_points(process).processes["rank1.loss:5"], signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        code, _, errors = ending(process)
    assert code == 143, errors
    assert newest(tmp_path) == (5, ("emergency snapshot of rank 0",))
    check_ended(tmp_path, resume(tmp_path), resumed_from=5)


LAUNCHED = """
import sys
import lockstep as ls

def train(out):
    from tests.support.programs.signalled import main  # which reads the rank

    main(out, 12, ["rank0.loss:5"])

if __name__ == "__main__":
    ls.launch(train, 2, args=(sys.argv[1],))
"""


@pytest.mark.slow
def test_launched_ranks_have_time_to_write(tmp_path: Path) -> None:
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    with start(tmp_path, launcher=[sys.executable, str(script), str(tmp_path)], SLOW="1.5") as process:
        await_points(process)
        # As a terminal does it: the signal goes to the launching process and to the ranks.
        os.killpg(process.pid, signal.SIGINT)
        code, _, errors = ending(process)
    assert code == -signal.SIGINT, errors
    assert newest(tmp_path) == (6, ("signal SIGINT",))
    check_ended(tmp_path, resume(tmp_path), resumed_from=6)
