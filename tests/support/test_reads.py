"""The counter of reads, without which a count of none would say nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.reads import Reads

READERS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "bool": lambda x: bool(x[0] > 0),
    "tolist": torch.Tensor.tolist,
    "numpy": torch.Tensor.numpy,
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": torch.nonzero,
    "format": "{:.1f}".format,
}


@pytest.mark.parametrize("name", READERS)
def test_it_counts(name: str) -> None:
    value = torch.ones(3) if name != "format" else torch.ones(())
    with Reads() as reads:
        READERS[name](value)
    assert reads.count >= 1


def test_arithmetic_reads_nothing() -> None:
    with Reads() as reads:
        torch.where(torch.ones(3) > 0, torch.stack([torch.zeros(())] * 3), 2.0).clamp(max=1.0).add_(1)
    assert reads.count == 0
