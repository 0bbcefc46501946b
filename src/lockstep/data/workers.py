"""Worker processes that load samples in advance: their queue, their errors, and changes of the dataset they hold."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias

import torch
from torch.utils.data import DataLoader

from lockstep.data.samples import NOT_FETCHED, MapDataset, Samples, StreamedDataset
from lockstep.digest import checksum
from lockstep.errors import WorkerError
from lockstep.nest import attributes
from lockstep.stopping import STOP, shield_worker

POLL_INTERVAL: Final = 5.0
"""Seconds between two checks of the workers while a batch is waited for."""
STOPPED_TIMEOUT: Final = 20.0
"""Seconds of waiting after which a stopped worker ends the run, as a stopped rank does."""
EXIT_TIMEOUT: Final = 1.0
"""Seconds that a process whose connections have ended may take to end itself."""
LOST: Final = "DataLoader worker (pid"
"""How the message begins with which PyTorch reports that a worker has ended; the error has no class of its own."""


def watched(stream: Iterator[Any]) -> Iterator[Any]:
    """Return an iterator that checks the workers of a DataLoader while it waits for them; another one as it is.

    The returned iterator raises a `WorkerError` if a worker was killed, or has been stopped for a while.

    Args:
        stream: The iterator of any source of batches.
    """
    workers = getattr(stream, "_workers", ())
    if not workers:
        return stream
    _find_in_waits()
    return _checked(stream, workers)


def _checked(stream: Iterator[Any], workers: Any) -> Iterator[Any]:
    """Yield batches, and check the workers that load them."""
    wait = _Wait([worker.pid for worker in workers])
    # A thread, because PyTorch may wait for a worker in a read from a socket, which has no time limit.
    watching = threading.Thread(target=wait.watch, name="lockstep loader watch", daemon=True)
    watching.start()
    try:
        while True:
            wait.since = time.monotonic()
            try:
                batch = next(stream)
            except StopIteration:
                return
            except (RuntimeError, ConnectionError, EOFError) as error:
                how = wait.found(workers, error)
                if not how:
                    raise
                raise WorkerError(f"{how} The state is that after the last update.") from error
            wait.since = None
            yield batch
    finally:
        wait.ended.set()
        watching.join()


class _Wait:
    """A wait for batches, during which stopped workers are killed, so that it ends.

    Attributes:
        since: The time at which the wait began; None while there is none.
        killed: The process IDs of the workers that were killed.
        ended: Set when there are no more waits.
    """

    def __init__(self, processes: Sequence[int]) -> None:
        self._processes = processes
        self.since: float | None = None
        self.killed: list[int] = []
        self.ended = threading.Event()

    def found(self, workers: Any, error: Exception) -> str:
        """Return how a worker was lost, if an error says so.

        Args:
            workers: The worker processes.
            error: The error that a wait for a batch has raised.
        """
        if self.killed:
            return (
                f"A process that loads data (pid {self.killed[0]}) was stopped, and no batch arrived for "
                f"{STOPPED_TIMEOUT:g} s. It was killed. Start the run again."
            )
        remedy = "If memory ran out, use fewer workers or smaller batches."
        if str(error).startswith(LOST):
            return f"A process that loads data has ended: {str(error).strip()} {remedy}"
        if isinstance(error, ConnectionError | EOFError):
            # The connection ends a moment before the process does.
            deadline = time.monotonic() + EXIT_TIMEOUT
            while time.monotonic() < deadline:
                for worker in workers:
                    if not worker.is_alive():
                        code = worker.exitcode
                        return f"A process that loads data (pid {worker.pid}) has ended, exit code {code}. {remedy}"
                time.sleep(EXIT_TIMEOUT / 100)
        return ""

    def watch(self) -> None:
        """Kill workers that are stopped after a long wait. It is the only way to end a stopped process."""
        stopped: set[int] = set()
        while not self.ended.wait(POLL_INTERVAL):
            # Twice, because after Ctrl-Z this process may go on before its workers do.
            before, stopped = stopped, set(filter(_is_stopped, self._processes))
            since = self.since
            if since is not None and time.monotonic() - since >= STOPPED_TIMEOUT:
                for process in before & stopped:
                    self.killed.append(process)
                    with suppress(ProcessLookupError):
                        os.kill(process, signal.SIGKILL)


def _is_stopped(process: int) -> bool:
    """Return whether a process is stopped by a signal. Only Linux can tell."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    # The name in parentheses may contain anything.
    return stat.rpartition(")")[2].split()[0] == "T"


def _find_in_waits() -> None:
    """Keep PyTorch from raising the death of a worker wherever the main thread is, such as while weights move.

    A wait for data finds it: at once if a batch of the worker is on its way, and otherwise within 5 s.
    """
    number = getattr(signal, "SIGCHLD", None)
    if number is None or threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(number)
    if not callable(handler) or not getattr(handler, "__module__", "").startswith("torch.utils.data"):
        return

    def handle(number: int, frame: FrameType | None) -> None:
        with suppress(RuntimeError):
            handler(number, frame)

    signal.signal(number, handle)


SCALARS: Final = frozenset({type(None), bool, int, float, complex, str, bytes})
"""The types whose values are compared."""

MOST_ENTRIES: Final = 100
"""The number of entries up to which a container is looked into. A larger one is compared by its length."""

MOST_OBJECTS: Final = 1000
"""The number of objects that are looked at most, so that a comparison takes far less time than loading a batch."""


class DatasetState:
    """What the attributes of a dataset refer to at one moment.

    Numbers and strings are compared by value, tensors by their in-place changes, and other objects by identity and by
    their own attributes. Elements of arrays and of long containers are not compared.

    Args:
        dataset: The dataset.

    Attributes:
        values: What it refers to, equal to that of an equal state of the same dataset.

    >>> class Crops:
    ...     size = 3
    >>> dataset = Crops()
    >>> before = DatasetState(dataset)
    >>> before.values == DatasetState(dataset).values
    True
    >>> dataset.size = 4
    >>> before.values == DatasetState(dataset).values
    False
    """

    __slots__ = ("_held", "values")

    def __init__(self, dataset: object) -> None:
        self.values: list[object] = []
        # Held, because the address of an object that is freed may be that of its successor.
        self._held: dict[int, object] = {}
        self._visit(dataset)

    def _visit(self, value: Any) -> None:
        """Record a value and what it refers to."""
        kind = type(value)
        if kind in SCALARS:
            self.values += (kind, value)
            return
        if kind is not tuple:
            self.values.append(id(value))
            if id(value) in self._held or len(self._held) >= MOST_OBJECTS:
                return
            self._held[id(value)] = value
        if isinstance(value, torch.Tensor):
            self.values.append(None if value.is_inference() else value._version)
            # A write to `tensor.data` or to an array over its memory is not counted.
            if value.is_cpu and value.layout is torch.strided and value.numel() <= MOST_ENTRIES:
                self.values.append(checksum(value))
        elif "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray):
            self.values.append(value.tobytes() if value.size <= MOST_ENTRIES else value.shape)
        else:
            for each in _parts(value):
                self._visit(each)


def _parts(value: Any) -> Iterator[Any]:
    """Yield what an object refers to, without the entries of a long container."""
    if isinstance(value, list | tuple | set | frozenset | deque | Mapping):
        yield len(value)
        if len(value) <= MOST_ENTRIES:
            yield from value.items() if isinstance(value, Mapping) else value
    if not isinstance(value, type | ModuleType | FunctionType):
        yield from attributes(value).items()


# A batch is sent as one buffer: with a shared file per tensor, a process would run out of file descriptors.
_TensorSpec: TypeAlias = "tuple[int, torch.Size, torch.dtype]"  # the offset in the buffer, the shape, the dtype
_Packed: TypeAlias = "tuple[bytes, torch.Tensor]"

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
        fetched = chain(first, *(next(lists) for _ in positions[1:]))
        by_position = dict(zip(chain(*positions), fetched, strict=True))
        yield replace(batch, fetched=[by_position.get(position, NOT_FETCHED) for position in range(len(batch))])


def _sample_keys(requests: Iterable[LoadRequest], pending: deque[LoadRequest]) -> Generator[Sequence[Any]]:
    """Yield the keys of the samples that workers load for each batch, and append the request to ``pending``.

    PyTorch gives lists to workers in turn. With a list for each worker, each gets the same one in all batches.
    """
    for batch, positions in requests:
        pending.append((batch, positions))
        keys: Sequence[Any] = batch.indices if batch.streams is None else batch.streams.keys(batch.indices)
        for each in positions:
            yield [keys[position] for position in each]


def _begin_worker(parent: int, shielded: bool, worker: int) -> None:
    """Prepare a worker process, and end it if the process that has started it is gone."""
    # From the next line of PyTorch's loop on, a worker ends with its parent. Killed before, the parent would leave one
    # that waits for ever. The parent of a worker that a server has forked is that server, which lives as long as its
    # workers do: there, both would outlive the process that needs them.
    if multiprocessing.get_start_method() == "forkserver":
        threading.Thread(target=_end_with_creator, name="lockstep-worker-end", daemon=True).start()
    elif os.getppid() != parent:
        os._exit(1)
    if shielded:
        # The system may signal all processes, and a run that ends after the current update still needs its workers.
        shield_worker(worker)


def _end_with_creator() -> None:
    """End this process when the one that has asked for it is gone, which closes a pipe."""
    creator = multiprocessing.parent_process()
    if creator is not None:
        creator.join()
        os._exit(1)


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
        worker_init_fn=partial(_begin_worker, os.getpid(), shielded),
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
    buffer = torch.empty(pickler.size, dtype=torch.uint8)
    for tensor, spec in pickler.tensors:
        _view(buffer, spec).copy_(tensor)
    return stream.getvalue(), buffer


def unpack(packed: _Packed) -> list[Any]:
    """Unpack samples from the result of `pack`; their tensors are views of the buffer.

    >>> unpack(pack([(torch.arange(3), "a name")]))
    [(tensor([0, 1, 2]), 'a name')]
    """
    content, buffer = packed
    samples: list[Any] = _Unpickler(io.BytesIO(content), buffer).load()
    return samples


def _view(buffer: torch.Tensor, spec: _TensorSpec) -> torch.Tensor:
    """Return a tensor of the buffer as a view."""
    start, shape, dtype = spec
    return buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class _Pickler(pickle.Pickler):
    """A pickler that writes the places of plain tensors in a buffer to the stream instead of the tensors."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[tuple[torch.Tensor, _TensorSpec]] = []
        self.size = 0

    def persistent_id(self, obj: Any) -> _TensorSpec | None:
        # Other tensors (with a graph, on a device, of a subclass) are more than their data: they are pickled.
        plain = type(obj) is torch.Tensor and obj.layout == torch.strided and obj.device.type == "cpu"
        if not plain or obj.requires_grad or obj.is_quantized:
            return None
        spec = self.size, obj.shape, obj.dtype
        self.tensors.append((obj, spec))
        self.size += -(-obj.nbytes // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
        return spec


class _Unpickler(pickle.Unpickler):
    """An unpickler that inserts views of the buffer."""

    def __init__(self, stream: io.BytesIO, buffer: torch.Tensor) -> None:
        super().__init__(stream)
        self._buffer = buffer

    def persistent_load(self, pid: _TensorSpec) -> torch.Tensor:
        return _view(self._buffer, pid)
