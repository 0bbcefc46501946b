"""The finiteness check finds what is not finite, and nothing else."""

from __future__ import annotations

import pytest
import torch

from lockstep.precision import first_nonfinite, norms_are_finite
from lockstep.precision.finite import norms

INF, NAN = float("inf"), float("nan")

FINITE = {
    "ordinary": torch.randn(5),
    "empty": torch.empty(0),
    "scalar": torch.tensor(1.0),
    "complex": torch.randn(3, dtype=torch.complex64),
    "sparse": torch.tensor([[0.0, 1.0]]).to_sparse(),
    "half": torch.ones(4, dtype=torch.float16),
    "channels last": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
}

NONFINITE = {
    "infinity": torch.tensor([1.0, INF]),
    "NaN": torch.tensor([NAN, 1.0]),
    "complex": torch.tensor([complex(0.0, NAN)]),
    "sparse": torch.tensor([[0.0, INF]]).to_sparse(),
    "half": torch.tensor([-INF], dtype=torch.float16),
    "last of many": torch.cat([torch.ones(100_003), torch.tensor([NAN])]),
}


@pytest.mark.parametrize("name", FINITE)
def test_finite_tensors_pass(name: str) -> None:
    assert norms_are_finite(norms([FINITE[name]]))
    assert first_nonfinite({name: FINITE[name], "absent": None}) is None


@pytest.mark.parametrize("name", NONFINITE)
def test_others_are_found_among_finite_ones(name: str) -> None:
    tensors = {**{f"finite {key}": tensor for key, tensor in FINITE.items()}, name: NONFINITE[name]}
    assert not norms_are_finite(norms(list(tensors.values())))
    assert first_nonfinite(tensors) == name


def test_a_norm_that_overflows_is_settled_by_the_elements() -> None:
    large = torch.full((4,), 3e38)
    assert not norms_are_finite(norms([large]))
    assert first_nonfinite({"large": large}) is None


def test_nothing_is_finite() -> None:
    assert norms([]) == []
    assert norms_are_finite([])
