"""Load batches in worker processes ahead of their use, with PyTorch's own loader as the engine."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from lockstep.data.sample_streams import StreamedDataset
from lockstep.data.samples import NOT_FETCHED, MapDataset, Samples

# A shared file per tensor would use up the files a process may open: a batch travels as one buffer.
_Place: TypeAlias = "tuple[int, torch.Size, torch.dtype]"
_Packed: TypeAlias = "tuple[bytes, torch.Tensor, list[_Place]]"

_BATCHES_PER_WORKER = 2
_ALIGNMENT = 64  # bytes; a cache line, and a multiple of every dtype's size

Wish: TypeAlias = "tuple[Samples, Sequence[int]]"
"""A batch, and the ascending places in it of the samples to load."""


def load_ahead(
    wishes: Iterable[Wish], dataset: MapDataset, *, in_streams: bool, num_workers: int, seed: int
) -> Generator[Samples]:
    """Give batches whose samples were loaded in worker processes.

    Args:
        wishes: The batches in order; read some batches ahead.
        dataset: Where their samples come from.
        in_streams: Whether each sample is loaded in its own random stream.
        num_workers: At least 1.
        seed: Of the random numbers of the workers outside of streams.

    Raises:
        Exception: What the dataset raised, as PyTorch's loader reports it.
    """
    # The workers' queue asks for batches before they are given out, so what was asked for is kept.
    asked: deque[Wish] = deque()
    loader = StreamedDataset(dataset) if in_streams else dataset
    for fetched in fetch_ahead(loader, _keys(wishes, asked), num_workers=num_workers, seed=seed):
        batch, places = asked.popleft()
        yield replace(batch, fetched=_in_place(fetched, places, len(batch)))


def _keys(wishes: Iterable[Wish], asked: deque[Wish]) -> Generator[Sequence[Any]]:
    """Name the samples of each batch that workers shall load, and remember the batch."""
    for batch, places in wishes:
        asked.append((batch, places))
        indices = batch.indices
        if batch.streams is None:
            yield [indices[place] for place in places]
        else:
            seeds = batch.streams.seeds(indices)
            yield [(indices[place], seeds[place]) for place in places]


def _in_place(fetched: Sequence[Any], places: Sequence[int], size: int) -> Sequence[Any]:
    """Put samples to their places in a batch of this size."""
    if len(places) == size:
        return fetched
    samples = [NOT_FETCHED] * size
    for place, sample in zip(places, fetched, strict=True):
        samples[place] = sample
    return samples


def fetch_ahead(
    dataset: MapDataset | StreamedDataset, batches: Iterable[Sequence[Any]], *, num_workers: int, seed: int
) -> Iterator[list[Any]]:
    """Load batch after batch in worker processes, and give them in order.

    The workers start with the first batch and stop when the iterator is closed or exhausted. They
    hold two batches each, so ``batches`` is read that far ahead.

    Args:
        dataset: Must be picklable where worker processes are not forked.
        batches: What names the samples of each batch: indices, or indices with the seeds of their streams
            for a `StreamedDataset`.
        num_workers: At least 1.
        seed: Where the random numbers of the workers begin, in 32 bits. Which worker loads which batch
            depends on their number, so without streams a dataset that draws such numbers does so too.

    Raises:
        Exception: What the dataset raised, as PyTorch's loader reports it.
    """
    loader: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type]  # the loader asks for no more than these have
        batch_sampler=(list(indices) for indices in batches),
        num_workers=num_workers,
        collate_fn=pack,
        prefetch_factor=_BATCHES_PER_WORKER,
        # Else the loader would draw its seed from the default generator.
        generator=torch.Generator().manual_seed(seed),
    )
    stream = iter(loader)
    try:
        yield from map(unpack, stream)
    finally:
        # Otherwise they stop when the stream is collected, and an exception may hold on to it for long.
        stream._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public way


def pack(samples: list[Any]) -> _Packed:
    """Turn samples into one buffer for the bytes of all tensors, and one string for the rest."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(samples)
    places = []
    size = 0
    for tensor in pickler.tensors:
        places.append((size, tensor.shape, tensor.dtype))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8)
    for tensor, place in zip(pickler.tensors, places, strict=True):
        _view(buffer, place).copy_(tensor)
    return stream.getvalue(), buffer, places


def unpack(packed: _Packed) -> list[Any]:
    """Turn what `pack` made back into samples, whose tensors are views of the buffer.

    >>> unpack(pack([(torch.arange(3), "a name")]))
    [(tensor([0, 1, 2]), 'a name')]
    """
    content, buffer, places = packed
    samples: list[Any] = _Unpickler(io.BytesIO(content), [_view(buffer, place) for place in places]).load()
    return samples


def _view(buffer: torch.Tensor, place: _Place) -> torch.Tensor:
    """Find a tensor's bytes in the buffer."""
    start, shape, dtype = place
    return buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class _Pickler(pickle.Pickler):
    """Keeps plain tensors out of the stream and collects them."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        # Whatever is more than values on the CPU goes the long way, and comes back as it was.
        plain = type(obj) is torch.Tensor and obj.layout == torch.strided and obj.device.type == "cpu"
        if not plain or obj.requires_grad or obj.is_quantized:
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the tensors back."""

    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]
