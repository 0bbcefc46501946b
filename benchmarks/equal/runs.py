"""The runs of the recipes of `equal_digests.py`, which use only the public API of lockstep.

A recipe runs at a placement (a number of ranks with a number of devices each) and yields one SHA-256 per update,
over the bytes of weights, buffers, gradients, optimizer state and everything that the update measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

import lockstep as ls
from equal.digest_log import DigestLog
from equal.losses import overflowing, supervised, weighted_by_tokens
from equal.models import (
    FEATURES,
    NUM_CLASSES,
    BagOfWords,
    build_seeded,
    images,
    perceptron,
    pixels,
    sentences,
    vectors,
)
from equal.optimizers import adamw, fused_adamw, rows_and_rest, sgd

Builder = Callable[[], nn.Module]
Optimizers = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Placement:
    """Where a recipe runs.

    Attributes:
        ranks: The number of processes.
        devices: The number of CPU devices per process.
    """

    ranks: int
    devices: int

    def __str__(self) -> str:
        return f"{self.ranks}x{self.devices}"


Run = Callable[[Placement], list[str]]


def updater_of(
    build: Builder,
    optimizer: Optimizers = sgd,
    *,
    data: Callable[[], Any] = vectors,
    devices: int,
    last_batch: Literal["short", "wrap"] = "short",
    schedule: bool = False,
    **options: Any,
) -> ls.ParallelUpdater:
    """Create an updater of one model."""
    model = build_seeded(build)
    optimizers = optimizer(model)
    if schedule:
        options["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizers, 2, gamma=0.5)
    return ls.ParallelUpdater(
        ls.BatchIterator(data(), 11, shuffle=True, last_batch=last_batch, seed=4),
        optimizers,
        model,
        devices=["cpu"] * devices,
        **{"num_shards": 7, "loss_fn": supervised, **options},
    )


def run_updates(updater: ls.ParallelUpdater, log: DigestLog, updates: int) -> None:
    """Run updates and record each."""
    for _ in range(updates):
        log.record_update(updater, updater.update())


def trained(*built: Any, updates: int = 7, uneven: bool = False, compression: str | None = None, **options: Any) -> Run:
    """Return a run of some updates of one model; see `updater_of`."""

    def run(placement: Placement) -> list[str]:
        log = DigestLog()
        placed: dict[str, Any] = {"devices": placement.devices}
        if uneven:
            placed["workloads"] = [3.0 + 2 * ls.find_communicator().rank, *range(1, placement.devices)]
        if compression is not None:
            placed["communicator"] = ls.ProcessCommunicator(compression=compression)
        updater = updater_of(*built, **placed, **options)
        try:
            run_updates(updater, log, updates)
        finally:
            updater.finalize()
        return log.digests

    return run


def resumed(placement: Placement) -> list[str]:
    """Train, and continue from the saved state in another updater."""
    log = DigestLog()
    options: dict[str, Any] = {"precision": "bf16", "loss_scale": ls.DynamicLossScale(interval=3)}
    first = updater_of(images, adamw, data=pixels, devices=placement.devices, **options)
    try:
        run_updates(first, log, 4)
        state = first.state_dict()
    finally:
        first.finalize()
    second = updater_of(images, adamw, data=pixels, devices=placement.devices, **options)
    try:
        second.load_state_dict(state)
        run_updates(second, log, 4)
    finally:
        second.finalize()
    return log.digests


def from_a_list(placement: Placement) -> list[str]:
    """Train on a list of batches of different sizes."""
    log = DigestLog()
    model = build_seeded(perceptron)
    generator = torch.Generator().manual_seed(21)
    batches = [
        (
            torch.randn(size, FEATURES, generator=generator),
            torch.randint(NUM_CLASSES, (size,), generator=generator),
        )
        for size in (9, 6, 12)
    ]
    updater = ls.ParallelUpdater(
        batches, adamw(model), model, devices=["cpu"] * placement.devices, num_shards=4, loss_fn=supervised
    )
    try:
        run_updates(updater, log, 6)
    finally:
        updater.finalize()
    return log.digests


def standard(placement: Placement) -> list[str]:  # noqa: ARG001 - always one device
    """Train with a `StandardUpdater`."""
    log = DigestLog()
    model = build_seeded(images)
    updater = ls.StandardUpdater(
        ls.BatchIterator(pixels(), 11, last_batch="wrap", seed=4), sgd(model), model, device="cpu", loss_fn=supervised
    )
    try:
        run_updates(updater, log, 6)
    finally:
        updater.finalize()
    return log.digests


def by_halves(placement: Placement) -> list[str]:
    """Compute and apply gradients separately, change them in between, and discard one batch."""
    log = DigestLog()
    generator = torch.Generator().manual_seed(22)
    updater = updater_of(images, adamw, data=pixels, devices=placement.devices)
    try:
        for step in range(5):
            x = torch.randn(8 + step, 1, 4, 7, generator=generator)
            target = torch.randint(NUM_CLASSES, (8 + step,), generator=generator)
            log.record_update(updater, updater.compute_gradients((x, target)))
            for parameter in updater.get_all_models()["main"].parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.2, 0.2)
            # The gradients of one batch are computed but never applied.
            if step == 2:
                updater.get_optimizer("main").zero_grad()
            else:
                log.record_update(updater, updater.apply_gradients())
    finally:
        updater.finalize()
    return log.digests


def halves_of_two_optimizers(placement: Placement) -> list[str]:
    """Compute gradients for two optimizers in turn, with different loss functions, and apply both."""
    log = DigestLog()
    updater = updater_of(BagOfWords, rows_and_rest, data=sentences, devices=placement.devices)
    iterator = updater.get_iterator()
    try:
        for _ in range(4):
            batch = iterator.peek()
            for name, loss in (("rows", supervised), ("rest", weighted_by_tokens)):
                log.record_update(updater, updater.compute_gradients(batch, loss_fn=loss, optimizer=name))
            for name in ("rows", "rest"):
                log.record_update(updater, updater.apply_gradients(name))
            iterator.advance()
    finally:
        updater.finalize()
    return log.digests


def nonfinite(placement: Placement) -> list[str]:
    """Find the shards whose gradients are not finite, and continue training."""
    log = DigestLog()
    updater = updater_of(perceptron, devices=placement.devices, loss_fn=overflowing, loss_scale=2.0**24, max_tries=3)
    try:
        for _ in range(3):
            found = updater.find_nonfinite()
            log.record([[each.shard, each.batch, list(each.samples), each.loss, each.parameter] for each in found])
            run_updates(updater, log, 1)
    finally:
        updater.finalize()
    return log.digests


def grouped(
    build: Builder, shape: tuple[int, ...], *, uneven: bool = False, one_loss: bool = False, **options: Any
) -> Run:
    """Return a run of forwards and backwards of a group."""

    def run(placement: Placement) -> list[str]:
        log = DigestLog()
        generator = torch.Generator().manual_seed(23)
        model = build_seeded(build)
        workloads = range(1, placement.devices + 1) if uneven else None
        devices = ["cpu"] * placement.devices
        with closing(ls.ReplicaGroup(model, devices, workloads=workloads, **options)) as group:
            # Another size changes the lengths of the shards.
            for size in (9, 9, 6):
                x = torch.randn(size, *shape, generator=generator)
                target = torch.randint(NUM_CLASSES, (size,), generator=generator)
                output = group.forward({"x": x, "target": target} if one_loss else x)
                if one_loss:
                    group.backward()
                else:
                    group.backward(torch.randn(output.shape, generator=generator))
                inputs = group.input_grads() if options.get("input_grads") else None
                log.record(output, inputs, group.gradients(), group.gradients(merge=False))
                log.record(group.get_parameters())
            log.record(group.forward({"x": x, "target": target} if one_loss else x, training=False))
        return log.digests

    return run


def module(**options: Any) -> Run:
    """Return a plain training loop over a network of which one part runs on several devices."""

    def run(placement: Placement) -> list[str]:
        log = DigestLog()
        body = build_seeded(lambda: nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.ELU(), nn.Dropout(0.2)))
        part = ls.DataParallel(body, devices=["cpu"] * placement.devices, num_shards=4, **options)
        network = nn.Sequential(
            build_seeded(lambda: nn.Linear(FEATURES, 9)), part, build_seeded(lambda: nn.Linear(9, 3))
        )
        optimizer = adamw(network)
        generator = torch.Generator().manual_seed(24)
        try:
            for size in (10, 8, 10, 13):
                x = torch.randn(size, FEATURES, generator=generator, requires_grad=True)
                optimizer.zero_grad()
                output = network(x)
                torch.logsumexp(output, 0).square().sum().backward()
                optimizer.step()
                grads = [parameter.grad for parameter in network.parameters()]
                log.record(output, x.grad, grads, network.state_dict(), optimizer.state_dict())
        finally:
            part.release()
        return log.digests

    return run


def custom_loop(placement: Placement) -> list[str]:  # noqa: ARG001 - always one device
    """Scale losses in a custom loop, and run the complete training step of an optimizer."""
    log = DigestLog()
    model = build_seeded(perceptron)
    optimizer = fused_adamw(model)
    scaler = ls.LossScaler(ls.DynamicLossScale(2.0**24, interval=2))
    cycled = build_seeded(perceptron)
    cycle = ls.CorrectedMomentumSGD(cycled.parameters(), lr=0.05, momentum=0.9)
    cycle.loss_scaling(interval=2, scale=2.0**20)
    for x, target in torch.utils.data.DataLoader(vectors(), 11):
        optimizer.zero_grad()
        scaler.scale(overflowing(model, x, target)).backward()
        scaler.step(optimizer)
        scaler.update()
        cycle.update(overflowing, cycled, x, target)
        log.record(model.state_dict(), optimizer.state_dict(), scaler.factor)
        log.record(cycled.state_dict(), cycle.state_dict())
    return log.digests


def summed(placement: Placement) -> list[str]:
    """Sum tensors of several dtypes over ranks."""
    log = DigestLog()
    communicator = ls.find_communicator()
    generator = torch.Generator().manual_seed(25 + communicator.rank)
    try:
        # Small tensors and large ones, and each dtype, are sent in different ways.
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
            for sizes in ((5, 700), (300_000, 3, 64)):
                tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
                communicator.all_reduce(tensors)
                log.record(tensors)
        tensors = [torch.randn(17, generator=generator)]
        communicator.broadcast(tensors, source=placement.ranks - 1)
        log.record(tensors)
    finally:
        communicator.close()
    return log.digests
