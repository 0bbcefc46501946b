"""Laws that equate two ways to write the same update."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.passes.shard_streams import ShardStreams
from tests.support.runs import (
    NUM_UPDATES,
    ONE,
    OPTIMIZERS,
    UNEVEN,
    Placement,
    cross_entropy,
    digests,
    finalized,
    state_digest,
    train,
    updater_for,
)
from tests.support.workloads import CONVNET, MLP, TRANSFORMER, Workload

WORKLOADS = [MLP, CONVNET, TRANSFORMER]
each_work = pytest.mark.parametrize(
    "work",
    [each if each is CONVNET else pytest.param(each, marks=pytest.mark.slow) for each in WORKLOADS],
    ids=repr,
)
"""Trains the model with dropout and buffers daily, and the others in the slow tests."""


@pytest.mark.usefixtures("brief_turns")
@each_work
def test_serial_is_parallel(work: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = train(work, Placement(3), num_shards=5)
    monkeypatch.setattr(ShardStreams, "_can_override", lambda _: False)
    threads: set[int] = set()

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        threads.add(threading.get_ident())
        return cross_entropy(model, x, target)

    one_by_one = train(work, Placement(3), num_shards=5, loss_fn=loss_fn)
    assert threads == {threading.get_ident()}
    assert one_by_one == at_once


@pytest.mark.each_value
@pytest.mark.parametrize("placement", [ONE, Placement(3)], ids=repr)
@pytest.mark.parametrize("work", WORKLOADS, ids=repr)
def test_accumulation_is_a_larger_batch(work: Workload, placement: Placement) -> None:
    accumulated = train(work, placement, batch_size=32, num_samples=128, num_shards=4, accumulate=2, updates=5)
    larger = train(work, placement, batch_size=64, num_samples=128, num_shards=8, updates=5)
    assert accumulated == larger


@each_work
def test_the_standard_updater_is_a_parallel_one(work: Workload) -> None:
    model = work.model()
    updater = ls.StandardUpdater(
        ls.BatchIterator(work.data(), 9, shuffle=True, last_batch="short", seed=3),
        torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3),
        model,
        num_shards=4,
        loss_fn=cross_entropy,
    )
    with finalized(updater):
        for _ in range(NUM_UPDATES):
            updater.update()
        assert state_digest(updater) == train(work, Placement(4), num_shards=4)


def plain_loop(work: Workload, *, optimizer: Callable[[nn.Module], Any], precision: str) -> str:
    """Train as anybody would, on one intra-op thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = work.model()
        steps = optimizer(model)
        batches = ls.BatchIterator(work.data(), 9, shuffle=True, last_batch="short", seed=3)
        for _ in range(NUM_UPDATES):
            x, target = ls.collate(next(batches))
            steps.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = nn.functional.cross_entropy(model(x), target)
            loss.backward()
            steps.step()
        return ls.digest(model, steps)
    finally:
        torch.set_num_threads(before)


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("work", WORKLOADS, ids=repr)
def test_one_shard_on_one_device_is_a_plain_loop(work: Workload, optimizer: str, precision: str) -> None:
    still = Workload(work.name, lambda: without_dropout(work.build()), work.shape, work.vocabulary)
    plain = plain_loop(still, optimizer=OPTIMIZERS[optimizer], precision=precision)
    assert train(still, optimizer=optimizer, precision=precision) == plain


def without_dropout(model: nn.Module) -> nn.Module:
    """Take the random operations out; a plain loop has no stream to draw from."""
    for module in model.modules():
        if isinstance(module, nn.Dropout | nn.Dropout2d):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("work", WORKLOADS, ids=repr)
def test_power_of_two_loss_scales_change_no_bit(work: Workload, dtype: torch.dtype) -> None:
    def run(loss_scale: float | None) -> str:
        model = work.model().to(dtype)
        return train(
            work,
            Placement(2),
            model=model,
            num_shards=5,
            loss_scale=loss_scale,
            loss_fn=lambda replica, x, target: nn.functional.cross_entropy(
                replica(x.to(dtype) if x.is_floating_point() else x), target
            ),
        )

    assert run(1024.0) == run(2.0**-8) == run(None)


def test_other_loss_scales_do_change_bits() -> None:
    assert train(MLP, num_shards=5, loss_scale=3.0) != train(MLP, num_shards=5)


@each_work
def test_any_interleaving_of_the_shards_gives_the_same_bits(work: Workload) -> None:
    rng = random.Random(0)  # noqa: S311 - for pauses

    def dawdling(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        time.sleep(rng.random() * 0.003)
        loss = cross_entropy(model, x, target)
        time.sleep(rng.random() * 0.003)
        return loss

    expected = train(work, num_shards=6)
    found = digests(work, UNEVEN[1:], num_shards=6, loss_fn=dawdling)
    assert set(found.values()) == {expected}


@each_work
def test_the_two_halves_are_the_whole(work: Workload) -> None:
    with finalized(updater_for(work, Placement(2), num_shards=5)) as updater:
        batches = ls.BatchIterator(work.data(), 9, shuffle=True, last_batch="short", seed=3)
        for _ in range(NUM_UPDATES):
            computed = updater.compute_gradients(next(batches))
            assert not computed.applied
            assert updater.apply_gradients().applied
        assert state_digest(updater) == train(work, num_shards=5)


def test_batches_of_arrays_are_batches_of_samples() -> None:
    with finalized(updater_for(CONVNET, Placement(2), num_shards=5)) as updater:
        batches = ls.BatchIterator(CONVNET.data(), 9, shuffle=True, last_batch="short", seed=3)
        for _ in range(NUM_UPDATES):
            updater.compute_gradients(ls.collate(next(batches)))
            updater.apply_gradients()
        assert state_digest(updater) == train(CONVNET, num_shards=5)
