"""A digest is equal for equal bits and for nothing else."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lockstep as ls

BASE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

DIFFERENT: list[Any] = [
    BASE,
    BASE.T,
    BASE.reshape(4),
    BASE.reshape(1, 4),
    BASE.double(),
    BASE.bfloat16(),
    BASE + 2**-22,
    BASE.view(torch.int32),
    torch.complex(BASE, BASE),
    torch.complex(BASE, BASE).conj(),
    torch.zeros(2),
    -torch.zeros(2),
    torch.empty(0),
    torch.empty(0, 3),
    torch.empty(0, dtype=torch.int64),
    torch.tensor([float("nan")]),
    torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32),
    torch.tensor(1.0),
    1.0,
    1,
    True,
    "1",
    "True",
    None,
    "None",
    0.0,
    -0.0,
    float("nan"),
    float("inf"),
    [],
    {},
    [[]],
    [None],
    [1, 2],
    [2, 1],
    [1, [2]],
    {"a": 1},
    {"b": 1},
    {"a": {"b": 1}},
    {"a.b": 1},
    {"a": [1]},
    {"a": {0: 1}},
    {"a": {"0": 1}},
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    {"a\nint 1\nb": 1},
    {"a": []},
    {"a": {}},
]


def test_other_bits_have_another_digest() -> None:
    named: dict[str, int] = {}
    for index, state in enumerate(DIFFERENT):
        first = named.setdefault(ls.digest(state), index)
        assert first == index, (DIFFERENT[first], state)


SAME: dict[str, tuple[Any, Any]] = {
    "a copy": (BASE, BASE.clone()),
    "another layout": (BASE, BASE.T.contiguous().T),
    "a part of a larger tensor": (BASE[:, 1], torch.tensor([2.0, 4.0])),
    "a parameter": (BASE, nn.Parameter(BASE)),
    "an expanded tensor": (torch.ones(1).expand(3), torch.ones(3)),
    "a sparse tensor": (BASE, BASE.to_sparse()),
    "a lazy conjugate": (
        torch.complex(BASE, BASE).conj(),
        torch.complex(BASE, BASE).conj().resolve_conj(),
    ),
    "another order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "another kind of mapping": ({"a": 1}, OrderedDict(a=1)),
    "a tuple": ([1, 2], (1, 2)),
}


@pytest.mark.parametrize("case", SAME)
def test_equal_bits_have_one_digest(case: str) -> None:
    one, other = SAME[case]
    assert ls.digest(one) == ls.digest(other)


def test_what_has_a_state_is_named_by_it() -> None:
    model = nn.BatchNorm1d(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert ls.digest(model) == ls.digest(model.state_dict())
    assert ls.digest(optimizer) == ls.digest(optimizer.state_dict())
    assert ls.digest(scheduler) == ls.digest(scheduler.state_dict())
    assert ls.digest(model, optimizer) != ls.digest(optimizer, model)
    before = ls.digest(model)
    model(torch.randn(4, 3))
    assert ls.digest(model) != before


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", 1j, {"deep": [object()]}, len])
def test_what_has_no_bits_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"`states` must hold tensors, numbers, text and None, got a "):
        ls.digest(value)


@given(st.lists(st.floats(allow_nan=False, width=32), max_size=20))
def test_a_tensor_is_named_by_its_numbers(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers)
    assert ls.digest(tensor) == ls.digest(torch.tensor([*numbers, 1.0])[:-1])
    assert len(ls.digest(tensor)) == 64


def test_a_digest_stays_what_it_was() -> None:
    # Digests are written into logs and compared across versions: to change one is to break them.
    state = {"weight": BASE, "step": 3, "lr": 0.1, "name": "sgd", "none": None, "betas": (0.9, 0.999)}
    assert ls.digest(state) == "f3818130493156df70984e4f5be8fa40d019fc0eb3b6917f422d6f804807060f"
