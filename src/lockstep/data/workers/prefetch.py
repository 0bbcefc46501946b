"""Load batches in worker processes in advance, using PyTorch's DataLoader."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader

from lockstep.data.samples import NOT_FETCHED, MapDataset, Samples, StreamedDataset
from lockstep.data.workers.watch import watched
from lockstep.stopping import STOP, shield_worker

# A batch is sent as one buffer: with a shared file per tensor, a process would run out of file descriptors.
_TensorSpec: TypeAlias = "tuple[int, torch.Size, torch.dtype]"  # the offset in the buffer, the shape, the dtype
_Packed: TypeAlias = "tuple[bytes, torch.Tensor, list[_TensorSpec]]"

_BATCHES_PER_WORKER = 2
_TENSOR_ALIGNMENT = 64  # bytes; a cache line, and a multiple of every dtype's size

LoadRequest: TypeAlias = "tuple[Samples, Sequence[Sequence[int]]]"
"""A batch, and the positions in it of the samples to load, in ascending order, as one list or as one per worker."""


def load_ahead(
    requests: Iterable[LoadRequest], dataset: MapDataset, *, in_streams: bool, num_workers: int, seed: int
) -> Generator[Samples]:
    """Yield batches whose samples were loaded in worker processes.

    Args:
        requests: The batches in order; they are read some batches in advance.
        dataset: The dataset of the samples.
        in_streams: Whether each sample is loaded with its own random stream.
        num_workers: The number of worker processes, at least 1.
        seed: The seed of the random numbers that workers draw outside of streams.

    Raises:
        Exception: Any exception of the dataset, as PyTorch's DataLoader reports it.
    """
    # The queue of the workers reads requests before their batches are yielded, so the requests must be kept.
    pending: deque[LoadRequest] = deque()
    loader = StreamedDataset(dataset) if in_streams else dataset
    lists = fetch_ahead(loader, _sample_keys(requests, pending), num_workers=num_workers, seed=seed)
    for first in lists:
        batch, positions = pending.popleft()
        fetched = list(chain(first, *(next(lists) for _ in positions[1:])))
        yield replace(batch, fetched=_spread(fetched, list(chain(*positions)), len(batch)))


def _sample_keys(requests: Iterable[LoadRequest], pending: deque[LoadRequest]) -> Generator[Sequence[Any]]:
    """Yield the keys of the samples that workers load for each batch, and append the request to ``pending``.

    PyTorch gives lists to workers in turn. With a list for each worker, each gets the same one in all batches.
    """
    for batch, positions in requests:
        pending.append((batch, positions))
        keys: Sequence[Any] = batch.indices
        if batch.streams is not None:
            keys = list(zip(keys, batch.streams.seeds(batch.indices), strict=True))
        for each in positions:
            yield [keys[position] for position in each]


def _spread(fetched: Sequence[Any], positions: Sequence[int], size: int) -> Sequence[Any]:
    """Return a batch of this size with the fetched samples at their positions."""
    if len(positions) == size:
        return fetched
    samples = [NOT_FETCHED] * size
    for position, sample in zip(positions, fetched, strict=True):
        samples[position] = sample
    return samples


def fetch_ahead(
    dataset: MapDataset | StreamedDataset, batches: Iterable[Sequence[Any]], *, num_workers: int, seed: int
) -> Iterator[list[Any]]:
    """Load batches in worker processes, and yield them in order.

    The workers start with the first batch, and stop when the iterator is closed or exhausted. Each worker
    holds two batches, so ``batches`` is read that far in advance.

    Args:
        dataset: The dataset; it must be picklable if worker processes are not forked.
        batches: The keys of the samples of each batch: indices, or pairs of an index and the seed of its
            stream for a `StreamedDataset`.
        num_workers: The number of worker processes, at least 1.
        seed: The 32-bit seed of the random numbers of the workers. Which worker loads which batch depends on
            the number of workers, and so do random numbers that a dataset draws without streams.

    Raises:
        Exception: Any exception of the dataset, as PyTorch's DataLoader reports it.
        WorkerError: If a worker was killed or is stopped.
    """
    # The run may have ended when the workers are stopped, and those that it shields still ignore signals.
    shielded = STOP.installed
    loader: DataLoader[Any] = DataLoader(
        dataset,  # type: ignore[arg-type]  # the loader uses no other methods than these have
        batch_sampler=(list(indices) for indices in batches),
        num_workers=num_workers,
        collate_fn=pack,
        prefetch_factor=_BATCHES_PER_WORKER,
        # Without a generator, the loader would draw its seed from the default generator.
        generator=torch.Generator().manual_seed(seed),
        # The system may signal all processes, and a run that ends after the current update still needs its workers.
        worker_init_fn=shield_worker if shielded else None,
    )
    stream = iter(loader)
    try:
        yield from map(unpack, watched(stream))
    finally:
        # Otherwise the workers run until the iterator is garbage collected, and an exception may hold a reference
        # to it for a long time.
        stream._shutdown_workers()  # type: ignore[attr-defined]  # noqa: SLF001 - there is no public way
        if shielded:
            # PyTorch has tried SIGTERM, which a worker that still loads a sample ignores; Python would wait for it.
            for worker in stream._workers:  # type: ignore[attr-defined]  # noqa: SLF001 - as above
                worker.kill()


def pack(samples: list[Any]) -> _Packed:
    """Pack samples into one buffer with the data of all tensors, and one byte string for everything else."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    pickler.dump(samples)
    specs = []
    size = 0
    for tensor in pickler.tensors:
        specs.append((size, tensor.shape, tensor.dtype))
        size += -(-tensor.nbytes // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
    buffer = torch.empty(size, dtype=torch.uint8)
    for tensor, spec in zip(pickler.tensors, specs, strict=True):
        _view(buffer, spec).copy_(tensor)
    return stream.getvalue(), buffer, specs


def unpack(packed: _Packed) -> list[Any]:
    """Unpack samples from the result of `pack`; their tensors are views of the buffer.

    >>> unpack(pack([(torch.arange(3), "a name")]))
    [(tensor([0, 1, 2]), 'a name')]
    """
    content, buffer, specs = packed
    samples: list[Any] = _Unpickler(io.BytesIO(content), [_view(buffer, spec) for spec in specs]).load()
    return samples


def _view(buffer: torch.Tensor, spec: _TensorSpec) -> torch.Tensor:
    """Return a tensor of the buffer as a view."""
    start, shape, dtype = spec
    return buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class _Pickler(pickle.Pickler):
    """A pickler that collects plain tensors instead of writing them to the stream."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> int | None:
        # Other tensors (with a graph, on a device, of a subclass) are more than their data: they are pickled.
        plain = type(obj) is torch.Tensor and obj.layout == torch.strided and obj.device.type == "cpu"
        if not plain or obj.requires_grad or obj.is_quantized:
            return None
        self.tensors.append(obj)
        return len(self.tensors) - 1


class _Unpickler(pickle.Unpickler):
    """An unpickler that inserts the collected tensors again."""

    def __init__(self, stream: io.BytesIO, tensors: list[torch.Tensor]) -> None:
        super().__init__(stream)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> torch.Tensor:
        return self._tensors[pid]
