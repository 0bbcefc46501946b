"""Gradients sent during backward, as docs/many-gpus.md proposes, give the bits of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lockstep as ls
from tests.support.bucketed_sum import BucketedSum
from tests.support.emulated.pool import POOL, build_or_skip
from tests.support.programs.bucketed import NUM_SAMPLES, Run, train
from tests.support.ranks import run_on_ranks
from tests.support.runs import OPTIMIZERS, cross_entropy, finalized, state_digest
from tests.support.workloads import Workload

PLACES = ("emulated:0", "emulated:1")
EVERYTHING = 2**30


def _deep() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(6, 61), nn.Tanh(), nn.Linear(61, 71), nn.GELU(), nn.LayerNorm(71)),
        *(nn.Linear(71, 33), nn.Mish(), nn.Linear(33, 3)),
    )


DEEP = Workload("deep", _deep, (6,))


def by_one_process(num_shards: int, updates: int = 3) -> str:
    model = DEEP.model()
    batches = ls.BatchIterator(DEEP.data(NUM_SAMPLES), NUM_SAMPLES, shuffle=False)
    optimizer = OPTIMIZERS["sgd"](model)
    updater = ls.ParallelUpdater(
        batches, optimizer, model, devices=["cpu"], num_shards=num_shards, loss_fn=cross_entropy
    )
    with finalized(updater):
        for _ in range(updates):
            updater.update()
        return state_digest(updater)


def _train(communicator: ls.ProcessCommunicator, *arguments: Any) -> list[tuple[str, list[str], list[int]]]:
    """Train with each length of buckets."""
    *others, lengths = arguments
    found = []
    for bucket_bytes in lengths:
        digest, record, sent = train(communicator, Run(DEEP, *others, bucket_bytes))
        found.append((digest, [race.what for race in record.races], sent))
    return found


def on_ranks(function: Any, size: int, *arguments: Any) -> list[Any]:
    build_or_skip()
    return run_on_ranks(function, size, *arguments, pool=POOL)


@pytest.mark.each_value
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("num_shards", [8, 11])
def test_any_buckets_ranks_and_devices_give_the_bits_of_one_process(
    size: int, num_devices: int, num_shards: int
) -> None:
    lengths = [1, 6_000, EVERYTHING]
    expected = by_one_process(num_shards)
    for found in on_ranks(_train, size, PLACES[:num_devices], num_shards, lengths):
        assert [digest for digest, _, _ in found] == [expected] * len(lengths)
        assert [races for _, races, _ in found] == [[]] * len(lengths)
        # One bucket per tensor, three for several tensors each, or one. The gradients of the first layer come last, in
        # either order.
        each_tensor, several, everything = (sent for _, _, sent in found)
        assert set(each_tensor) <= {8, 9}
        assert (several, everything) == ([2] * 3, [0] * 3)


class InAnyOrder(BucketedSum):
    """Sums as DistributedDataParallel does: each rank adds up its own terms, and the backend adds the rest."""

    def _over_ranks(self, nodes: Sequence[torch.Tensor]) -> torch.Tensor:
        total = torch.stack([*nodes]).sum(0).cpu()
        dist.all_reduce(total, group=self._group)
        return (total / self._divisor).to(nodes[0].device)


class WithoutWaiting(BucketedSum):
    """Reads gradients that the stream of backward still writes."""

    def _await_gradients(self, device: int) -> None:
        """Return at once: the fault that is planted."""


def _train_wrongly(communicator: ls.ProcessCommunicator, kind: type[BucketedSum]) -> tuple[str, int]:
    digest, record, _ = train(communicator, Run(DEEP, PLACES, 11, 6_000), kind)
    return digest, len(record.races)


def test_all_reduce_gives_other_bits_and_a_missing_wait_is_a_race() -> None:
    expected = by_one_process(11)
    assert all(digest != expected for digest, _ in on_ranks(_train_wrongly, 3, InAnyOrder))
    assert all(races for _, races in on_ranks(_train_wrongly, 2, WithoutWaiting))
