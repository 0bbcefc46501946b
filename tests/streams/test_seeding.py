"""One call seeds all generators of a process."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import lockstep as ls


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: S311 - what is seeded


def test_equal_seeds_give_equal_draws() -> None:
    found = []
    for seed in (5, 5, 6):
        assert ls.seed_everything(seed) == seed
        found.append(draws())
    assert found[0] == found[1]
    assert all(a != b for a, b in zip(found[1], found[2], strict=True))


def test_seeds_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="`seed` must be at least 0, got -1"):
        ls.seed_everything(-1)
    with pytest.raises(ValueError, match="`seed` must be at most 4294967295, got 4294967296"):
        ls.seed_everything(2**32)
    with pytest.raises(TypeError, match="`seed` must be an integer, got"):
        ls.seed_everything(1.5)  # type: ignore[arg-type]
