"""A digest is equal for equal bits and for nothing else."""

from __future__ import annotations

import enum
import hashlib
import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import lockstep as ls
from lockstep.digest import BLOCK, Entry, blocks_of, combine, entries, join_blocks, little_endian, tensor_digest


class Colour(enum.IntEnum):
    RED = 1


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
    Colour.RED,
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
    {"a": {None: 1}},
    {"a": {"None": 1}},
    {"a": {True: 1}},
    {"a": {1: 1}},
    {"a": {1.0: 1}},
    {"a": {"1.0": 1}},
    {"a": {(0, 1): 1}},
    {"a": {"(0, 1)": 1}},
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    {"a\nint 1\nb": 1},
    {"a": []},
    {"a": {}},
]


def test_other_bits_have_another_digest() -> None:
    named: dict[str, int] = {}
    for index, state in enumerate(DIFFERENT):
        first = named.setdefault(ls.digest([state]), index)
        assert first == index, (DIFFERENT[first], state)


SAME: dict[str, tuple[Any, Any]] = {
    "a copy": (BASE, BASE.clone()),
    "another layout": (BASE, BASE.T.contiguous().T),
    "a part of a larger tensor": (BASE[:, 1], torch.tensor([2.0, 4.0])),
    "a parameter": (BASE, nn.Parameter(BASE)),
    "an expanded tensor": (torch.ones(1).expand(3), torch.ones(3)),
    "a sparse tensor": (BASE, BASE.to_sparse()),
    "a sparse tensor with a place given twice": (
        torch.tensor([3.0, 0.0]),
        torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (2,), check_invariants=True),
    ),
    "a lazy negative": (BASE * -1, torch._neg_view(BASE)),
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
    assert ls.digest(state) == "eb061ee1825bc69af57a67c4f7c6eeb725dd5f1209241adead673f073cf9694c"


# What another program does ---------------------------------------------------------------------

NUMPY = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
    torch.complex32: None,
}
"""What numpy reads the bytes of a dtype as that it does not know; two numbers for a complex one."""


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """Read the elements by numpy, which knows nothing of this library."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.complex32:
        tensor = torch.view_as_real(tensor)
    array = tensor.view(NUMPY.get(tensor.dtype) or tensor.dtype).numpy()
    return array.astype(array.dtype.newbyteorder("<")).tobytes()


def digest_by_hand(*states: Any) -> str:
    """Compute a digest from the docstring of `combine` alone."""
    lines = [line for index, state in enumerate(states) for line in lines_of(state, [index])]
    return hashlib.sha256(b"".join(sorted(lines))).hexdigest()


def lines_of(state: Any, path: list[Any]) -> list[bytes]:
    below: list[tuple[Any, Any]] = []
    if isinstance(state, torch.Tensor):
        sha = hashlib.sha256(raw_bytes(state)).hexdigest()
        said = ["tensor", [str(state.dtype).split(".")[1], list(state.shape), sha]]
    elif isinstance(state, dict):
        said, below = ["mapping", len(state)], list(state.items())
    elif isinstance(state, list | tuple):
        said, below = ["sequence", len(state)], list(enumerate(state))
    else:
        text = {float: float.hex, str: str}.get(type(state), repr)(state)
        said = ["value", [type(state).__name__, text]]
    line = json.dumps([path, *said], separators=(",", ":")).encode() + b"\n"
    return [line, *(each for key, part in below for each in lines_of(part, [*path, key]))]


TENSORS: dict[str, torch.Tensor] = {
    "float32": BASE,
    "transposed": torch.arange(24.0).reshape(2, 3, 4).transpose(0, 2),
    "every second": torch.arange(10)[::2],
    "channels last": torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(
        memory_format=torch.channels_last
    ),
    "expanded": torch.ones(3, 1).expand(3, 4),
    "float64": BASE.double(),
    "float16": BASE.half(),
    "bfloat16": BASE.bfloat16().T,
    "float8_e4m3fn": BASE.to(torch.float8_e4m3fn).T,
    "float8_e5m2": BASE.to(torch.float8_e5m2),
    "complex64": torch.complex(BASE, -BASE).T,
    "complex128": torch.complex(BASE.double(), -BASE.double()),
    "bool": torch.tensor([[True, False], [False, False]]).T,
    "int8": torch.tensor([-1, 127], dtype=torch.int8),
    "uint16": torch.tensor([1, 65535], dtype=torch.uint16),
    "int64": torch.tensor([1, -(2**40)]),
    "no dimension": torch.tensor(3.5),
    "no elements": torch.empty(0, 3),
    "no elements, transposed": torch.empty(3, 0, 2).transpose(0, 2),
    "requires a gradient": nn.Parameter(BASE.clone()),
}


@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_is_named_by_its_little_endian_bytes(case: str) -> None:
    tensor = TENSORS[case]
    assert tensor_digest(tensor) == hashlib.sha256(raw_bytes(tensor)).hexdigest()
    assert ls.digest(tensor) == digest_by_hand(tensor)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_half_precision_complex_numbers_are_pairs_of_halves() -> None:
    halves = torch.complex(BASE, -BASE).to(torch.complex32)
    assert tensor_digest(halves) == hashlib.sha256(raw_bytes(halves)).hexdigest()


def test_a_digest_is_assembled_from_the_digests_of_tensors() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    known = {
        name: Entry((0, name), "tensor", (str(each.dtype)[6:], list(each.shape), tensor_digest(each)))
        for name, each in model.state_dict().items()
    }
    assert known["0.weight"].about == known["2.weight"].about
    about = [Entry((0,), "mapping", len(known)), *known.values()]
    assert combine(about) == combine(reversed(about)) == ls.digest(model)
    moved = known["0.weight"]._replace(path=(0, "0.bias"))
    with pytest.raises(ValueError, match=r'`found` must hold one entry per path, got two for \[0,"0.bias"\]'):
        combine([*about, moved])


def test_another_program_finds_the_same_digest() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.5, 0.75))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    text = {
        "quote": "'\"",
        "newline\n": "\udce9 é \u2028",
        "": None,
        "big": 2**70,
        "yes": True,
        "inf": -float("inf"),
    }
    states = [model.state_dict(), optimizer.state_dict(), {"deep": [text, (), {}, [BASE.T]]}, TENSORS]
    assert ls.digest(*states) == digest_by_hand(*states)
    assert combine(entries(*states)) == ls.digest(model, optimizer, *states[2:])


def test_large_tensors_are_copied_block_by_block() -> None:
    numbers = torch.arange(3 * BLOCK // 8, dtype=torch.int32).reshape(6, -1, 4)
    one_row = numbers.reshape(1, 2, -1).transpose(1, 2)
    for tensor in (
        numbers.transpose(0, 1),
        numbers.permute(2, 1, 0),
        one_row,
        numbers[:, ::2],
        numbers.reshape(-1)[1::2],
    ):
        blocks = [block.nbytes for block in blocks_of(tensor)]
        assert max(blocks) <= BLOCK
        assert sum(blocks) == tensor.nbytes
        content = np.ascontiguousarray(tensor.numpy()).tobytes()
        pieces = [content[start : start + BLOCK] for start in range(0, len(content), BLOCK)]
        assert tensor_digest(tensor) == join_blocks([hashlib.sha256(piece).hexdigest() for piece in pieces])
    # Not copied where they can be read in place.
    places = [np.frombuffer(block, np.uint8).ctypes.data - numbers.data_ptr() for block in blocks_of(numbers)]
    assert places == [0, BLOCK]


def test_numbers_of_a_big_endian_machine_are_turned_around() -> None:
    for dtype, theirs in (("int16", ">i2"), ("float64", ">f8"), ("complex64", ">c8"), ("bool", "?")):
        here = torch.tensor([1, 0, 3]).to(getattr(torch, dtype))
        there = here.numpy().astype(theirs).tobytes()
        assert little_endian(here).contiguous().numpy().tobytes() == there


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_the_meaning_of_a_quantized_tensor_counts() -> None:
    ints, scales = torch.tensor([[1], [2]], dtype=torch.int8), torch.tensor([0.5, 0.25], dtype=torch.float64)
    zeros = torch.zeros(2, dtype=torch.int64)
    named = {
        ls.digest(torch._make_per_tensor_quantized_tensor(ints, 0.5, 0)),
        ls.digest(torch._make_per_tensor_quantized_tensor(ints, 0.25, 0)),
        ls.digest(torch._make_per_tensor_quantized_tensor(ints, 0.5, 1)),
        ls.digest(torch._make_per_channel_quantized_tensor(ints, scales, zeros, 0)),
        ls.digest(torch._make_per_channel_quantized_tensor(ints, scales + 1, zeros, 0)),
        ls.digest(ints),
    }
    assert len(named) == 6
    with pytest.raises(TypeError, match=r"`states` must hold .*, got a quantized tensor\. Pass its"):
        tensor_digest(torch._make_per_tensor_quantized_tensor(ints, 0.5, 0))


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
@pytest.mark.filterwarnings("ignore:Sparse C")
def test_a_sparse_layout_does_not_show(layout: torch.layout) -> None:
    assert ls.digest(BASE.to_sparse(layout=layout)) == ls.digest(BASE)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": [torch.empty(2, device="meta")]}, "a tensor on the meta device at 0.a.0"),
        (nn.LazyLinear(2), "a parameter without a shape at 0.weight"),
    ],
)
def test_tensors_without_values_are_refused_by_name(state: Any, said: str) -> None:
    with pytest.raises(TypeError, match=f"`states` must hold tensors, numbers, text and None, got {said}"):
        ls.digest(state)


def test_a_tensor_of_one_element_may_have_any_stride() -> None:
    strided = torch.ones(1, 2)[:, 0]
    assert strided.stride() == (2,)
    assert ls.digest({"a": strided}) == ls.digest({"a": torch.ones(1)})
