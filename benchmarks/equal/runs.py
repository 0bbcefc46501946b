"""How the recipes of `equal_digests.py` are run, by the public face of lockstep alone.

A recipe runs at a place (so many devices of so many processes) and gives one SHA-256 for each update, over
the bytes of weights, buffers, gradients, optimizer state and all that the update measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

import lockstep as ls
from equal.losses import of_tokens, overflowing, supervised
from equal.models import (
    FEATURES,
    NUM_CLASSES,
    BagOfWords,
    images,
    made,
    perceptron,
    pixels,
    sentences,
    vectors,
)
from equal.optimizers import adamw, fused_adamw, rows_and_rest, sgd
from equal.trail import Trail

Builder = Callable[[], nn.Module]
Optimizers = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Place:
    """Where a recipe runs.

    Attributes:
        ranks: Processes.
        devices: CPU devices of each.
    """

    ranks: int
    devices: int

    def __str__(self) -> str:
        return f"{self.ranks}x{self.devices}"


Run = Callable[[Place], list[str]]


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
    """Make an updater of one model."""
    model = made(build)
    optimizers = optimizer(model)
    if schedule:
        options["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizers, 2, gamma=0.5)
        options["epoch_scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizers, 0.7)
    return ls.ParallelUpdater(
        ls.BatchIterator(data(), 11, shuffle=True, last_batch=last_batch, seed=4),
        optimizers,
        model,
        devices=["cpu"] * devices,
        **{"num_shards": 7, "loss_fn": supervised, **options},
    )


def follow(updater: ls.ParallelUpdater, trail: Trail, updates: int) -> None:
    """Make updates and note each."""
    for _ in range(updates):
        trail.note_update(updater, updater.update())


def trained(*built: Any, updates: int = 7, uneven: bool = False, compression: str | None = None, **options: Any) -> Run:
    """Return a run of some updates of one model; see `updater_of`."""

    def run(place: Place) -> list[str]:
        trail = Trail()
        placed: dict[str, Any] = {"devices": place.devices}
        if uneven:
            placed["workloads"] = [3.0 + 2 * ls.find_communicator().rank, *range(1, place.devices)]
        if compression is not None:
            placed["communicator"] = ls.ProcessCommunicator(compression=compression)
        updater = updater_of(*built, **placed, **options)
        try:
            follow(updater, trail, updates)
        finally:
            updater.finalize()
        return trail.digests

    return run


def resumed(place: Place) -> list[str]:
    """Train, and go on from the saved state in another updater."""
    trail = Trail()
    options: dict[str, Any] = {"precision": "bf16", "loss_scale": ls.DynamicLossScale(interval=3)}
    first = updater_of(images, adamw, data=pixels, devices=place.devices, **options)
    try:
        follow(first, trail, 4)
        state = first.state_dict()
    finally:
        first.finalize()
    second = updater_of(images, adamw, data=pixels, devices=place.devices, **options)
    try:
        second.load_state_dict(state)
        follow(second, trail, 4)
    finally:
        second.finalize()
    return trail.digests


def from_a_list(place: Place) -> list[str]:
    """Train on ready batches, each of another size, by an iterable."""
    trail = Trail()
    model = made(perceptron)
    generator = torch.Generator().manual_seed(21)
    batches = [
        (
            torch.randn(size, FEATURES, generator=generator),
            torch.randint(NUM_CLASSES, (size,), generator=generator),
        )
        for size in (9, 6, 12)
    ]
    updater = ls.ParallelUpdater(
        batches, adamw(model), model, devices=["cpu"] * place.devices, num_shards=4, loss_fn=supervised
    )
    try:
        follow(updater, trail, 6)
    finally:
        updater.finalize()
    return trail.digests


def standard(place: Place) -> list[str]:  # noqa: ARG001 - has one device
    """Train on one device."""
    trail = Trail()
    model = made(images)
    updater = ls.StandardUpdater(
        ls.BatchIterator(pixels(), 11, seed=4), sgd(model), model, device="cpu", loss_fn=supervised
    )
    try:
        follow(updater, trail, 6)
    finally:
        updater.finalize()
    return trail.digests


def by_halves(place: Place) -> list[str]:
    """Compute and apply gradients by hand, change them between, and give one batch up."""
    trail = Trail()
    generator = torch.Generator().manual_seed(22)
    updater = updater_of(images, adamw, data=pixels, devices=place.devices)
    try:
        for step in range(5):
            x = torch.randn(8 + step, 1, 4, 7, generator=generator)
            target = torch.randint(NUM_CLASSES, (8 + step,), generator=generator)
            trail.note_update(updater, updater.compute_gradients((x, target)))
            for parameter in updater.get_all_models()["main"].parameters():
                if parameter.grad is not None:
                    parameter.grad.clamp_(-0.2, 0.2)
            if step != 2:
                trail.note_update(updater, updater.apply_gradients())
    finally:
        updater.finalize()
    return trail.digests


def halves_of_two_optimizers(place: Place) -> list[str]:
    """Compute gradients for two optimizers in turn, with loss functions of their own, and apply both."""
    trail = Trail()
    updater = updater_of(BagOfWords, rows_and_rest, data=sentences, devices=place.devices)
    iterator = updater.get_iterator()
    try:
        for _ in range(4):
            batch = iterator.peek()
            for name, loss in (("rows", supervised), ("rest", of_tokens)):
                trail.note_update(updater, updater.compute_gradients(batch, loss_fn=loss, optimizer=name))
            for name in ("rows", "rest"):
                trail.note_update(updater, updater.apply_gradients(name))
            iterator.advance()
    finally:
        updater.finalize()
    return trail.digests


def nonfinite(place: Place) -> list[str]:
    """Look for the shards whose gradients are not finite, and go on."""
    trail = Trail()
    updater = updater_of(perceptron, devices=place.devices, loss_fn=overflowing, loss_scale=2.0**24, max_tries=3)
    try:
        for _ in range(3):
            found = updater.find_nonfinite()
            trail.note([[each.shard, each.batch, list(each.samples), each.loss, each.parameter] for each in found])
            follow(updater, trail, 1)
    finally:
        updater.finalize()
    return trail.digests


def grouped(
    build: Builder, shape: tuple[int, ...], *, uneven: bool = False, one_loss: bool = False, **options: Any
) -> Run:
    """Return a run of forwards and backwards of a group."""

    def run(place: Place) -> list[str]:
        trail = Trail()
        generator = torch.Generator().manual_seed(23)
        model = made(build)
        workloads = range(1, place.devices + 1) if uneven else None
        devices = ["cpu"] * place.devices
        with closing(ls.ReplicaGroup(model, devices, workloads=workloads, **options)) as group:
            for size in (9, 9, 6):
                x = torch.randn(size, *shape, generator=generator)
                target = torch.randint(NUM_CLASSES, (size,), generator=generator)
                output = group.forward({"x": x, "target": target} if one_loss else x)
                if one_loss:
                    group.backward()
                else:
                    group.backward(torch.randn(output.shape, generator=generator))
                inputs = group.input_grads() if options.get("input_grads") else None
                trail.note(output, inputs, group.gradients(), group.gradients(merge=False))
                trail.note(group.get_parameters())
            trail.note(group.forward({"x": x, "target": target} if one_loss else x, training=False))
        return trail.digests

    return run


def module(**options: Any) -> Run:
    """Return a plain loop over a network with a part on several devices."""

    def run(place: Place) -> list[str]:
        trail = Trail()
        body = made(lambda: nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9), nn.ELU(), nn.Dropout(0.2)))
        part = ls.DataParallel(body, devices=["cpu"] * place.devices, num_shards=4, **options)
        network = nn.Sequential(made(lambda: nn.Linear(FEATURES, 9)), part, made(lambda: nn.Linear(9, 3)))
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
                trail.note(output, x.grad, grads, network.state_dict(), optimizer.state_dict())
        finally:
            part.release()
        return trail.digests

    return run


def own_loop(place: Place) -> list[str]:  # noqa: ARG001 - has one device
    """Scale losses in a loop of one's own, and let an optimizer do its whole cycle."""
    trail = Trail()
    model = made(perceptron)
    optimizer = fused_adamw(model)
    scaler = ls.LossScaler(ls.DynamicLossScale(2.0**24, interval=2))
    cycled = made(perceptron)
    cycle = ls.CorrectedMomentumSGD(cycled.parameters(), lr=0.05, momentum=0.9)
    cycle.loss_scaling(interval=2, scale=2.0**20)
    for x, target in torch.utils.data.DataLoader(vectors(), 11):
        optimizer.zero_grad()
        scaler.scale(overflowing(model, x, target)).backward()
        scaler.step(optimizer)
        scaler.update()
        cycle.update(overflowing, cycled, x, target)
        trail.note(model.state_dict(), optimizer.state_dict(), scaler.factor)
        trail.note(cycled.state_dict(), cycle.state_dict())
    return trail.digests


def summed(place: Place) -> list[str]:
    """Add up tensors of several formats over ranks."""
    trail = Trail()
    communicator = ls.find_communicator()
    generator = torch.Generator().manual_seed(25 + communicator.rank)
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
            for sizes in ((5, 700), (300_000, 3, 64)):
                tensors = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
                communicator.all_reduce(tensors)
                trail.note(tensors)
        tensors = [torch.randn(17, generator=generator)]
        communicator.broadcast(tensors, source=place.ranks - 1)
        trail.note(tensors)
    finally:
        communicator.close()
    return trail.digests
