"""What the tests of streams share: a thread to compute in, and the comparison with the default generator."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch
from torch.utils import _pytree as pytree

from lockstep.streams import DefaultGeneratorGuard, StreamOverride, shard_stream

SEED = 1234567
Result = TypeVar("Result")


def random_names() -> list[object]:
    """List what stands behind the names of torch that have to do with random state."""
    state = (torch.get_rng_state, torch.set_rng_state, torch.initial_seed, torch.random.default_generator)
    return [*state, torch.random.get_rng_state, torch.random.set_rng_state, torch.cuda.manual_seed_all]


@pytest.fixture(autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    """Compute with one thread per operation; see that torch is left as it was."""
    threads, guard = torch.get_num_threads(), DefaultGeneratorGuard()
    before = random_names()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    guard.restore()
    assert random_names() == before
    assert "BackendSelect" not in torch._C._dispatch_dump("aten::uniform_")


@pytest.fixture
def override() -> Iterator[StreamOverride]:
    with StreamOverride() as owner:
        yield owner


@pytest.fixture
def in_threads() -> Callable[[list[Callable[[], Result]]], list[Result]]:
    """Call functions at once, each in a thread of its own, and hand their results or first error on."""
    return _in_threads


@pytest.fixture
def under_default() -> Callable[[Callable[[], Result], int], Result]:
    """Call a function with the default generator seeded, and put that back."""
    return _under_default


@pytest.fixture
def bits() -> Callable[[object], list[object]]:
    """Turn a result into something that compares equal only if all bits are."""
    return _bits


@pytest.fixture
def assert_same_as_serial() -> Callable[[Callable[[], object]], None]:
    """Assert that a function draws in a thread's stream what it draws from the default generator."""
    return _assert_same_as_serial


def _assert_same_as_serial(draw: Callable[[], object]) -> None:
    torch.default_generator.manual_seed(SEED)
    guard = DefaultGeneratorGuard()
    serial = draw()
    assert guard.moved(), "the sample draws nothing, so it shows nothing"
    guard.restore()
    with StreamOverride():
        threaded = _in_threads([lambda: _under_stream(draw, SEED)])
    assert not guard.moved(), "something drew from the default generator"
    assert _bits(threaded) == _bits([serial])


def _under_stream(draw: Callable[[], Result], seed: int) -> Result:
    with shard_stream(seed):
        return draw()


def _under_default(draw: Callable[[], Result], seed: int) -> Result:
    guard = DefaultGeneratorGuard()
    torch.default_generator.manual_seed(seed)
    try:
        return draw()
    finally:
        guard.restore()


def _in_threads(functions: list[Callable[[], Result]]) -> list[Result]:
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work(index: int, function: Callable[[], Result]) -> None:
        torch.set_num_threads(1)
        try:
            results[index] = function()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(functions))]


def _bits(result: object) -> list[object]:
    return [_leaf_bits(leaf) for leaf in pytree.tree_leaves(result)]


def _leaf_bits(leaf: object) -> object:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.is_nested:
        return _bits(leaf.unbind())
    flat = leaf.detach().contiguous().flatten()
    return leaf.dtype, leaf.shape, bytes(flat.view(torch.uint8).tolist())
