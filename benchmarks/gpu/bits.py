"""Check that results do not depend on where they were computed, as far as one accelerator can show it."""

from __future__ import annotations

import io
import warnings
from argparse import Namespace
from functools import partial
from typing import Any

import torch
from models import TASKS, Task, mlp
from report import Report
from training import counted, digest_of, trained, updater_of

from lockstep.errors import DeterminismWarning
from lockstep.precision import DynamicLossScale

NUM_SHARDS = (1, 4, 8)
OVERFLOWING = 2.0**24
"""A loss scale at which the gradients of every task overflow in float16."""
ONE = "1 digest"
CLOSE = 1e-3
"""The relative difference that the kernels of a CPU and an accelerator may make in ten updates."""


def run(report: Report, options: Namespace) -> None:
    """Make the checks."""
    device = options.device
    for name in ("Adam", "AdamW", "SGD", "Adagrad"):
        report.measure(
            f"_version of a parameter after a fused and a foreach step of {name}", partial(versions, name, device)
        )
    for name, task in TASKS.items():
        for num_shards in NUM_SHARDS[1:2] if options.small else NUM_SHARDS:
            for precision in ("fp32", "bf16", "bf16-true", "fp16-true"):
                title = f"{name}, S = {num_shards}, {precision}: placements, twice each"
                find = partial(placements, task, device, num_shards, precision)
                report.check(title, ONE, find, holds=None if not options.default_kernels else lambda _: True)
    for name, task in TASKS.items():
        report.check(f"{name}: audits of every update, and none", ONE, partial(audited, task, device))
        report.check(f"{name}: saved on one replica, loaded on two, and neither", ONE, partial(resumed, task, device))
    report.check(
        "fp16-true overflows, and is tried again", "more than 1 attempt", partial(attempts, device), more_than_one
    )
    report.check(
        "fused and foreach, beside a CPU: largest relative difference from one CPU",
        f"at most {CLOSE}",
        partial(beside_a_cpu, device),
        lambda found: max(found.values()) <= CLOSE,
    )
    report.check(
        "one update changes the weights by more, so that a stale replica would be seen",
        f"more than {CLOSE}",
        partial(stale, device),
        lambda found: found > CLOSE,
    )
    report.check("a batch that is still being computed on the accelerator, for a CPU", ONE, partial(late_batch, device))
    count = 3 if options.small else 50
    report.check(f"{count} self-tests", ONE, partial(self_tests, device, count))


def versions(name: str, device: str) -> str:
    """Step a parameter once by each implementation, and return how often its version was raised."""
    found = []
    # Adagrad has no fused kernel for CUDA.
    for kind in ("foreach",) if name == "Adagrad" and torch.device(device).type == "cuda" else ("fused", "foreach"):
        parameter = torch.nn.Parameter(torch.ones(4, device=device))
        optimizer = getattr(torch.optim, name)([parameter], lr=0.1, **{kind: True})
        parameter.grad = torch.ones_like(parameter)
        before = parameter._version
        optimizer.step()
        found.append(f"{kind} {parameter._version - before}")
    return ", ".join(found)


def placements(task: Task, device: str, num_shards: int, precision: str) -> str:
    """Train on one replica, two and three on the device, each twice."""
    options: dict[str, Any] = {"num_shards": num_shards, "precision": precision}
    if precision == "fp16-true":
        options |= {"loss_scale": DynamicLossScale(OVERFLOWING), "max_tries": 40}
    counts = (1, 2, 3) if num_shards > 1 else (1,)
    return counted([trained(task, [device] * count, **options) for count in counts for _ in range(2)])


def audited(task: Task, device: str) -> str:
    """Train with a second computation of a shard in every update, which must find nothing, and without one."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeterminismWarning)
        options: dict[str, Any] = {"num_shards": 4, "updates": 8}
        return counted([trained(task, [device, device], audit_every=every, **options) for every in (1, 0)])


def resumed(task: Task, device: str) -> str:
    """Train in two halves, the second one on other replicas, and in one."""
    file = io.BytesIO()
    with updater_of(task, [device], num_shards=4) as updater:
        for _ in range(2):
            updater.update()
        torch.save(updater.state_dict(), file)
    file.seek(0)
    with updater_of(task, [device, device], num_shards=4) as updater:
        updater.load_state_dict(torch.load(file, weights_only=True))
        for _ in range(2):
            updater.update()
        found = digest_of(updater)
    return counted([found, trained(task, [device], num_shards=4, updates=4)])


def attempts(device: str) -> int:
    """Return the attempts of a first update that overflows."""
    scale = DynamicLossScale(OVERFLOWING)
    with updater_of(
        TASKS["MLP"], [device], num_shards=4, precision="fp16-true", loss_scale=scale, max_tries=40
    ) as updater:
        return int(updater.update().tries)


def more_than_one(found: int) -> bool:
    """Return whether a batch was tried again."""
    return found > 1


def weights(devices: list[str], *, fused: bool = True, updates: int = 10, **options: Any) -> torch.Tensor:
    """Return the weights after some updates of an MLP without dropout, whose kernels differ little."""
    task = Task(lambda: torch.nn.Sequential(*(each for each in mlp() if not isinstance(each, torch.nn.Dropout))), (32,))
    with updater_of(task, devices, num_shards=4, fused=fused, **options) as updater:
        for _ in range(updates):
            updater.update()
        model = updater.get_all_models()["main"]
        return torch.cat([each.detach().flatten().cpu() for each in model.parameters()])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the norm of the difference relative to that of the second."""
    return float((one - other).norm() / other.norm())


def beside_a_cpu(device: str) -> dict[str, float]:
    """Train on a CPU and the accelerator, in either order, and compare with the CPU alone."""
    expected = weights(["cpu"])
    return {
        f"{devices}, {'fused' if fused else 'foreach'}": difference(weights(list(devices), fused=fused), expected)
        for devices in (("cpu", device), (device, "cpu"))
        for fused in (True, False)
    }


def stale(device: str) -> float:
    """Return how much the weights change in the updates that a stale replica would have missed."""
    del device
    return difference(weights(["cpu"], updates=9), weights(["cpu"]))


def late_batch(device: str) -> str:
    """Train a CPU on a batch that kernels on the accelerator write while the update begins."""
    task = TASKS["MLP"]
    inputs, target = task.batch(16)
    on_device = inputs.to(device)
    if on_device.device.type == "cuda":
        torch.cuda._sleep(2 * 10**9)  # noqa: SLF001 - the way of torch's own tests
    late = (on_device * 1.0, target.to(device))
    return counted([trained(task, ["cpu"], num_shards=4, batch=batch) for batch in (late, (inputs, target))])


def self_tests(device: str, count: int) -> str:
    """Run the kernels by which ranks compare their devices."""
    from lockstep.communicators.kernel_class import self_test  # noqa: PLC0415 - not public, and may move

    found = [self_test(torch.device(device)) for _ in range(count)]
    return counted([str(sorted(each.items())) for each in found])
