"""Check what the host waits for, several processes, and memory."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import TASKS, Task, loss_fn, mlp
from report import Report
from torch.profiler import ProfilerActivity, profile
from training import counted, digest_of, trained, updater_of

import lockstep as ls
from lockstep.precision import DynamicLossScale

HERE = Path(__file__).resolve().parent
NUM_SHARDS = 4
UPDATES = 5
AUDITED = 3
"""The number of first updates, in which shards are computed again and compared."""
FIRST = 100
FLAT = 2**20
"""Bytes by which memory may grow between update `FIRST` and the last one."""
ONE = "1 digest"
SUCCESS = "exit status 0"


def run(report: Report, options: Namespace) -> None:
    """Make the checks."""
    device = options.device
    on_cuda = torch.device(device).type == "cuda"
    for title, expected, given in kinds_of_updates():
        for count in (1, 2):
            name = f"waits per update, {title}, {count} replica{'s' if count > 1 else ''}"
            if on_cuda:  # torch reports no waits for other devices
                report.check(name, expected, partial(waits, [device] * count, given))
    report.measure("the longest times without a kernel in one update, in µs", partial(gaps, device))
    report.check("a batch from a side stream, and a ready one", ONE, partial(side_stream, device))
    if on_cuda:
        report.check("CUDA's sanitizer finds no race under a side stream", SUCCESS, partial(sanitized, device))
        report.check("NCCL with one rank: join, sum, update, abort", "the digest without ranks", nccl)
        for precision in ("ieee", "tf32"):
            find = partial(in_new_process, f"set_precision({precision!r})")
            report.check(f"an update after cuda.matmul.fp32_precision = {precision!r}", SUCCESS, find)
    for backend in ("gloo", "cpu:gloo,cuda:nccl") if on_cuda else ("gloo",):
        name = f"two ranks over {backend} on one device, one replica each and two, and no ranks"
        report.check(name, ONE, partial(two_ranks, device, backend))
    for kind in (ls.ReplicaGroup, ls.DataParallel):
        report.check(f"{kind.__name__} on one replica and three, twice each", ONE, partial(passes, kind, device))
    count = 300 if options.small else 10_000
    name = f"bytes by which memory grows from update {FIRST} to {count}"
    if on_cuda:
        report.check(name, f"at most {FLAT}", partial(growth, device, count), lambda found: found <= FLAT)
    else:  # the memory of a process also grows with its libraries
        report.measure(name, partial(growth, device, count))


def kinds_of_updates() -> list[tuple[str, float, dict[str, Any]]]:
    """List the kinds of updates of docs/gpus.md with the waits that are expected of each."""
    scale: dict[str, Any] = {"loss_scale": DynamicLossScale(2.0**10)}
    return [
        ("skip and a fused optimizer", 0.0, {"fused": True, "on_overflow": "skip", **scale}),
        ("skip, fused, accumulate=2", 0.0, {"fused": True, "on_overflow": "skip", "accumulate": 2, **scale}),
        ("retry", 1.0, {"on_overflow": "retry", **scale}),
        (
            "a loss weight that is a tensor",
            float(NUM_SHARDS),
            {"fused": True, "on_overflow": "skip", "loss_fn": weighted, **scale},
        ),
    ]


def weighted(model: torch.nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> ls.Loss:
    """Return a loss whose weight is a tensor."""
    return ls.Loss(loss_fn(model, inputs, target), weight=(target >= 0).sum())


def waits(devices: Sequence[str], given: dict[str, Any]) -> float:
    """Count the warnings of torch's mode that reports waits, per update."""
    task = TASKS["MLP"]
    batch = tuple(each.to(devices[0]) for each in task.batch(16))
    with updater_of(task, devices, num_shards=NUM_SHARDS, batch=batch, **given) as updater:
        for _ in range(AUDITED):
            updater.update()
        on_cuda = torch.device(devices[0]).type == "cuda"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if on_cuda:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                for _ in range(UPDATES):
                    updater.update()
            finally:
                if on_cuda:
                    torch.cuda.set_sync_debug_mode("default")
    found = [each for each in caught if "called a synchronizing" in str(each.message)]
    for place, line in sorted({(each.filename, each.lineno) for each in found}):
        print(f"       waits at {place}:{line}")
    return len(found) / UPDATES


def gaps(device: str) -> str:
    """Profile an update, and return the longest times in which the device computed nothing."""
    on_cuda = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with updater_of(TASKS["MLP"], [device], num_shards=NUM_SHARDS) as updater:
        for _ in range(3):
            updater.update()
        with profile(activities=activities, acc_events=True) as profiled:
            updater.update()
            synchronize(device)
    wanted = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    spans = sorted(
        (each.time_range.start, each.time_range.end) for each in profiled.events() if each.device_type == wanted
    )
    end, idle = spans[0][1], []
    for start, stop in spans[1:]:
        idle.append(start - end)
        end = max(end, stop)
    whole = end - spans[0][0]
    longest = ", ".join(f"{each:.0f}" for each in sorted(idle, reverse=True)[:3])
    return f"{longest} of {whole:.0f}; idle {sum(each for each in idle if each > 0):.0f} in total"


def synchronize(device: str) -> None:
    """Wait for an accelerator; a CPU has nothing to wait for."""
    if torch.device(device).type != "cpu":
        torch.accelerator.synchronize(torch.device(device))


def side_stream(device: str) -> str:
    """Train on a batch that a side stream has computed, and inside that stream; compare with a ready batch."""
    if torch.device(device).type == "cpu":
        return ONE
    task = TASKS["MLP"]
    expected = trained(task, [device, device], num_shards=NUM_SHARDS)
    stream = torch.Stream(torch.device(device))
    with stream:
        inputs, target = task.batch(16)
        batch = (inputs.to(device) * 1.0, target.to(device))
        found = trained(task, [device, device], num_shards=NUM_SHARDS, batch=batch)
    synchronize(device)
    return counted([found, expected])


def sanitized(device: str) -> str:
    """Run the check of side streams in a process whose launches torch's sanitizer watches."""
    return in_new_process(f"side_stream({device!r})", TORCH_CUDA_SANITIZER="1")


def in_new_process(call: str, **variables: str) -> str:
    """Call a function of this module in a new process, and return its exit status."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(HERE)!r}); import streams; streams.{call}"]
    done = subprocess.run(  # noqa: S603 - our own program
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    print(done.stdout[-2000:] + done.stderr[-2000:], end="")
    return f"exit status {done.returncode}"


def set_precision(precision: str) -> None:
    """Set the format of matrix products by torch's new name, then compare two ranks, which reads all settings."""
    backends: Any = torch.backends
    backends.cuda.matmul.fp32_precision = precision
    torch.use_deterministic_algorithms(True)
    trained(TASKS["MLP"], ["cuda:0"], num_shards=NUM_SHARDS)
    nccl()


def nccl() -> str:
    """Train as the only rank of a group over NCCL, sum, and abort the group."""
    task = TASKS["MLP"]
    expected = trained(task, ["cuda:0"], num_shards=NUM_SHARDS)
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda:0"))
    try:
        communicator = ls.ProcessCommunicator()
        for ordered in (True, False):
            tensor = torch.arange(70_000.0, device="cuda:0")
            communicator.all_reduce([tensor], ordered=ordered)
            assert tensor.sum().item() == torch.arange(70_000.0, device="cuda:0").sum().item()
        found = trained(task, ["cuda:0"], num_shards=NUM_SHARDS, communicator=communicator)
        communicator.close()
        group = dist.group.WORLD
        assert group is not None
        group.abort()
    finally:
        dist.destroy_process_group()
    return "the digest without ranks" if found == expected else "another digest"


def of_rank(device: str, deterministic: bool, replicas: int = 1, backend: str = "gloo") -> list[str]:
    """Train as one of several ranks, or as none: a small network, and one whose gradients are sent during backward."""
    torch.use_deterministic_algorithms(deterministic)
    if "RANK" in os.environ:
        # NCCL takes no two ranks on one GPU of a machine. These are two machines to it, which send over the loopback.
        os.environ |= {"NCCL_HOSTID": os.environ["RANK"], "NCCL_NET": "Socket"}
        dist.init_process_group(backend)
    wide = Task(partial(mlp, 1024), (32,))
    return [
        trained(task, [device] * replicas, num_shards=NUM_SHARDS, updates=6, audit_every=0)
        for task in (TASKS["convnet"], wide)
    ]


def two_ranks(device: str, backend: str) -> str:
    """Train on two ranks that share the device, with one replica each and with two, and without ranks."""
    given = (device, torch.are_deterministic_algorithms_enabled())  # a new process begins without
    ranks = [each for replicas in (1, 2) for each in ls.launch(of_rank, 2, (*given, replicas, backend))]
    return counted([" ".join(each) for each in [*ranks, of_rank(*given)]])


def passes(kind: Callable[..., Any], device: str) -> str:
    """Train by forward and backward of a group or a module with a loss of our own."""
    found = []
    for count in (1, 3, 1, 3):
        task = TASKS["convnet"]
        model = task.model().to(device)
        inputs, target = (each.to(device) for each in task.batch(16))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, fused=torch.device(device).type == "cuda")
        parallel = kind(model, devices=[device] * count, num_shards=NUM_SHARDS)
        torch.manual_seed(3)
        for _ in range(3):
            if kind is ls.DataParallel:
                torch.nn.functional.cross_entropy(parallel(inputs), target).backward()
            else:
                outputs = parallel.forward(inputs, training=True).detach().requires_grad_()
                torch.nn.functional.cross_entropy(outputs, target).backward()
                parallel.backward(outputs.grad)
            optimizer.step()
            model.zero_grad()
        parallel.release()
        found.append(ls.digest(model, optimizer))
    return counted(found)


def growth(device: str, count: int) -> int:
    """Return by how many bytes the tensors on the device, or of the process on a CPU, grow during many updates."""
    with updater_of(Task(mlp, (32,)), [device, device], num_shards=NUM_SHARDS) as updater:
        before = 0
        for update in range(count):
            if update == FIRST:
                before = allocated(device)
            updater.update()
        assert digest_of(updater)
        return allocated(device) - before


def allocated(device: str) -> int:
    """Return the bytes of tensors on an accelerator; on a CPU, those of the process in pages."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(device)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
