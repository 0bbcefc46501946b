"""The first audit on one device: what a shard and a step depend on beside their inputs is found there, too."""

from __future__ import annotations

import functools
import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.replicas import FreshMemory

HELD = {"mean": 0.0}
LOCAL = threading.local()
LOCAL.factor = 1.0


@functools.lru_cache
def cached_mean() -> float:
    return HELD["mean"]


def of_cache(x: torch.Tensor) -> float:
    HELD["mean"] = float(x.mean())
    return cached_mean()


def of_memory(x: torch.Tensor) -> torch.Tensor:
    del x
    # Above 32 MiB the system gives it, so that it holds zeros. What was freed before may hold NaN by chance.
    return torch.empty(9_000_000).nan_to_num(5.0).clamp(-9, 9).mean()


class ClockSGD(torch.optim.SGD):
    """Steps by a learning rate that depends on the time."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.param_groups[0]["lr"] = 0.1 + time.time_ns() % 1_000_003 / 1e7
        super().step(closure)


class QuietSGD(torch.optim.SGD):
    """Counts its steps."""

    steps = 0

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        QuietSGD.steps += 1
        super().step(closure)


def updater_of(
    factor: Callable[[torch.Tensor], torch.Tensor | float],
    kind: type[torch.optim.SGD] = torch.optim.SGD,
    devices: int = 1,
) -> ls.ParallelUpdater:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), target) * (1 + factor(x))

    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(2, (16,)))
    optimizer = kind(model.parameters(), lr=0.1, momentum=0.9)
    return ls.ParallelUpdater(
        ls.BatchIterator(data, 16), optimizer, model, devices=devices, num_shards=4, loss_fn=loss_fn
    )


@pytest.mark.parametrize(
    "factor", [of_cache, of_memory, lambda _: threading.get_ident() % 1009 / 1009], ids=["cache", "memory", "thread"]
)
def test_what_one_place_does_not_show(factor: Callable[[torch.Tensor], torch.Tensor | float]) -> None:
    cached_mean.cache_clear()
    with pytest.warns(ls.DeterminismWarning, match="was computed 3 times, and the results differ"):
        updater_of(factor).update()


def test_a_cache_is_left_as_it_is() -> None:
    cached_mean.cache_clear()
    with pytest.warns(ls.DeterminismWarning):
        updater_of(of_cache).update()
    assert cached_mean.cache_info()[:2] == (3, 1)


def test_an_error_in_another_thread_is_a_warning() -> None:
    updater = updater_of(lambda _: LOCAL.factor)
    with pytest.warns(ls.DeterminismWarning, match="in another thread, .* raised ReplicaError: .*factor"):
        updater.update()
    assert updater.update().applied


def without_memory(_: torch.Tensor) -> float:
    if threading.current_thread() is threading.main_thread():
        return 0.0
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_memory_that_does_not_suffice_twice_is_no_finding() -> None:
    assert updater_of(without_memory).update().applied


def test_no_thread_is_started_where_memory_is_limited() -> None:
    """Python waits forever for a thread that gets no memory in its first lines."""
    started: list[str] = []
    threading.setprofile(lambda *_: started.append(threading.current_thread().name))
    try:
        with limited_memory():
            updater_of(lambda _: 0.0).update()
    finally:
        threading.setprofile(None)
    assert not [each for each in started if each.startswith("lockstep")]


@contextmanager
def limited_memory() -> Iterator[None]:
    resource = pytest.importorskip("resource", reason="Windows has no such limit")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**40, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    ("driver", "is_repeatable"), [(None, False), ("gelsy", False), ("gels", True), ("gelsd", True)]
)
def test_least_squares_by_a_driver_that_is_not_repeatable(
    driver: str | None, is_repeatable: bool, num_devices: int
) -> None:
    def solve(_: torch.Tensor) -> float:
        torch.linalg.lstsq(torch.eye(3), torch.ones(3, 1), driver=driver)
        return 0.0

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updater = updater_of(solve, devices=num_devices)
        updater.update()
        updater.update()
    found = [str(each.message) for each in caught if each.category is ls.DeterminismWarning]
    assert len(found) == (0 if is_repeatable else 1)
    assert all("driver='gelsd'" in each for each in found)


def test_an_optimizer_that_reads_the_clock() -> None:
    with pytest.warns(ls.DeterminismWarning, match="The step of ClockSGD has another result when it is made twice"):
        updater_of(lambda _: 0.0, ClockSGD).update()


class DrawingSGD(torch.optim.SGD):
    """Draws from Python's generator in each step."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        DRAWN.append(random.random())  # noqa: S311 - no secret
        super().step(closure)  # type: ignore[arg-type]


DRAWN: list[float] = []


@pytest.mark.filterwarnings("ignore:The optimizer, a hook:lockstep.RandomStreamWarning")
def test_a_step_that_draws_gets_the_numbers_of_a_plain_loop() -> None:
    random.seed(3)
    DRAWN.clear()
    updater_of(lambda _: 0.0, DrawingSGD).update()
    random.seed(3)
    assert DRAWN[-1] == random.random()  # noqa: S311 - as above


def test_hooks_and_weights_are_those_of_one_step() -> None:
    updater, plain, calls = updater_of(lambda _: 0.0, QuietSGD), updater_of(lambda _: 0.0), []
    updater.get_optimizer("main").register_step_post_hook(lambda *_: calls.append(None))
    for each in (updater, plain):
        each.update()
        each.update()
    assert ls.digest(updater.get_all_models()["main"]) == ls.digest(plain.get_all_models()["main"])
    # PyTorch calls the hooks of a step that calls that of its base class twice.
    assert (len(calls), QuietSGD.steps) == (4, 4)


def test_fresh_memory_chooses_no_other_kernel() -> None:
    maps, shape = torch.eye(2, 3) + 0.1 * torch.rand(16, 2, 3), [16, 1, 8, 8]
    with torch.autocast("cpu", torch.bfloat16):
        expected = functional.affine_grid(maps, shape, align_corners=False)
        with FreshMemory():
            found = functional.affine_grid(maps, shape, align_corners=False)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize("make", [torch.empty, torch.ones(1).new_empty, torch.empty(3).new_empty])
def test_fresh_memory_is_filled(make: Callable[[int], torch.Tensor]) -> None:
    with FreshMemory():
        assert make(3).isnan().all()
        assert torch.equal(torch.empty(2, dtype=torch.int8), torch.tensor([127, 127], dtype=torch.int8))
    with FreshMemory(0.0):
        assert torch.equal(make(3), torch.zeros(3))
