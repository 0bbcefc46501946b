"""The settings of a process and its threads that tests must leave as they were."""

from __future__ import annotations

import os
import signal
import threading

import torch

from lockstep.streams.state import DEFAULT_GENERATOR

SMALLEST_DENORMAL = 5e-324


def process_settings() -> dict[str, object]:
    """Read the settings that torch, Python and lockstep keep for the whole process or the calling thread."""
    return {
        "intra-op threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "denormals flushed": SMALLEST_DENORMAL * 1.0 == 0.0,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "memory filled": torch.utils.deterministic.fill_uninitialized_memory,
        "SIGINT handler": signal.getsignal(signal.SIGINT),
        "random kernels overridden": random_kernels_are_ours(),
    }


def environment() -> dict[str, str]:
    """Read the variables, except pytest's own and those that scikit-learn and torch's compiler set on import."""
    foreign = ("PYTEST_", "KMP_", "TORCHINDUCTOR_")
    return {f"${name}": value for name, value in os.environ.items() if not name.startswith(foreign)}


def differences(before: dict[str, object], after: dict[str, object]) -> dict[str, tuple[object, object]]:
    """List the settings that have changed, each with both of its values."""
    names = sorted(before.keys() | after.keys())
    return {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}


def new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """List threads that would keep the process alive; a daemon (tqdm has one) would not."""
    return [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]


def random_kernels_are_ours() -> bool:
    """Return whether lockstep's kernels for random numbers are installed in place of torch's."""
    return torch.random.default_generator is not DEFAULT_GENERATOR
