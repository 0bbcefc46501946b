"""The placement law bites: each way to break it is caught by one device and several of unequal speed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from lockstep import tree
from lockstep.replicas.buffers.buffer_sums import BufferSum
from lockstep.replicas.buffers.replica_buffers import ReplicaBuffers
from lockstep.replicas.passes import shard_streams, summing
from lockstep.replicas.pool import settings
from lockstep.tree import PartialSum, ShardSum, Tensors
from tests.support.runs import UNEVEN, cross_entropy, digests
from tests.support.workloads import CONVNET, MLP, TRANSFORMER, WIDE, Workload


def caught(work: Workload, **options: object) -> bool:
    """Tell whether the placement law, over one device and three of unequal speed, finds something."""
    with torch.random.fork_rng():
        return len(set(digests(work, UNEVEN, num_shards=6, audit_every=0, **options).values())) > 1


def dawdling(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Let the other threads come in between the seed of a stream and what is drawn from it."""
    time.sleep(0.002)
    return cross_entropy(model, x, target)


@pytest.mark.parametrize("work", [MLP, CONVNET, TRANSFORMER], ids=repr)
def test_without_a_mutant_there_is_nothing_to_catch(work: Workload) -> None:
    assert not caught(work, loss_fn=dawdling)


@pytest.mark.parametrize("work", [MLP, CONVNET, TRANSFORMER], ids=repr)
def test_a_left_fold_is_caught(work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(self: ShardSum, following: int) -> None:  # noqa: ARG001 - a fold has no look ahead
        while len(self.partials) > 1:
            tree.add_into(self.partials[-2].tensors, self.partials.pop().tensors)

    def folded(shards: Sequence[int]) -> list[tuple[int, int]]:
        return [(0, index) for index in range(1, len(shards))]

    monkeypatch.setattr(ShardSum, "merge_complete", fold)
    monkeypatch.setattr(tree, "merge_order", folded)
    assert caught(work)


@pytest.mark.parametrize("work", [MLP, CONVNET, TRANSFORMER], ids=repr)
def test_a_sum_over_a_stack_is_caught(work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def stacked(partials: Sequence[PartialSum]) -> Tensors:
        first = partials[0].tensors
        for index in range(len(first)):
            present = [tensor for partial in partials if (tensor := partial.tensors[index]) is not None]
            first[index].copy_(torch.stack(present).sum(0))
        return first

    monkeypatch.setattr(summing, "total", stacked)
    assert caught(work)


def test_buffers_carried_from_shard_to_shard_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, restore = ReplicaBuffers.start_shards, ReplicaBuffers.restore

    def restoring_begin(self: ReplicaBuffers, first: int, **options: bool) -> BufferSum:
        sums = begin(self, first, **options)
        restore(self)
        return sums

    monkeypatch.setattr(ReplicaBuffers, "start_shards", restoring_begin)
    monkeypatch.setattr(ReplicaBuffers, "restore", lambda _: None)
    # Counts on which shards disagree are refused; running statistics show the fault, too.
    assert caught(CONVNET, buffers={"*num_batches_tracked": "first"})


@pytest.mark.parametrize("work", [CONVNET, TRANSFORMER], ids=repr)
def test_one_stream_per_device_is_caught(work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_place(seed: int, position: int) -> int:  # noqa: ARG001 - that is the fault
        name = threading.current_thread().name
        return int(name.split("-")[1]) if name.startswith("lockstep-") else 0

    monkeypatch.setattr(shard_streams, "stream_seed", by_place)
    assert caught(work)


@pytest.mark.parametrize("work", [CONVNET, TRANSFORMER], ids=repr)
def test_the_global_generator_in_threads_is_caught(work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def seeded(seed: int) -> Iterator[None]:
        torch.default_generator.manual_seed(seed)
        yield

    monkeypatch.setattr(shard_streams, "shard_stream", seeded)
    monkeypatch.setattr(shard_streams.DefaultGeneratorGuard, "moved", lambda _: False)
    assert caught(work, loss_fn=dawdling)


def test_two_intra_op_threads_in_the_main_thread_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    enter, before = settings.ComputeMode.__enter__, torch.get_num_threads()

    def two_in_main(self: settings.ComputeMode) -> settings.ThreadSettings:
        entered = enter(self)
        if threading.current_thread() is threading.main_thread():
            torch.set_num_threads(2)
        return entered

    monkeypatch.setattr(settings.ComputeMode, "__enter__", two_in_main)
    try:
        assert caught(WIDE, batch_size=192, num_samples=384, updates=2)
    finally:
        torch.set_num_threads(before)  # the mutant's number is not put back where there was one before
