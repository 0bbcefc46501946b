"""Compare updates with a plain loop of torch: autocast, GradScaler and fused optimizers."""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial

import torch
from models import LanguageModel, Task, loss_fn, mlp, resnet
from report import Report
from training import updater_of

from lockstep.precision import DynamicLossScale
from streams import synchronize

TARGET = 0.98
"""The least speed of lockstep, relative to the plain loop."""
SCALE = 2.0**10
SECONDS_PER_TURN = 0.3
LEAST_UPDATES = 5
"""The least number of updates in a turn."""


def run(report: Report, options: Namespace) -> None:
    """Make the checks."""
    kernels = "default kernels" if options.default_kernels else "deterministic kernels"
    rounds = 2 if options.small else 15
    if torch.device(options.device).type == "cpu":
        torch.set_num_threads(1)  # as a device of lockstep has
    for name, (task, batch_size) in tasks(small=options.small).items():
        for optimizer in ("SGD", "AdamW"):
            report.check(
                f"{name}, fused {optimizer}, {kernels}: plain loop / lockstep",
                f"at least {TARGET}",
                partial(compare, with_optimizer(task, optimizer), options.device, batch_size, rounds),
                # What a machine without an accelerator measures says nothing of one with it.
                (lambda _: True) if options.small else meets_target,
            )


def tasks(*, small: bool) -> dict[str, tuple[Task, int]]:
    """Return the models with their batch sizes."""
    if small:
        text = Task(lambda: LanguageModel(50, 16, 16, 2, 1), (16,), num_tokens=50, classes=50)
        return {
            "tiny MLP": (Task(mlp, (32,)), 8),
            "like ResNet-50": (Task(lambda: resnet(4, (1, 1, 1, 1)), (3, 32, 32), classes=1000), 2),
            "transformer": (text, 2),
        }
    return {
        "tiny MLP": (Task(partial(mlp, 128), (32,)), 256),
        "like ResNet-50": (Task(resnet, (3, 224, 224), classes=1000), 64),
        "like ResNet-50, 256 images": (Task(resnet, (3, 224, 224), classes=1000), 256),
        "transformer of 124 M": (Task(LanguageModel, (1024,), num_tokens=50_257, classes=50_257), 8),
    }


def with_optimizer(task: Task, name: str) -> Task:
    """Return the task with an optimizer of torch.optim."""
    extra = {"momentum": 0.9} if name == "SGD" else {}
    return Task(task.build, task.shape, task.num_tokens, task.classes, partial(getattr(torch.optim, name), **extra))


def meets_target(found: str) -> bool:
    """Return whether the ratio at the beginning of a result is high enough."""
    return float(found.split(maxsplit=1)[0]) >= TARGET


def plain(task: Task, device: str, batch: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    """Return the update of a loop as in torch's documentation of automatic mixed precision."""
    model = task.model().to(device)
    optimizer = task.optimizer(model.parameters(), lr=1e-4, fused=True)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, init_scale=SCALE)
    inputs, target = batch

    def update() -> None:
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=torch.float16):
            loss = loss_fn(model, inputs, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return update


def compare(task: Task, device: str, batch_size: int, rounds: int) -> str:
    """Let both take turns; return the median ratio, and the median milliseconds of each."""
    inputs, target = task.batch(batch_size)
    batch = (inputs.to(device), target.to(device))
    seconds: dict[str, list[float]] = {"plain": [], "lockstep": []}
    with updater_of(
        task,
        [device],
        num_shards=1,
        batch=batch,
        precision="fp16",
        fused=True,
        lr=1e-4,
        loss_scale=DynamicLossScale(SCALE),
        on_overflow="skip",
    ) as updater:
        updates: dict[str, Callable[[], object]] = {"plain": plain(task, device, batch), "lockstep": updater.update}
        # A turn waits at its end, which training never does. Several updates per turn make that count for little.
        for update in updates.values():
            for _ in range(3):
                update()
        count = max(LEAST_UPDATES, round(SECONDS_PER_TURN / timed(updates["plain"], device, 2)))
        for turn in range(rounds):
            for name in sorted(updates, reverse=turn % 2 == 1):
                seconds[name].append(timed(updates[name], device, count))
    ratio = statistics.median(a / b for a, b in zip(seconds["plain"], seconds["lockstep"], strict=True))
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    return f"{ratio:.3f} ({medians['plain']:.3f} ms and {medians['lockstep']:.3f} ms)"


def timed(update: Callable[[], object], device: str, count: int) -> float:
    """Return the seconds per update, to the end of the last kernel."""
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(count):
        update()
    synchronize(device)
    return (time.perf_counter() - begin) / count
