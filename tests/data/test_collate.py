"""Collating stacks whatever has numbers, and refuses by name whatever does not fit."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import Subset, TensorDataset

from lockstep.data import Samples, collate
from lockstep.data.samples import NOT_FETCHED
from tests.support.late_copies import LateCopies


class Pair(NamedTuple):
    image: Any
    label: Any


def test_containers_keep_their_kind() -> None:
    samples = [Pair({"x": torch.full((2,), k)}, (k, [k, k + 1])) for k in range(3)]
    batch = collate(samples)
    assert type(batch) is Pair
    assert list(batch.image) == ["x"]
    assert batch.image["x"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert batch.label[0].tolist() == [0, 1, 2]
    assert batch.label[1].tolist() == [[0, 1], [1, 2], [2, 3]]
    assert type(collate([OrderedDict(x=1)])) is OrderedDict


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([True, False], torch.bool),
        ([1, 2], torch.int64),
        ([1.0, 2.0], torch.float32),
        ([1j, 2j], torch.complex64),
        ([np.float64(1), np.float64(2)], torch.float64),
        ([np.int8(1), np.int8(2)], torch.int8),
        ([np.zeros((2, 3), np.float16)], torch.float16),
        ([[1, 2], [3, 4]], torch.int64),
        ([[[1.0]], [[2.0]]], torch.float32),
        ([torch.tensor(1, dtype=torch.bfloat16)], torch.bfloat16),
    ],
)
def test_dtypes(values: list[Any], dtype: torch.dtype) -> None:
    batch = collate(values)
    assert batch.dtype == dtype
    assert batch.shape == (len(values), *np.shape(values[0]))
    assert batch.tolist() == [torch.as_tensor(value).tolist() for value in values]


def test_floats_follow_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert collate([0.1]).item() == 0.1
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_array_that_cannot_be_written_is_copied() -> None:
    array = np.arange(3)
    array.flags.writeable = False
    batch = collate([array])
    batch.zero_()
    assert array.tolist() == [0, 1, 2]


def test_importing_needs_no_numpy() -> None:
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import warnings; warnings.simplefilter('ignore')\n"
        "from lockstep.data import collate; print(collate([(1, [2.0])]))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["(tensor([1]),", "tensor([[2.]]))"]


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ([], ValueError, r"`samples` must hold at least one sample, got none\."),
        (
            [{"x": torch.zeros(3)}, {"x": torch.zeros(4)}],
            ValueError,
            r"`samples\[1\]\['x'\]` must have the shape \(3,\), like `samples\[0\]\['x'\]`, got \(4,\)\.",
        ),
        ([(1, 2), (1,)], ValueError, r"`samples\[1\]` must have 2 fields, like `samples\[0\]`, got 1\."),
        ([(1,), [1]], ValueError, r"`samples\[1\]` must be of type tuple, like `samples\[0\]`, got list\."),
        ([[1], (1,)], TypeError, r"`samples\[1\]` must be a tensor, an array, a number, .* got a tuple\."),
        ([{"x": 1}, {"y": 1}], ValueError, r"must have the keys \['x'\], like `samples\[0\]`, got \['y'\]\."),
        ([{"x": 1}, {"x": 1, "y": 1}], ValueError, r"must have the keys \['x'\]"),
        (
            [1, 2.0],
            ValueError,
            r"`samples\[1\]` must be of torch.int64, like `samples\[0\]`, got torch.float32",
        ),
        ([True, 2], ValueError, r"`samples\[1\]` must be of torch.bool"),
        ([torch.zeros(2), torch.zeros(2).double()], ValueError, r"`samples\[1\]` must be of torch.float32"),
        ([(1, "text")], TypeError, r"`samples\[0\]\[1\]` must be a tensor, .* got a str\. Remove it"),
        ([b"bytes"], TypeError, r"got a bytes\."),
        ([None], TypeError, r"got a NoneType\."),
        ([["text"]], TypeError, r"`samples\[0\]` must be an array of numbers, got \['text'\]"),
        ([[[1, 2], [3]]], TypeError, r"`samples\[0\]` must be an array of numbers"),
        ([[torch.zeros(2), [1, [2]]]], TypeError, r"`samples\[0\]\[1\]` must be an array of numbers"),
        ([np.array(["text"])], TypeError, r"`samples\[0\]` must be an array of numbers"),
        ([2**63], TypeError, r"`samples\[...\]` must be an array of numbers"),
    ],
)
def test_what_does_not_fit_is_refused(samples: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collate(samples)


shapes = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4)


def test_a_list_is_a_sample_of_fields_where_it_is_no_array() -> None:
    samples = [[torch.full((2,), float(label)), label, [1, 2]] for label in (3, 4)]
    batch = collate(samples)
    assert isinstance(batch, list)
    assert [each.tolist() for each in batch] == [[[3, 3], [4, 4]], [3, 4], [[1, 2], [1, 2]]]
    assert collate([[torch.tensor(1), torch.tensor(2)]]).tolist() == [[1, 2]]


@given(shapes)
def test_padding_fills_up_to_the_smallest_shape_that_encloses_all(shapes: list[tuple[int, int]]) -> None:
    tensors = [torch.full(shape, float(number)) for number, shape in enumerate(shapes)]
    batch = collate(tensors, padding=-1)
    assert batch.shape == (len(shapes), max(a for a, _ in shapes), max(b for _, b in shapes))
    for row, tensor in zip(batch, tensors, strict=True):
        assert torch.equal(row[: tensor.shape[0], : tensor.shape[1]], tensor)
        assert int((row == -1).sum()) == row.numel() - tensor.numel()


def test_padding_by_field() -> None:
    samples = [({"ids": [1, 2]}, [0.5]), ({"ids": [3]}, [0.5, 0.25])]
    batch = collate(samples, padding=({"ids": 9}, float("nan")))
    assert batch[0]["ids"].tolist() == [[1, 2], [3, 9]]
    assert batch[1].isnan().tolist() == [[False, True], [False, False]]
    with pytest.raises(ValueError, match=r"`samples\[1\]\[1\]` must have the shape \(1,\)"):
        collate(samples, padding=({"ids": 9}, None))


@pytest.mark.parametrize(
    ("padding", "error", "message"),
    [
        ((0, 0), ValueError, r"`padding` must be one number, or have the fields \['x'\] of `samples\[0\]`"),
        ({"y": 0}, ValueError, r"must be one number, or have the fields \['x'\]"),
        ({"x": (0,)}, TypeError, r"`padding` must be a number for `samples\[0\]\['x'\]`, got \(0,\)\."),
        ("0", TypeError, r"`padding` must be a number"),
        (0.5, ValueError, r"`padding` must be a number of torch.uint8 for `samples\[0\]\['x'\]`, got 0\.5\."),
        (-1, ValueError, r"`padding` must be a number of torch.uint8"),
        (256, ValueError, r"`padding` must be a number of torch.uint8"),
        (float("nan"), ValueError, r"`padding` must be a number of torch.uint8"),
        (1j, ValueError, r"`padding` must be a number of torch.uint8"),
    ],
)
def test_padding_that_does_not_fit_is_refused(padding: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        collate([{"x": torch.zeros(2, dtype=torch.uint8)}], padding=padding)


def test_padding_needs_one_number_of_dimensions() -> None:
    with pytest.raises(ValueError, match=r"`samples\[1\]` must have 1 dimensions, .* got 2\."):
        collate([torch.zeros(1), torch.zeros(1, 1)], padding=0)


def test_the_device_is_where_the_result_is() -> None:
    batch = collate([(1, torch.zeros(2))], "meta")
    assert [tensor.device.type for tensor in batch] == ["meta", "meta"]
    samples = Samples(TensorDataset(torch.zeros(4), torch.zeros(4)), (0, 2))
    assert [tensor.device.type for tensor in collate(samples, torch.device("meta"))] == ["meta", "meta"]


class Scaled(TensorDataset):
    """A dataset that does more than to index its tensors."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


@pytest.mark.parametrize("kind", [TensorDataset, Scaled])
@given(indices=st.lists(st.integers(0, 9), min_size=1, max_size=12) | st.builds(range, st.just(2), st.integers(3, 9)))
def test_tensors_cut_at_once_are_the_stacked_ones(kind: type[TensorDataset], indices: list[int] | range) -> None:
    tensors = torch.rand(10, 3, generator=torch.Generator().manual_seed(0)), torch.arange(10)
    samples = Samples(kind(*tensors), indices)
    for ours, stacked in zip(collate(samples), collate(list(samples)), strict=True):
        assert ours.dtype == stacked.dtype
        assert torch.equal(ours, stacked)


@pytest.mark.parametrize("indices", [range(2, 5), (2, 3, 4)])
def test_a_model_that_writes_to_its_inputs_leaves_the_dataset_alone(indices: range | tuple[int, ...]) -> None:
    data = torch.arange(10)
    (rows,) = collate(Samples(TensorDataset(data), indices))
    rows.zero_()
    assert torch.equal(data, torch.arange(10))


def test_a_subset_is_cut_out_of_the_whole() -> None:
    whole = TensorDataset(torch.arange(10), torch.rand(10, 2, generator=torch.Generator().manual_seed(0)))
    inner = Subset(Subset(whole, torch.tensor([7, 1, 3, 9]).tolist()), range(3))
    samples = Samples(inner, (2, 0))
    for ours, stacked in zip(collate(samples), collate(list(samples)), strict=True):
        assert torch.equal(ours, stacked)
    assert collate(samples)[0].tolist() == [3, 7]


@pytest.mark.parametrize("indices", [range(2, 4), (0, 3)])
def test_samples_outside_of_the_dataset_are_refused(indices: range | tuple[int, ...]) -> None:
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|exceeds dimension size"):
        collate(Samples(TensorDataset(torch.zeros(3)), indices))


def test_fetched_samples_are_used() -> None:
    samples = Samples(TensorDataset(torch.zeros(3)), (0, 1), [(torch.tensor(7.0),), (torch.tensor(8.0),)])
    assert collate(samples)[0].tolist() == [7.0, 8.0]


def test_samples_that_were_not_fetched_with_the_others_are_loaded() -> None:
    samples = Samples([(1.0,), (2.0,)], (0, 1), [NOT_FETCHED, (8.0,)])
    assert collate(samples)[0].tolist() == [1.0, 8.0]


@pytest.mark.parametrize("pinned", [False, True])
def test_what_comes_from_an_accelerator_has_arrived(pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: pinned)
    with LateCopies() as copies:
        (batch,) = collate(Samples(TensorDataset(copies.on_accelerator(torch.arange(10))), range(2, 5)), "cpu")
        assert batch.tolist() == [2, 3, 4]
    assert copies.waits == [True]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("indices", [range(2, 5), (4, 0, 0)])
@pytest.mark.parametrize("place", ["cpu", "pinned", "cuda"])
def test_on_a_gpu(place: str, indices: range | tuple[int, ...]) -> None:
    data = torch.arange(10)
    held = data.pin_memory() if place == "pinned" else data.to(place)
    (batch,) = collate(Samples(TensorDataset(held), indices), "cuda:0")
    assert batch.device == torch.device("cuda:0")
    assert batch.tolist() == [data[index].item() for index in indices]
