"""A test leaves no trace: whatever it changes for the process or the thread, it puts back."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from lockstep.program import describe_program
from lockstep.replicas.pool import probes
from tests.support import zygote
from tests.support.emulated.pool import POOL as EMULATED_POOL
from tests.support.rank_pool import POOL
from tests.support.selection import leave_repeated_values_to_slow, sample_of_slow, seed_of_samples
from tests.support.settings import differences, environment, new_threads, process_settings, random_kernels_are_ours
from tests.support.tiers import has_no_unit_tests, sort_into_tiers
from tests.support.waiting import LONG

# A commit passes or fails whenever and wherever it is tested: no clock judges an example, and the examples
# are the same each time. `--hypothesis-profile=search` draws others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True, database=None, max_examples=25)
settings.load_profile("same")


# Programs have no doctests. To import them here could change this process, as `lockstep.use_portable_kernels` does.
collect_ignore = ["support/programs"]


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests that are not marked `gpu`, in which "auto" stands for CPU devices: run those by `-m gpu`."""
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a run include some of the slow tests."""
    parser.addoption("--some-slow", type=int, default=0, metavar="N", help="run N of the slow tests, too")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the option -m, which chooses among the tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Mark each test with its tiers, and keep a sample of the slow ones."""
    sort_into_tiers(items)
    leave_repeated_values_to_slow(items)
    sample = sample_of_slow(items, config.getoption("--some-slow"))
    files = {item.path: index for index, item in enumerate(items)}
    items[:] = [item for item in items if item not in sample]
    yield
    # Within a file pytest has brought together the tests that share a value of a fixture; that order stays.
    items[:] = sorted([*items, *sample], key=lambda item: files[item.path])


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say what the sample of slow tests depends on."""
    number = config.getoption("--some-slow")
    return [f"{number} slow tests, drawn with seed {seed_of_samples()}"] if number else []


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read no folder without unit tests where only these are asked for: it takes longer than to run many of them."""
    only_units = config.getoption("markexpr").startswith("unit")
    return True if only_units and has_no_unit_tests(collection_path) else None


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Let Ctrl-C raise as usual, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="session")
def frozen_heap() -> Iterator[None]:
    """Keep what the collected tests and the imported modules consist of out of every later collection of garbage.

    They are a million objects, which live to the end; many tests collect garbage to show that nothing is kept alive.
    """
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="session")
def pooled_ranks() -> Iterator[None]:
    """End the processes that tests share: the ranks, and the one that others are forked from."""
    yield
    POOL.close()
    EMULATED_POOL.close()
    zygote.ZYGOTE.close()


@pytest.fixture(autouse=True, scope="session")
def described() -> None:
    """Let git describe the script here, which a process does once, and not in the first test that needs it."""
    describe_program()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Let a test draw the same numbers wherever it runs, alone or after others."""
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():  # before, `torch.manual_seed` would note a whole stack for it
        torch.cuda.manual_seed_all(0)
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def hygiene() -> Iterator[None]:
    """Fail a test that leaves something changed."""
    before = {**process_settings(), **environment()}
    threads = set(threading.enumerate())
    yield
    if new_threads(threads) or random_kernels_are_ours():
        gc.collect()  # an updater or group in a cycle is no leak
    for thread in new_threads(threads):
        thread.join(LONG)  # told to end already; give it the time
    lingering = [thread.name for thread in new_threads(threads)]
    assert not lingering, f"the test left threads behind: {lingering}"
    changed = differences(before, {**process_settings(), **environment()})
    assert not changed, f"the test left changes behind: {changed}"


@pytest.fixture(autouse=True)
def tier(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a unit test that starts a process: it belongs to another tier."""
    before = _seconds_of_children()
    yield
    # Other tests share a pool, which may end a process that an earlier test has started.
    if request.node.get_closest_marker("unit") is not None:
        assert _seconds_of_children() == before, "the test started a process: name its way in tests/support/tiers.py"


@pytest.fixture
def spawned_by_forks() -> Iterator[None]:
    """Fork the processes that `lockstep.launch` starts, which saves them the imports."""
    with zygote.spawned_by_forks():
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let torch's compiler forget what it has compiled, before and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def brief_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an audit that mixes two threads soon go on where one of them needs what the other holds."""
    monkeypatch.setattr(probes, "PATIENCE", 0.05)


@pytest.fixture
def one_intra_op_thread() -> Iterator[None]:
    """Compute here as replicas do: kernels cut their work by the number of threads, and round by the cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _seconds_of_children() -> float:
    """Return the processor time of all processes that this one has started and waited for."""
    times = os.times()
    return times.children_user + times.children_system
