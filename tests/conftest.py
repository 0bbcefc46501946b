"""A test leaves no trace: whatever it changes for the process or the thread, it puts back."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.tiers import sort_into_tiers
from tests.support.waiting import LONG

SMALLEST_DENORMAL = 5e-324

# A commit passes or fails whenever and wherever it is tested: no clock judges an example, and the examples
# are the same each time. `--hypothesis-profile=search` draws others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)  # before the option -m chooses among the tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tiers."""
    sort_into_tiers(items)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise as usual, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def hygiene() -> Iterator[None]:
    """Fail a test that leaves something changed."""
    before = _traces()
    threads = set(threading.enumerate())
    yield
    if _new_threads(threads) or _random_kernels_are_ours():
        gc.collect()  # an updater or group in a cycle is no leak
    for thread in _new_threads(threads):
        thread.join(LONG)  # told to end already; give it the time
    lingering = [thread.name for thread in _new_threads(threads)]
    assert not lingering, f"the test left threads behind: {lingering}"
    after = _traces()
    names = before.keys() | after.keys()
    changed = {name: (before.get(name), after.get(name)) for name in names if before.get(name) != after.get(name)}
    assert not changed, f"the test left changes behind: {changed}"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let torch's compiler forget what it has compiled, before and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def one_intra_op_thread() -> Iterator[None]:
    """Compute here as replicas do: kernels cut their work by the number of threads, and round by the cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _traces() -> dict[str, object]:
    return {
        **_environment(),
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
        "random kernels overridden": _random_kernels_are_ours(),
    }


def _environment() -> dict[str, str]:
    """List the variables, but pytest's own and those that scikit-learn and torch's compiler set on import."""
    foreign = ("PYTEST_", "KMP_", "TORCHINDUCTOR_")
    return {f"${name}": value for name, value in os.environ.items() if not name.startswith(foreign)}


def _new_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    """List threads that would keep the process alive; a daemon (tqdm has one) would not."""
    return [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]


def _random_kernels_are_ours() -> bool:
    return torch.random.default_generator is not torch.default_generator
