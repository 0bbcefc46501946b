"""Seed the generators of a process."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from lockstep.integers import check_integer

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
    random.seed(seed)
    torch.manual_seed(seed)
    # If NumPy is not imported, nothing can draw from its default generator yet; importing it takes time.
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
    return seed
