"""Fingerprints of batches, which ranks compare to detect that they were given different ones."""

from __future__ import annotations

import ctypes
import hashlib
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
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

MAX_ELEMENTS: Final = 64
"""The largest number of elements of a tensor in such a sample that are read."""

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
    about, checksum, reads = _plan(tuple([(name, each.dtype, each.shape) for name, each in named]))
    for (_, tensor), read in zip(named, reads, strict=True):
        if read is not None and tensor.is_cpu and tensor.layout is torch.strided:
            checksum = read.checksum(tensor, checksum)
    return Fingerprint(checksum, about, None)


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


def _is_readable(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor can be read without waiting for a device."""
    return tensor.is_cpu and tensor.layout is torch.strided and not tensor.is_quantized


class _Read(NamedTuple):
    """What is read of tensors of one shape and dtype.

    Attributes:
        offsets: The position of each run of elements in a contiguous tensor, in bytes.
        run: The type of the memory of a run.
        is_complex: Whether the elements are complex, so that memory may hold their conjugates.
    """

    offsets: Sequence[int]
    run: type[ctypes.Array[ctypes.c_char]]
    is_complex: bool

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype) -> _Read | None:
        """Choose a few elements of a few rows, spread over rows and columns; all of a small tensor.

        Returns:
            What is read; None for quantized tensors.
        """
        if str(dtype).startswith("torch.q"):
            return None
        size, row, itemsize = shape.numel(), shape[1:].numel(), dtype.itemsize
        if size <= NUM_ROWS * RUN:
            return cls([0], ctypes.c_char * (itemsize * size), dtype.is_complex)
        last_column = max(0, row - RUN)
        starts = [
            number * shape[0] // NUM_ROWS * row + number * last_column // (NUM_ROWS - 1) for number in range(NUM_ROWS)
        ]
        return cls([start * itemsize for start in starts], ctypes.c_char * (itemsize * RUN), dtype.is_complex)

    def checksum(self, tensor: torch.Tensor, checksum: int) -> int:
        """Return the CRC-32 of what is read of a tensor on the CPU, following on that of the tensors before it.

        Batches that differ there have equal checksums with a probability of 1 in 2³², and never if they differ in a
        single place of up to 32 bits.
        """
        # A negated tensor may be a flag on memory with other values, as a conjugated one may.
        if tensor.is_contiguous() and not self.is_complex and not tensor.is_neg():
            # Read in place: kernels have displaced everything else from the caches, so what counts is how many places
            # in code and memory are visited, and operations of torch visit many.
            address, read = tensor.data_ptr(), self.run.from_address
            for offset in self.offsets:
                checksum = crc32(read(address + offset), checksum)
            return checksum
        starts, length = [offset // tensor.itemsize for offset in self.offsets], ctypes.sizeof(self.run)
        elements = chain(*[range(start, start + length // tensor.itemsize) for start in starts])
        indices = torch.tensor(list(elements), dtype=torch.int64, device="cpu")
        return crc32(_bytes(tensor.detach()[torch.unravel_index(indices, tensor.shape)]), checksum)


# Most batches have the names, dtypes and shapes of earlier ones, and the types of `ctypes` take long to create.
@lru_cache(maxsize=64)
def _plan(tensors: tuple[tuple[str, torch.dtype, torch.Size], ...]) -> tuple[str, int, list[_Read | None]]:
    """Describe the tensors of a batch by their names, dtypes and shapes, and choose what is read of each.

    Returns:
        The description, its checksum, and what is read.
    """
    about = ", ".join(f"{name}: {str(dtype)[6:]} {tuple(shape)}" for name, dtype, shape in tensors)
    if len(about) > MAX_DESCRIPTION:
        digest = hashlib.blake2b(about.encode(), digest_size=8).hexdigest()
        about = f"{len(tensors)} tensors of shapes with the digest {digest}"
    return about, crc32(about.encode()), [_Read.of(shape, dtype) for _, dtype, shape in tensors]


def _bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of a tensor on the CPU as bytes."""
    # A conjugated or negated tensor may be a flag on memory with other values.
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.contiguous()
    # Several times as fast as an array type of `ctypes`, which is created for each size.
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _of_values(samples: Sequence[Any], checksum: int) -> int:
    """Return the CRC-32 of the values of some samples, following on that of what describes them."""
    return crc32(b"".join(part for sample in samples for part in _parts(sample)), checksum)


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
