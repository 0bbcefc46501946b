"""Seed the default generators of a process, and restore them."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch

from lockstep.arguments import check_integer

MAX_SEED = 2**32 - 1
"""The largest seed of NumPy."""


def seed_everything(seed: int) -> int:
    """Seed the default generators of Python, of torch on all devices, and of NumPy if it is imported.

    Call it before you build a model, so that the first weights do not depend on the run. What happens during updates
    does not depend on it: an updater has a seed of its own, from which it derives the random numbers of every shard.
    On all ranks, use the same seed.

    Args:
        seed: The seed, in 0..4294967295.

    Returns:
        The seed.

    Raises:
        TypeError: If the seed is not an integer.
        ValueError: If it is out of range.

    >>> seed_everything(3), torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
    (3, True)
    """
    check_integer("seed", seed, minimum=0)
    if seed > MAX_SEED:
        raise ValueError(f"`seed` must be at most {MAX_SEED}, got {seed}.")
    torch.manual_seed(seed)
    seed_python_and_numpy(seed)
    return seed


def seed_python_and_numpy(seed: int) -> None:
    """Seed the default generators of Python, and of NumPy if it is imported.

    Args:
        seed: The seed, in 0..4294967295.
    """
    random.seed(seed)
    # If NumPy is not imported, nothing can draw from its default generator yet; importing it takes time.
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def seed_default_generators(seed: int) -> None:
    """Seed the default generators of torch's CPU, of Python, and of NumPy if it is imported.

    Args:
        seed: The seed, in 0..4294967295.
    """
    # Looked up here and not at import, because within a shard the name refers to the stream of the thread.
    torch.random.default_generator.manual_seed(seed)  # type: ignore[attr-defined]  # torch's gap
    seed_python_and_numpy(seed)


def python_states() -> dict[str, object]:
    """Return the states of the default generators of Python, and of NumPy if it is imported, by name."""
    found: dict[str, object] = {"Python's `random`": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        # The array of the state is the generator's copy, and arrays do not compare as one value.
        found["`numpy.random`"] = pickle.dumps(numpy.random.get_state(legacy=False))
    return found


def moved(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """List the names of states that have changed.

    >>> moved({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4})
    ['b']
    """
    return [name for name, state in before.items() if name in after and after[name] != state]


DRAWS: Final = (
    "{} from {}. These numbers depend on which device and rank computes which shard, and are no part of a saved state. "
    "Draw from torch without `generator=`: its stream belongs to the shard. Or create a generator in the loss function "
    "or in forward, seeded from torch: random.Random(torch.randint(2**31, ()).item())."
)
"""A warning, for who draws from which generators."""


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the default generators of torch's CPU, of Python and of NumPy at the end, also after an error.

    >>> before = random.getstate()
    >>> with restored_generators():
    ...     _ = random.random()
    >>> random.getstate() == before
    True
    """
    # Looked up here and not at import, because within a shard the name refers to the stream of the thread.
    generator: torch.Generator = torch.random.default_generator  # type: ignore[attr-defined]  # torch's gap
    # What uses NumPy has imported it; importing it here would cost time for nothing.
    numpy: Any = sys.modules.get("numpy")
    torch_state, python_state = generator.get_state(), random.getstate()
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        generator.set_state(torch_state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
