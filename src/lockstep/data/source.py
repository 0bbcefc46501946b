"""Read batches from any iterable, epoch after epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Iterator as PythonIterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import nn

from lockstep.data.workers import watched
from lockstep.errors import OrderError, ReplayWarning

_PART_ATTRIBUTES: Final = ("sampler", "batch_sampler", "dataset", "base_dataloader")
"""The attributes in which DataLoaders, and samplers that wrap others, store the objects that select samples."""

_RANK_ATTRIBUTES: Final = (("num_replicas", "rank"), ("num_processes", "process_index"))
"""The attributes for the number of processes that share the samples, and for the index of this process.

Samplers of PyTorch and Hugging Face have the first pair, the shards of Hugging Face Accelerate the second.
"""


def check_not_split_by_rank(source: object, name: str) -> None:
    """Check that a source has no sampler that gives this process only a part of each batch.

    Every rank needs whole batches, because the updater splits them over the ranks itself.

    Args:
        source: The source of the batches, such as a DataLoader.
        name: The name of the argument in error messages.

    Raises:
        ValueError: If a `DistributedSampler`, or a similar sampler, splits the samples over several processes.
    """
    for part in _parts(source):
        for count, index in _RANK_ATTRIBUTES:
            number = getattr(part, count, None)
            if isinstance(number, int) and number > 1 and isinstance(getattr(part, index, None), int):
                kind = type(part).__name__
                raise ValueError(
                    f"`{name}` must give every rank the same batches, got a {type(source).__name__} with a {kind} "
                    f"({count}={number}), which gives each rank samples of its own. lockstep cuts every batch over "
                    f"the ranks itself: leave out the {kind}, and give the DataLoader the global batch size and a "
                    "plain sampler with the same seed on every rank, or give lockstep.BatchIterator(dataset, "
                    "batch_size, shuffle=True)."
                )


def _parts(source: object) -> Iterator[Any]:
    """Yield a source and the objects that select its samples, each once."""
    pending, seen = [source], set[int]()
    while pending:
        part = pending.pop()
        if part is None or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        # Only stored attributes, because reading a computed one could have side effects.
        attributes = getattr(part, "__dict__", {})
        pending += [attributes[name] for name in _PART_ATTRIBUTES if name in attributes]


Source: TypeAlias = "Iterable[Any] | Callable[[], Iterable[Any]]"

_END: Final = object()


@runtime_checkable
class Resumable(Protocol):
    """A source that can save its position and continue from it, like ``StatefulDataLoader`` of torchdata.

    After it has loaded a state, the next iteration over it continues from there; if the state was saved at the
    end of an epoch, with the next epoch.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the current iteration."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Set the position from which the next iteration continues."""


@final
@dataclass(frozen=True, slots=True)
class SourceCursor:
    """A position between two batches.

    Args:
        epoch: The number of epochs that have ended before it.
        position: The number of batches of this epoch that come before it.
        state: The state of the source at this position; None if it has no state or had not started.
    """

    epoch: int = 0
    position: int = 0
    state: Any = None

    def same_as(self, other: SourceCursor) -> bool:
        """Return whether two cursors are at the same position, regardless of the state of the source."""
        return (self.epoch, self.position) == (other.epoch, other.position)


@final
class BatchSource:
    """Reads the batches of an iterable one by one, each with the cursor after it.

    To recognize the last batch of an epoch, it reads one batch more: after every batch if the source has no
    length, otherwise only after the last batch according to the length.

    Args:
        source: An iterable, or a function that returns one.

    Raises:
        TypeError: If it is neither, or cannot contain batches.
        ValueError: If it is empty.
    """

    def __init__(self, source: Source) -> None:
        check_source(source, "source")
        self._source: Any = source
        # Checked once, because checking a protocol takes as long as the optimizer step of a small update.
        self.resumable = source if isinstance(source, Resumable) else None
        """The source, if it can save its position."""
        self.one_shot = isinstance(source, PythonIterator)
        """Whether it can be iterated over only once, and therefore has one epoch."""
        self.num_batches = _length(source)
        """The number of batches per epoch, or None if the source has no length."""
        if self.num_batches == 0:
            raise ValueError("`source` must hold at least one batch, got none.")
        self._cursor = SourceCursor()
        self._stream: PythonIterator[Any] | None = None
        self._lookahead: list[Any] = []
        self._broken = False
        self.started = False
        """Whether the source has been iterated over."""

    def go_to(self, cursor: SourceCursor) -> None:
        """Continue after this cursor; the current iteration is dropped."""
        self._stream = None
        self._lookahead.clear()
        self._cursor = cursor

    def pull(self) -> tuple[Any, SourceCursor]:
        """Return the next batch, and the cursor after it.

        Raises:
            ValueError: If the source has fewer or more batches than its length.
            OrderError: If the source has raised an error before and can be iterated over only once.
            Exception: Any exception of the source; the next call starts again at this batch.
        """
        if self._broken:
            remedy = "Create a new one, or pass a function that does."
            raise OrderError(f"`source` raised an error, and an iterator cannot be restarted. {remedy}")
        try:
            batch, cursor = self._pull(self._cursor)
        except BaseException:
            # A generator that has raised is finished: its end must not pass for the end of the epoch.
            self._broken = self.one_shot and self.started and self.resumable is None
            self.go_to(self._cursor)
            raise
        self._cursor = cursor
        return batch, cursor

    def _pull(self, start: SourceCursor) -> tuple[Any, SourceCursor]:
        """Read the batch after a cursor, and the next one if it may not exist."""
        stream = self._start(start) if self._stream is None else self._stream
        batch = self._lookahead.pop() if self._lookahead else next(stream, _END)
        if batch is _END:
            raise ValueError(f"`source` must hold {self._expected(start)}, got {start.position}.")
        position = start.position + 1
        # The state is read before the next batch is, after which it would be one batch too far.
        cursor = SourceCursor(start.epoch, position, self._state())
        if self.num_batches is not None and position < self.num_batches:
            return batch, cursor
        following = next(stream, _END)
        if following is _END:
            self._stream = None
            return batch, SourceCursor(start.epoch + 1, 0, self._state())
        if self.num_batches is not None:
            raise ValueError(f"`source` must hold {self._expected(start)}, got more.")
        self._lookahead.append(following)
        return batch, cursor

    def _start(self, start: SourceCursor) -> PythonIterator[Any]:
        """Start an iteration at a cursor."""
        source = self._source
        self.started = True
        if start.state is not None and self.resumable is not None:
            self.resumable.load_state_dict(start.state)
            self._stream = _iterator(source)
        elif isinstance(source, Sequence):
            self._stream = islice(source, start.position, None)
        else:
            self._stream = self._skip(_iterator(source), start)
        return self._stream

    def _skip(self, stream: PythonIterator[Any], start: SourceCursor) -> PythonIterator[Any]:
        """Load and discard the batches before a cursor."""
        if start.position:
            warnings.warn(
                f"`source` cannot start in the middle of an epoch: {start.position} batches of epoch "
                f"{start.epoch} are loaded again and discarded. This is correct if it yields the same batches again, "
                "which a DataLoader that shuffles does not. Use StatefulDataLoader of torchdata.stateful_dataloader "
                "instead, which has the same arguments and saves its position.",
                ReplayWarning,
                stacklevel=2,
            )
        for position in range(start.position):
            if next(stream, _END) is _END:
                raise ValueError(f"`source` must hold {self._expected(start)}, got {position}.")
        return stream

    def _state(self) -> Any:
        """Return the state of the source, or None if it has none."""
        return None if self.resumable is None else self.resumable.state_dict()

    def _expected(self, start: SourceCursor) -> str:
        """Describe, for an error message, how many batches the source must have."""
        if self.num_batches is not None:
            return f"as many batches in each epoch as its `len()` ({self.num_batches})"
        return f"at least {start.position + 1} batches in epoch {start.epoch}"


def check_source(source: object, name: str) -> None:
    """Check that an object can be a source of batches, and of the same ones on every rank.

    Raises:
        TypeError: If it is not iterable, or its items cannot be batches.
        ValueError: If its sampler shares the samples among several processes.
    """
    # These can be iterated over or called, but not for batches: a tensor yields its samples one by one.
    no_batches = isinstance(source, torch.Tensor | nn.Module | Mapping | str | bytes | type)
    if no_batches or not (isinstance(source, Iterable) or callable(source)):
        rule = "must be a lockstep Iterator, an iterable of batches or a function that returns one"
        remedy = (
            "The order is (iterator, optimizer, model)."
            if isinstance(source, nn.Module)
            else "`BatchIterator` makes batches of a dataset."
        )
        raise TypeError(f"`{name}` {rule}, got a {type(source).__name__}. {remedy}")
    check_not_split_by_rank(source, name)


def _iterator(source: Any) -> PythonIterator[Any]:
    """Return an iterator over a source, or over what it returns if it is a function."""
    if isinstance(source, Iterable):
        return watched(iter(source))
    # `check_source` has seen only the function.
    check_not_split_by_rank(iterable := source(), "source")
    return watched(iter(iterable))


def _length(source: object) -> int | None:
    """Return the length of a source, or None if it has none."""
    if not isinstance(source, Sized):
        return None
    try:
        return len(source)
    except TypeError:
        # A DataLoader always has the method, and raises this for a dataset without a length.
        return None
