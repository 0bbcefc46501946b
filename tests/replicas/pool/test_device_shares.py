"""``devices="auto"`` is one rank's share of the machine."""

from __future__ import annotations

import os
from itertools import chain

import pytest
import torch

from lockstep.communicators import RunEnvironment
from lockstep.replicas.pool import devices as module
from lockstep.replicas.pool.devices import _gpus_of, parse_devices

RANKS = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.mark.parametrize(("cores", "size", "shares"), [(8, 2, [4, 4]), (7, 3, [2, 2, 3]), (2, 4, [1, 1, 1, 1])])
def test_cores_are_shared(monkeypatch: pytest.MonkeyPatch, cores: int, size: int, shares: list[int]) -> None:
    monkeypatch.setattr(module, "usable_cores", lambda: cores)
    monkeypatch.setattr(module, "_accelerators", lambda: ("cpu", 0))
    found = []
    for rank in range(size):
        for name, value in (RANKS | {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}).items():
            monkeypatch.setenv(name, value)
        found.append(len(parse_devices("auto")))
        assert parse_devices(3) == [torch.device("cpu")] * 3
    assert found == shares


def test_a_process_that_is_alone_has_every_core() -> None:
    if not torch.cuda.is_available():
        assert len(parse_devices("auto")) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("count", "size"), [(8, 2), (8, 8), (7, 3), (2, 2)])
def test_gpus_are_shared_without_one_left_or_shared(count: int, size: int) -> None:
    shares = [_gpus_of(RunEnvironment(rank, size, rank, size), count) for rank in range(size)]
    assert list(chain.from_iterable(shares)) == list(range(count))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_gpus_that_a_launcher_has_restricted_are_not_divided_again() -> None:
    assert list(_gpus_of(RunEnvironment(3, 4, 3, 4), 1)) == [0]
    assert list(_gpus_of(RunEnvironment(1, 2, 1, 2, own_gpus=True), 2)) == [0, 1]
