"""Every way to fail, in every phase of an update: the other ranks say so within seconds, and nothing is left.

One rank of three fails at a point that the test's own code reaches: a dataset, a loss function, a hook on a
gradient, a communicator's sum, a hook on the optimizer, a schedule of epochs. It notes when.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import lockstep as ls
from launch.processes import children, listening

TIMEOUT = 9.0
"""Seconds that ranks wait for each other; a third of it may pass in silence."""
SOON = 20.0
"""Seconds within which every rank has raised: 3 of silence or of a dead rank's last beats, 1 to tell it; a
machine that is busy with other things stretches them."""
FAULTY, SIZE = 1, 3
UPDATE = 2
"""The update, counted from 1, in which the fault happens."""

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
CASES = [
    pytest.param(way, phase, id=f"{way}-{phase}", marks=() if (way, phase) in SAMPLE else pytest.mark.slow)
    for way in WAYS
    for phase in PHASES
]


class Fault:
    """Happens once, when its phase is reached in its update."""

    def __init__(self, way: str, phase: str, folder: str, rank: int) -> None:
        self.way, self.phase, self.folder, self.rank = way, phase, Path(folder), rank
        self.update = 0

    def at(self, phase: str) -> None:
        if self.rank != FAULTY or phase != self.phase or (phase != "start-up" and self.update != UPDATE):
            return
        time.sleep(0.6)  # two beats, for only what was heard can be told of a rank that dies
        (self.folder / "injected").write_text(json.dumps([self.way, self.phase, time.time()]))
        if self.way == "raise":
            raise FloatingPointError(f"in {phase}")
        if self.way == "leave":
            sys.exit(3)
        if self.way == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, self.way))


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

    def exchange_with(self, *arguments: Any, **options: Any) -> Any:
        if self.watch.doing == "reduce":
            self.fault.at("reduce")
        return super().exchange_with(*arguments, **options)

    def sum_partials(self, *arguments: Any, **options: Any) -> Any:
        self.fault.at("reduce")
        return super().sum_partials(*arguments, **options)


def train(way: str, phase: str, folder: str) -> None:
    fault = Fault(way, phase, folder, int(os.environ["RANK"]))
    try:
        run(fault)
    except ls.PeerError as error:
        told = {"rank": error.rank, "phase": error.phase, "traceback": error.traceback, "when": time.time()}
        (fault.folder / f"told-{fault.rank}").write_text(json.dumps(told))
        raise


def run(fault: Fault) -> None:
    found = ls.find_communicator()
    communicator = FaultySum(watch=found.watch, timeout=TIMEOUT)
    communicator.fault = fault
    fault.at("start-up")
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: fault.at("optimizer"))
    updater = ls.ParallelUpdater(
        ls.BatchIterator(Samples(fault), batch_size=6),
        optimizer,
        model,
        devices=["cpu"],
        num_shards=3,
        loss_fn=loss_with(fault),
        epoch_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, ending(fault)),
        communicator=communicator,
    )
    for _ in range(4):
        fault.update += 1
        updater.update()


def loss_with(fault: Fault) -> Callable[..., torch.Tensor]:
    def loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        fault.at("forward")
        scores = model(x)
        scores.register_hook(lambda _: fault.at("backward"))
        return functional.cross_entropy(scores, y)

    return loss


def ending(fault: Fault) -> Callable[[int], float]:
    def factor(step: int) -> float:
        if step > 0:
            fault.at("end")
        return 1.0

    return factor


@pytest.mark.parametrize(("way", "phase"), CASES)
def test_every_rank_says_who_failed_and_why(way: str, phase: str, tmp_path: Path) -> None:
    before = listening(os.getpid())
    with pytest.raises(ls.PeerError) as raised:
        ls.launch(train, SIZE, args=(way, phase, str(tmp_path)), timeout=TIMEOUT)
    assert raised.value.rank == FAULTY
    injected_way, injected_phase, began = json.loads((tmp_path / "injected").read_text())
    assert (injected_way, injected_phase) == (way, phase), "the fault happened"
    told = [json.loads((tmp_path / f"told-{rank}").read_text()) for rank in range(SIZE) if rank != FAULTY]
    assert [each["rank"] for each in told] == [FAULTY] * (SIZE - 1)
    assert [each["phase"] for each in told] == [phase] * (SIZE - 1)
    check_traceback(way, phase, [each["traceback"] for each in told])
    assert max(each["when"] - began for each in told) < SOON
    assert children() == []
    assert listening(os.getpid()) == before


def check_traceback(way: str, phase: str, tracebacks: Sequence[str]) -> None:
    """Who raised sent the line that did; who died could send none."""
    for text in tracebacks:
        assert (f"FloatingPointError: in {phase}" in text) == (way == "raise")
        assert ("SIG" not in way and way != "exit") or text == ""


def test_the_sample_has_every_way() -> None:
    assert [way for way, _ in SAMPLE] == WAYS
    assert len({phase for _, phase in SAMPLE}) == len(SAMPLE)
