"""Fingerprints of batches, which ranks compare to detect that they were given different ones."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from zlib import crc32

import torch
from torch.utils.data import Subset

from lockstep import nest
from lockstep.data.samples import Samples, draws_no_numbers

NUM_ROWS: Final = 4
"""The number of rows of a batch of tensors that are read, if it has as many."""

RUN: Final = 64
"""The number of neighbouring elements of such a row that are read."""

MAX_SAMPLES: Final = 4
"""The largest number of samples of a dataset in memory that are read."""

MAX_DESCRIPTION: Final = 300
"""The length in characters above which a text is replaced by its digest."""


class Fingerprint(NamedTuple):
    """The properties of a batch that ranks compare.

    Attributes:
        checksum: A checksum of all that is compared; batches with equal checksums are taken to be the same.
        about: The number of samples, or the dtypes and shapes of the tensors.
        indices: A checksum of the indices of `Samples`; None for other batches.
    """

    checksum: int
    about: str
    indices: int | None


def fingerprint(batch: Any, *, contents: bool = True) -> Fingerprint:
    """Compute the fingerprint of a batch.

    The fingerprint of `Samples` covers the length of the dataset and all indices, those of a `Subset` as indices of
    the dataset that it selects from. A batch of tensors is described by the names, dtypes and shapes of its tensors,
    and by `RUN` neighbouring elements in each of `NUM_ROWS` rows of every tensor on the CPU, each row at other columns;
    small tensors are read whole. Tensors on other devices are not read, because the host would have to wait for them.

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
    # The shape of a nested tensor has a symbol, by which it cannot be compared, and its elements lie in a dense one.
    named = [(name, each.values() if each.is_nested else each) for name, each in nest.named_tensors(batch)]
    about = ", ".join(f"{name}: {str(each.dtype)[6:]} {tuple(each.shape)}" for name, each in named)
    if len(about) > MAX_DESCRIPTION:
        digest = hashlib.blake2b(about.encode(), digest_size=8).hexdigest()
        about = f"{len(named)} tensors of shapes with the digest {digest}"
    return Fingerprint(_of_values([each for _, each in named], crc32(about.encode())), about, None)


def _of_samples(batch: Samples, *, contents: bool) -> Fingerprint:
    """Compute the fingerprint of `Samples`."""
    count = len(batch.indices)
    chosen = range(0, count, max(1, -(-count // MAX_SAMPLES)))
    if batch.fetched is batch.dataset:
        # A list of samples is its own dataset: the indices are 0, 1, 2 and so on in every process.
        about = f"{count} samples"
        return Fingerprint(_of_values([batch.fetched[place] for place in chosen], crc32(about.encode())), about, None)
    about = f"{count} samples of a dataset of {len(batch.dataset)}"
    dataset: Any = batch.dataset
    indices: Sequence[int] = batch.indices
    while type(dataset) is Subset:
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    checksum = own = crc32(array("q", indices), crc32(about.encode()))
    if contents and draws_no_numbers(dataset):
        checksum = _of_values([dataset[indices[place]] for place in chosen], own)
    return Fingerprint(checksum, about, own)


def _runs(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the memory of the elements that are compared; nothing if the host cannot read them without waiting."""
    if not tensor.is_cpu or tensor.layout is not torch.strided or tensor.is_quantized:
        return
    tensor, length = tensor.detach(), tensor.numel()
    row, starts, columns = length, [0], [0]
    if length > NUM_ROWS * RUN:
        row, length = length // len(tensor), RUN
        starts = [number * len(tensor) // NUM_ROWS for number in range(NUM_ROWS)]
        columns = [number * max(0, row - RUN) // (NUM_ROWS - 1) for number in range(NUM_ROWS)]
    # A conjugated or negated tensor may be a flag on memory with other values; a single element may have any stride.
    if not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg() or length == 1:
        if len(starts) > 1:
            # A run goes on in the rows after its own if they are shorter.
            height = -(-RUN // row)
            tensor = torch.cat([tensor[start : start + height] for start in starts])
            starts = [number * height for number in range(NUM_ROWS)]
        tensor = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    memory = tensor.view(-1).view(torch.uint8).numpy().data
    for start, column in zip(starts, columns, strict=True):
        first = (start * row + column) * tensor.itemsize
        yield memory[first : first + length * tensor.itemsize]


def _of_values(samples: Sequence[Any], checksum: int) -> int:
    """Return the CRC-32 of the values of some samples, following on that of what describes them."""
    for part in _parts(samples):
        checksum = crc32(part, checksum)
    return checksum


def _parts(value: Any) -> Iterator[Any]:
    """Yield the bytes of the values in a sample, except for values whose bytes may differ between processes."""
    if isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield from _runs(value)
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
