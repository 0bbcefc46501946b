"""Fingerprints of batches, which ranks compare to detect that they were given different ones."""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.utils.data import Subset

from lockstep import nest
from lockstep.data.sample_streams import draws_no_numbers
from lockstep.data.samples import Samples

MAX_ROWS: Final = 4
"""The largest number of rows of a batch whose values are read."""

MAX_ELEMENTS: Final = 64
"""The largest number of elements of one row that are read."""

MAX_DESCRIPTION: Final = 300
"""The length in characters above which a description of shapes is replaced by its digest."""


class Fingerprint(NamedTuple):
    """The properties of a batch that ranks compare.

    Attributes:
        about: The number of samples, or the dtypes and shapes of the tensors.
        indices: A digest of the indices of `Samples`; empty for other batches.
        values: A digest of a few rows; empty if none are read.
    """

    about: str
    indices: str
    values: str


def fingerprint(batch: Any, *, contents: bool = True) -> Fingerprint:
    """Compute the fingerprint of a batch.

    The fingerprint of `Samples` covers the length of the dataset and all indices, those of a `Subset` as indices of
    the dataset that it selects from. A batch of tensors is described by the names, dtypes and shapes of its tensors,
    and by up to `MAX_ELEMENTS` elements in each of `MAX_ROWS` rows of every tensor on the CPU. Tensors on other
    devices are not read, because the host would have to wait for them.

    Args:
        batch: `Samples`, or a nested structure of tensors with the samples along the first dimension.
        contents: Whether a few samples are read too if the batch is `Samples` of a dataset in memory, such as a
            `TensorDataset`, so that datasets of equal length with different contents are distinguished.

    >>> fingerprint(Samples("abcdef", [0, 2])) == fingerprint(Samples("abcdef", [0, 3]))
    False
    >>> fingerprint(torch.zeros(3, 2)).about
    'batch: float32 (3, 2)'
    """
    if type(batch) is Samples:
        return _of_samples(batch, contents=contents)
    named = list(nest.named_tensors(batch))
    about = ", ".join(f"{name}: {str(each.dtype)[6:]} {tuple(each.shape)}" for name, each in named)
    if len(about) > MAX_DESCRIPTION:
        about = f"{len(named)} tensors of shapes with the digest {_hexdigest(about.encode())}"
    return Fingerprint(about, "", _hexdigest(b"".join(_bytes(_rows(each)) for _, each in named if _is_readable(each))))


def _of_samples(batch: Samples, *, contents: bool) -> Fingerprint:
    """Compute the fingerprint of `Samples`."""
    count = len(batch.indices)
    chosen = range(0, count, max(1, -(-count // MAX_ROWS)))
    if batch.fetched is batch.dataset:
        # A list of samples is its own dataset: the indices are 0, 1, 2 and so on in every process.
        return Fingerprint(f"{count} samples", "", _of_values([batch.fetched[position] for position in chosen]))
    about = f"{count} samples of a dataset of {len(batch.dataset)}"
    dataset: Any = batch.dataset
    indices: Sequence[int] = batch.indices
    while type(dataset) is Subset:
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    in_memory = contents and draws_no_numbers(dataset)
    values = _of_values([dataset[indices[position]] for position in chosen]) if in_memory else ""
    return Fingerprint(about, _hexdigest(array("q", indices)), values)


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor can be read without waiting for a device."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a few elements of a few rows, spread over the tensor; all of a small one."""
    if tensor.numel() <= MAX_ROWS * MAX_ELEMENTS:
        return tensor
    shape = tensor.shape
    every = -(-shape[0] // MAX_ROWS)
    if len(shape) == 1:
        return tensor[::every]
    rows = tensor[::every].flatten(1)
    return rows[:, :: -(-rows.size(1) // MAX_ELEMENTS)]


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor on the CPU as bytes."""
    # A conjugated or negated tensor may be a flag on memory with other values.
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.contiguous()
    # Several times as fast as an array type of `ctypes`, which is created for each size.
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _of_values(samples: Sequence[Any]) -> str:
    """Return a digest of the values of some samples."""
    return _hexdigest(b"".join(part for sample in samples for part in _parts(sample)))


def _parts(value: Any) -> Iterator[bytes]:
    """Yield the bytes of the values in a sample, except for values whose bytes may differ between processes."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if _is_readable(value):
            flat = value.flatten()
            yield _bytes(flat[:: max(1, -(-len(flat) // MAX_ELEMENTS))])
    elif isinstance(value, str | int | float | bytes | None):
        yield repr(value).encode()
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield repr(key).encode() if isinstance(key, str | int) else b"key"
            yield from _parts(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _parts(part)
    elif nest.is_record(value):
        yield from _parts(nest.record_parts(value))
    elif hasattr(value, "tobytes"):  # an array of NumPy, or an image
        yield value.tobytes()


def _hexdigest(data: bytes | array[int]) -> str:
    """Return a short digest of bytes, which is only compared and need not resist attacks."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()
