"""Train a small model at several placements, and compare the digests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from lockstep.communicators import LocalCommunicator
from lockstep.data import BatchIterator
from lockstep.digest import digest
from lockstep.launch import launch
from lockstep.replicas import parse_devices
from lockstep.updaters import ParallelUpdater, supervised

UPDATES: Final = 8
SHARDS: Final = 4
BATCH: Final = 32
SIZE: Final = 8
"""The width and height of an image in pixels."""
CLASSES: Final = 10
TIMEOUT: Final = 60.0
"""Seconds that a process waits for the other one."""


@dataclass(frozen=True)
class Outcome:
    """The result of one placement.

    Attributes:
        placement: The devices and processes.
        digests: The digest of weights, buffers and optimizer state on each rank; empty if it failed.
        seconds: The duration.
        error: Why it failed; empty if it did not.
    """

    placement: str
    digests: tuple[str, ...]
    seconds: float
    error: str = ""


Placement = tuple[str, Callable[[], Sequence[str]]]
"""The name of a placement, and a function that trains there and returns the digest of each rank."""


def run_self_test(
    placements: Iterable[Sequence[Placement]] | None = None, *, on_outcome: Callable[[Outcome], object] = lambda _: None
) -> list[list[Outcome]]:
    """Train at several placements: one device, two, and one in each of two processes; then the same on accelerators.

    Args:
        placements: The placements in groups; by default those of this machine.
        on_outcome: Called with each outcome as soon as it is known.

    Returns:
        The outcomes in groups, in each of which all digests must be equal: those of CPUs, and those of accelerators.
    """
    groups: list[list[Outcome]] = []
    for group in _placements() if placements is None else placements:
        outcomes = []
        for placement, train_there in group:
            start = time.perf_counter()
            try:
                digests, error = tuple(train_there()), ""
            except Exception as raised:  # noqa: BLE001 - any error of this machine is the result of the test
                digests, error = (), f"{type(raised).__name__}: {raised}"
            outcomes.append(Outcome(placement, digests, time.perf_counter() - start, error))
            on_outcome(outcomes[-1])
        groups.append(outcomes)
    return groups


def are_equal(outcomes: Sequence[Outcome]) -> bool:
    """Return whether all placements of a group have one digest, and none has failed."""
    return len({each for outcome in outcomes for each in outcome.digests}) == 1 and not any(
        outcome.error for outcome in outcomes
    )


def _placements() -> Iterator[list[Placement]]:
    yield [
        ("1 CPU device", lambda: [train(["cpu"], alone=True)]),
        ("2 CPU devices", lambda: [train(["cpu", "cpu"], alone=True)]),
        ("1 CPU device in each of 2 processes", lambda: launch(train, 2, (["cpu"],), timeout=TIMEOUT)),
    ]
    devices = [str(device) for device in parse_devices("auto")]
    if devices[0] != "cpu":
        group: list[Placement] = [(devices[0], lambda: [train(devices[:1], alone=True)])]
        group.append((f"{devices[0]} twice", lambda: [train(devices[:1] * 2, alone=True)]))
        if len(devices) > 1:
            group.append((", ".join(devices), lambda: [train(devices, alone=True)]))
        yield group


def train(devices: list[str], *, alone: bool = False, num_shards: int = SHARDS) -> str:
    """Train a small convolutional network, and return the digest of its weights, buffers and optimizer state.

    Args:
        devices: The devices of this process.
        alone: Whether this process is the only one; otherwise it shares every batch with those of its environment.
        num_shards: The number of shards.
    """
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4 * BATCH - 1, 1, SIZE, SIZE, generator=generator)
    dataset = TensorDataset(images, torch.arange(len(images)) % CLASSES)
    # The generator of the caller is put back.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(8 * SIZE**2, CLASSES),
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    updater = ParallelUpdater(
        BatchIterator(dataset, BATCH, shuffle=True, seed=1),
        optimizer,
        model,
        devices=devices,
        num_shards=num_shards,
        loss_fn=supervised(functional.cross_entropy),
        communicator=LocalCommunicator() if alone else None,
    )
    for _ in range(UPDATES):
        updater.update()
    updater.finalize()
    return digest([model.state_dict(), optimizer.state_dict()])
