"""Ranks with emulated devices of their own, over gloo, which sends host memory only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lockstep as ls
from tests.support.emulated.pool import POOL, build_or_skip
from tests.support.emulated.runs import ONE_CPU, train_on
from tests.support.ranks import run_on_ranks
from tests.support.workloads import CONVNET, MLP, WIDE, Workload


def on_ranks(function: Any, size: int, *arguments: Any) -> list[Any]:
    build_or_skip()
    return run_on_ranks(function, size, *arguments, pool=POOL)


def _train(communicator: ls.ProcessCommunicator, work: Workload, devices: tuple[str, ...], options: Any) -> str:
    return train_on(work, devices, num_shards=5, communicator=communicator, **options)[0]


@pytest.mark.each_value
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("work", [MLP, CONVNET, WIDE], ids=repr)
def test_ranks_with_two_devices_each_train_as_one_cpu(work: Workload, size: int) -> None:
    found = on_ranks(_train, size, work, ("emulated:0", "emulated:1"), {})
    assert found == on_ranks(_train, 1, work, ONE_CPU, {}) * size


def _sums(communicator: ls.ProcessCommunicator, device: str) -> list[list[float]]:
    found = []
    for ordered in (True, False):
        tensors = [torch.arange(5.0, device=device) * (communicator.rank + 1), torch.ones(70_000, device=device)]
        communicator.all_reduce(tensors, ordered=ordered)
        found += [each[:5].tolist() for each in tensors]
    values = torch.full((3,), float(communicator.rank), device=device)
    communicator.broadcast([values], source=1)
    return [*found, values.tolist()]


@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_an_accelerator_are_sent_by_way_of_host_memory(size: int) -> None:
    found = on_ranks(_sums, size, "emulated:1")
    assert found == on_ranks(_sums, size, "cpu")
