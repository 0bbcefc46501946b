"""Every way to fail, in every phase of an update: the other ranks say so, and nothing is left.

One rank of three fails at a point that the test's own code reaches: a dataset, a loss function, a hook on a
gradient, a communicator's sum, a hook on the optimizer, a schedule of epochs. It notes when. A small model's
gradients ride with the message by which ranks meet; a large one's are sent during backward, and there the
fault happens once they are.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import lockstep as ls
from lockstep.communicators import PendingSum
from lockstep.communicators.failures.watch import Watch
from tests.support.processes import children, left_in_memory, listening
from tests.support.waiting import await_true

pytestmark = pytest.mark.usefixtures("spawned_by_forks")

TIMEOUT = 15.0
"""Seconds that ranks wait for each other; a third of it may pass in silence."""
LONG = 300.0
"""Seconds that a busy machine may take for what is waited for here."""
FAULTY, SIZE = 1, 3
UPDATE = 2
"""The update, counted from 1, in which the fault happens."""
EARLY_UPDATE = 6
"""The same where gradients are to be sent during backward, which begins with the third update."""

WAYS = ["raise", "leave", "exit", "SIGKILL", "SIGSTOP"]
PHASES = ["start-up", "data loading", "forward", "backward", "reduce", "optimizer", "end"]
SAMPLE = [
    ("raise", "data loading"),
    ("leave", "start-up"),
    ("exit", "forward"),
    ("SIGKILL", "reduce"),
    ("SIGSTOP", "optimizer"),
]
"""Each way once, in different phases; the others are long."""
EARLY_PHASES = ["forward", "backward", "sending", "reduce", "optimizer"]
EARLY_SAMPLE = [("SIGKILL", "sending")]


def cases(phases: Sequence[str], sample: Sequence[tuple[str, str]]) -> list[Any]:
    """Every way in every phase; those outside of the sample are long."""
    return [
        pytest.param(way, phase, id=f"{way}-{phase}", marks=() if (way, phase) in sample else pytest.mark.slow)
        for way in WAYS
        for phase in phases
    ]


class Fault:
    """Happens once, when its phase is reached in its update."""

    def __init__(self, way: str, phase: str, folder: str, rank: int, *, early: bool) -> None:
        self.way, self.phase, self.folder, self.rank = way, phase, Path(folder), rank
        self.early = early
        self.watch = Watch()
        self.when = EARLY_UPDATE if early else UPDATE
        self.update = 0

    def at(self, phase: str) -> None:
        if self.rank != FAULTY or phase != self.phase or (phase != "start-up" and self.update != self.when):
            return
        self.await_beats()
        if self.early:
            await_true(lambda: len(begun(self.folder)) == SIZE, LONG)
        (self.folder / "injected").write_text(json.dumps([self.way, self.phase]))
        if self.way == "raise":
            raise FloatingPointError(f"in {phase}")
        if self.way == "leave":
            sys.exit(3)
        if self.way == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, self.way))

    def await_beats(self) -> None:
        """Wait until a beat has told the phase, for only what was heard can be told of a rank that dies."""
        heartbeat = self.watch._heartbeat
        assert heartbeat is not None
        rounds = heartbeat.rounds + 2  # the one that goes on now may have told another phase
        await_true(lambda: heartbeat.rounds >= rounds, LONG)

    def note(self, what: str) -> None:
        """Leave a note that this rank came to something in the update of the fault."""
        if self.update == self.when:
            (self.folder / f"{what}-{self.rank}").touch()


def begun(folder: Path) -> set[str]:
    """Name the notes of the ranks that have begun to send in the update of the fault."""
    return {path.name for path in folder.glob("begun-*")}


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 12  # two updates, after which an epoch ends

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.fault.at("data loading")
        return torch.full((4,), float(index)), torch.tensor(index % 3)


class FaultySum(ls.ProcessCommunicator):
    """Fails between a rank's own sums and those of all, which small ones make by an exchange."""

    fault: Fault

    def exchange(self, payload: bytes, table: Any = None) -> Any:
        if table is not None and self.watch.phase == "reduce":
            self.fault.at("reduce")
        return super().exchange(payload, table)

    def begin_sum(self, *arguments: Any, **options: Any) -> PendingSum:
        self.fault.note("begun")
        return super().begin_sum(*arguments, **options)

    def sum_partials(self, *arguments: Any, **options: Any) -> Any:
        self.fault.at("reduce")
        return super().sum_partials(*arguments, **options)


def train(way: str, phase: str, folder: str, early: bool) -> None:
    fault = Fault(way, phase, folder, int(os.environ["RANK"]), early=early)
    try:
        run(fault)
    except (ls.PeerError, ls.PeerInterrupt) as error:
        told = {"rank": error.rank}
        if isinstance(error, ls.PeerError):
            told |= {"phase": error.phase, "traceback": error.traceback}
        (fault.folder / f"told-{fault.rank}").write_text(json.dumps(told))
        raise


def run(fault: Fault) -> None:
    (fault.folder / f"came-{fault.rank}").write_text(str(os.getpid()))
    await_true(lambda: len(list(fault.folder.glob("came-*"))) == SIZE, LONG)  # by now each has imported all it needs
    found = ls.find_communicator()
    fault.watch = found.watch
    communicator = FaultySum(watch=found.watch, timeout=TIMEOUT)
    communicator.fault = fault
    fault.at("start-up")
    torch.manual_seed(0)
    width = 600 if fault.early else 4
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 3))
    optimizer = Counting(model.parameters(), lr=1e-4)
    optimizer.fault = fault
    optimizer.register_step_pre_hook(lambda *_: fault.at("optimizer"))
    updater = ls.ParallelUpdater(
        ls.BatchIterator(Samples(fault), batch_size=6),
        optimizer,
        model,
        devices=["cpu"],
        num_shards=3,
        loss_fn=loss_with(fault),
        communicator=communicator,
    )
    for _ in range(fault.when + 2):
        fault.update += 1
        updater.update()


def loss_with(fault: Fault) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        fault.at("forward")
        hidden = model[0](x)
        hidden.register_hook(lambda _: fault.at("sending"))  # the other layers' gradients are made by then
        scores = model[2](model[1](hidden))
        scores.register_hook(lambda _: fault.at("backward"))
        return functional.cross_entropy(scores, y)

    return loss


class Counting(torch.optim.SGD):
    """An optimizer that counts epochs, where the last fault of an update may be."""

    use_auto_new_epoch = False
    fault: Fault

    def new_epoch(self, auto: bool = False) -> None:
        assert auto
        self.fault.at("end")


@pytest.mark.parametrize(("way", "phase"), cases(PHASES, SAMPLE))
def test_every_rank_says_who_failed_and_why(way: str, phase: str, tmp_path: Path) -> None:
    told = fault_in(way, phase, tmp_path, early=False)
    check_told(told, way, phase, doing=phase)


@pytest.mark.parametrize(("way", "phase"), cases(EARLY_PHASES, EARLY_SAMPLE))
def test_a_fault_while_gradients_are_sent(way: str, phase: str, tmp_path: Path) -> None:
    told = fault_in(way, phase, tmp_path, early=True)
    check_told(told, way, phase, doing="backward" if phase == "sending" else phase)
    check_sending(tmp_path)


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("forward", marks=pytest.mark.slow),
        "sending",
        pytest.param("optimizer", marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_of_one_rank_ends_all_of_them(phase: str, tmp_path: Path) -> None:
    fault_in("SIGINT", phase, tmp_path, early=True)
    check_sending(tmp_path)


def fault_in(way: str, phase: str, folder: Path, *, early: bool) -> list[dict[str, Any]]:
    """Have the fault happen, check that all ranks end by it, and give what the others were told."""
    before, prefix = listening(os.getpid()), f"/lockstep-{os.getpid()}-"
    with pytest.MonkeyPatch.context() as patch:
        # The ranks inherit what the names of their semaphores begin with; other programs use that memory, too.
        patch.setitem(multiprocessing.current_process()._config, "semprefix", prefix)  # type: ignore[attr-defined]
        with pytest.raises(ls.PeerError) as raised:
            ls.launch(train, SIZE, args=(way, phase, str(folder), early), timeout=TIMEOUT)
    assert raised.value.rank == FAULTY
    injected_way, injected_phase = json.loads((folder / "injected").read_text())
    assert (injected_way, injected_phase) == (way, phase), "the fault happened"
    told = [json.loads((folder / f"told-{rank}").read_text()) for rank in range(SIZE) if rank != FAULTY]
    assert [each["rank"] for each in told] == [FAULTY] * (SIZE - 1)
    assert children() == []
    assert listening(os.getpid()) <= before
    marks = [prefix.strip("/"), *(f"_{path.read_text()}_" for path in folder.glob("came-*"))]
    await_true(lambda: not [name for name in left_in_memory() if any(mark in name for mark in marks)], LONG)
    return told


def check_sending(folder: Path) -> None:
    """Every rank had begun to send in the update of the fault."""
    assert begun(folder) == {f"begun-{rank}" for rank in range(SIZE)}


def check_told(told: Sequence[dict[str, Any]], way: str, phase: str, *, doing: str) -> None:
    """All know what the rank was doing; who raised sent the line that did, and who died could send none."""
    for each in told:
        assert each["phase"] == doing
        assert (f"FloatingPointError: in {phase}" in each["traceback"]) == (way == "raise")
        assert ("SIG" not in way and way != "exit") or each["traceback"] == ""


def test_the_sample_has_every_way() -> None:
    assert [way for way, _ in SAMPLE] == WAYS
    assert len({phase for _, phase in SAMPLE}) == len(SAMPLE)
