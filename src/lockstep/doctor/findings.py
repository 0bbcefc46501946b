"""Find what would break the determinism guarantee on a machine, or would make a run fail or slow."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

from lockstep.doctor.machine import CORES, core_quota, existing, file_system, host_address, kernel_variables, read
from lockstep.replicas import missing_settings, usable_cores

Level = Literal["problem", "note"]

THREAD_COUNTS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
LOST_AT_RESTART: Final = frozenset({"tmpfs", "ramfs"})
SHARED_MEMORY: Final = 256 << 20
"""Bytes of shared memory below which the workers of a data loader may run out of it."""


@dataclass(frozen=True)
class Finding:
    """Something that was found.

    Attributes:
        level: ``"problem"`` for what breaks the guarantee or keeps runs from working, ``"note"`` for what may matter.
        text: What was found.
        cure: What to do; empty if there is nothing to do.
    """

    level: Level
    text: str
    cure: str = ""


_note = partial(Finding, "note")
_problem = partial(Finding, "problem")


def find_problems(folder: Path, variables: Mapping[str, str] | None = None) -> list[Finding]:
    """Return what was found, problems first.

    Args:
        folder: The folder for snapshots.
        variables: The environment variables; by default those of this process.
    """
    variables = os.environ if variables is None else variables
    found = [
        *check_variables(variables),
        *check_cores(read(CORES), cores=usable_cores(), quota=core_quota()),
        *_check_precision(),
        *_check_gpus(variables),
        *_check_processes(),
        *check_disk(folder, file_system(folder)),
    ]
    return sorted(found, key=lambda each: each.level != "problem")


def check_variables(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what environment variables change.

    Args:
        variables: The environment variables.

    >>> [finding.level for finding in check_variables({"MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "4"})]
    ['note', 'note']
    """
    chosen = kernel_variables(variables)
    if chosen:
        yield _note(
            f"These variables choose kernels, on which the bits depend: {_listed(chosen)}.",
            "Set them to the same values for every run and rank that you compare; ranks refuse to start otherwise.",
        )
    counts = {name: variables[name] for name in THREAD_COUNTS if variables.get(name, "1") != "1"}
    if counts:
        yield _note(
            f"{_listed(counts)}: no bit depends on it, since lockstep computes with one thread per device.",
            "Code of yours outside of updates, such as data loading, may use as many threads.",
        )
    if variables.get("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "0") not in {"", "0"}:
        yield _note(
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE lets matrix products use TF32, whose results are less precise.",
            "Unset it, or set it on every machine.",
        )
    if variables.get("LD_PRELOAD"):
        yield _note(
            f"LD_PRELOAD={variables['LD_PRELOAD']} loads libraries before torch, which may replace its kernels.",
            "Use the same on every machine.",
        )


def _listed(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())


def check_cores(cpuinfo: str, *, cores: int, quota: float | None) -> Iterator[Finding]:
    """Yield what the cores have.

    Args:
        cpuinfo: What Linux says about the cores, as in ``/proc/cpuinfo``; empty if unknown.
        cores: The number of cores that this process may use.
        quota: The number of cores that a container may keep busy; None if there is no limit.
    """
    kinds = {
        tuple(re.findall(r"^(?:model|stepping|flags|CPU part|Features)\s*: (.*)$", core, re.MULTILINE))
        for core in cpuinfo.strip().split("\n\n")
    }
    if len(kinds) > 1:
        yield _problem(
            f"The cores of this processor are of {len(kinds)} kinds, whose kernels may round differently.",
            "Run on cores of one kind, such as by `taskset`.",
        )
    if quota is not None and quota < cores:
        yield _note(
            f'devices="auto" uses {cores} cores, but this container may keep only {quota:g} busy.',
            f"Pass devices={max(1, int(quota))}; the result does not depend on it if num_shards is given.",
        )


def _check_precision() -> Iterator[Finding]:
    """Yield number formats other than the one of the tensors. They depend on the environment and on start-up files."""
    backends: Any = torch.backends  # torch does not declare all of these
    owners = {"all": backends, "oneDNN": backends.mkldnn}
    if torch.cuda.is_available():
        # That of cuDNN's convolutions is TF32 by default.
        owners |= {"CUDA": backends.cuda.matmul, "cuDNN": backends.cudnn.conv}
    lower = {name: owner.fp32_precision for name, owner in owners.items() if owner.fp32_precision in {"tf32", "bf16"}}
    if lower:
        listed = ", ".join(f"{name}: {value}" for name, value in lower.items())
        yield _note(
            f"float32 is computed in a smaller format ({listed}).",
            'Use the same setting on every rank, or set fp32_precision = "ieee".',
        )


def _check_gpus(variables: Mapping[str, str]) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        return
    names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
    if len(names) > 1:
        yield _problem(
            f"The GPUs are of {len(names)} kinds ({', '.join(sorted(names))}), whose kernels round differently.",
            "Name devices of one kind, or choose them by CUDA_VISIBLE_DEVICES.",
        )
    yield from check_gpu_settings(variables)


def check_gpu_settings(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Name settings without which kernels of CUDA may give other bits in every run.

    Args:
        variables: The environment.
    """
    missing = missing_settings(variables)
    if missing:
        # cuDNN then chooses algorithms by measuring them, and not only the few that are allowed by default vary.
        yield (_problem if torch.backends.cudnn.benchmark else _note)(
            f"Kernels of CUDA may give other bits in every run, because these are not set: {', '.join(missing)}.",
            "Call lockstep.use_deterministic_kernels() before anything runs on a GPU.",
        )


def _check_processes() -> Iterator[Finding]:
    if not (dist.is_available() and dist.is_gloo_available()):
        yield _problem("This build of torch has no gloo, by which processes sum gradients.")
    if host_address() is None:
        yield _note(
            "The host name of this machine has no address, by which gloo finds it from other machines.",
            "Pass --local-addr to lockstep run, or set GLOO_SOCKET_IFNAME, for runs on several machines.",
        )
    shared = Path("/dev/shm")  # noqa: S108 - only its size is read
    size = shutil.disk_usage(shared).total if shared.is_dir() else SHARED_MEMORY
    if size < SHARED_MEMORY:
        yield _note(
            f"Shared memory has {size >> 20} MiB, which workers of data loaders need.",
            "Give a container more of it, such as by --shm-size=1g.",
        )


def check_disk(folder: Path, kind: str) -> Iterator[Finding]:
    """Yield what keeps a folder from holding snapshots.

    Args:
        folder: The folder.
        kind: The type of its file system.
    """
    parent = existing(folder)
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        yield _problem(f"The folder {folder} cannot be written.", "Choose another for `Trainer(out=)`.")
    elif kind in LOST_AT_RESTART:
        yield _note(f"The folder {folder} is in memory ({kind}), and snapshots in it are lost at a restart.")


def is_sound(findings: Sequence[Finding]) -> bool:
    """Return whether there is no problem among findings."""
    return all(finding.level != "problem" for finding in findings)
