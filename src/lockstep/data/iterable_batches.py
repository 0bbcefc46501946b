"""Adapt any iterable of batches to the interface of Iterator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator as PythonIterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Literal, TypeAlias, final, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lockstep.arguments import check_choice, check_integer
from lockstep.data.iterator import Iterator
from lockstep.data.samples import Samples
from lockstep.data.workers import watched
from lockstep.errors import OrderError, ReplayWarning, StateError, warn
from lockstep.state import Loadable, check_keys

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


def _parts(source: object) -> PythonIterator[Any]:
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


def _length(source: Any) -> int | None:
    """Return the length of a source, or None if it has none, as a DataLoader of a dataset without a length."""
    try:
        return len(source)
    except TypeError:
        return None


BatchesOf: TypeAlias = Literal["tensors", "samples"]


@final
class IterableBatches(Iterator):
    """Iterates over the batches of any iterable: a DataLoader, a list, a generator, or a function that returns one.

    An iterable that can be iterated over again is repeated, epoch after epoch. A generator, or any other iterator,
    has one epoch and is then at its end. Progress is counted in batches: ``epoch_detail`` has fractions if the
    iterable has a ``len()``, which must be correct, and otherwise counts completed epochs.

    In an iterable without a length, the end of an epoch shows when the next batch is read. That happens when you ask
    how far the iterator has come, as a `Trainer` does after each update, or for the next batch; not before an update is
    applied. So a generator may compute a batch by the weights of the last update, or fill one tensor again and again. A
    signal that ends the run waits for this batch. To hide a length that is only an estimate, pass a function:
    ``lambda: loader``.

    The state is the position: the epoch, and the number of batches passed in it. An iterable with ``state_dict``
    and ``load_state_dict`` (such as torchdata's ``StatefulDataLoader``) also saves its own state, which is read
    after each batch. A sequence can start at any batch. Any other iterable is started anew: the batches before the
    position are loaded again and discarded, with a `ReplayWarning`. Whether the same batches follow is up to the
    iterable; a shuffling DataLoader has another order each time. `BatchIterator` has none of these limits.

    With several processes, each process reads whole batches and splits off its own shards.

    Args:
        source: The iterable, or a function without arguments that returns one for each epoch.
        batches_of: What a batch consists of: ``"tensors"`` for a tensor, or a tuple, list or dict of tensors,
            with the samples along the first dimension; ``"samples"`` for a list of samples, which the converter
            of the updater stacks.
        repeat: Whether epochs follow each other without end; by default if `source` can be iterated over again.

    Raises:
        TypeError: If the source is not iterable, or cannot contain batches.
        ValueError: If the source is empty, is to be repeated but cannot be, or `batches_of` is unknown.

    Determinism: that of the source.

    >>> batches = IterableBatches([torch.zeros(2), torch.ones(2), torch.ones(1)])
    >>> [len(next(batches)) for _ in range(4)], batches.epoch, round(batches.epoch_detail, 2)
    ([2, 2, 1, 2], 1, 1.33)
    >>> batches = IterableBatches(([n, n + 1] for n in (0, 2)), batches_of="samples")
    >>> [list(batch) for batch in batches], batches.epoch, batches.is_new_epoch
    ([[0, 1], [2, 3]], 1, True)
    """

    def __init__(self, source: Source, *, batches_of: BatchesOf = "tensors", repeat: bool | None = None) -> None:
        if isinstance(source, Iterator):
            rule = "must not be a lockstep Iterator, which needs no adapter"
            raise TypeError(f"`source` {rule}, got a {type(source).__name__}.")
        check_choice("batches_of", batches_of, get_args(BatchesOf))
        check_source(source, "source")
        self._one_shot = isinstance(source, PythonIterator)
        if repeat and self._one_shot:
            rule = "must be None or False if `source` can be iterated over only once"
            raise ValueError(f"`repeat` {rule}, got True. Pass a function that returns the iterator.")
        self.source = source
        self.batches_of = batches_of
        self.repeat = not self._one_shot if repeat is None else repeat
        # Checked once, because checking a protocol takes as long as the optimizer step of a small update.
        given: Any = source
        self._resumable: Loadable | None = given if isinstance(given, Loadable) else None
        self._num_batches = _length(source)
        if self._num_batches == 0:
            raise ValueError("`source` must hold at least one batch, got none.")
        # The batches that were requested but not passed yet, each with the cursor after it.
        self._ahead: deque[tuple[Any, SourceCursor]] = deque()
        self._cursor = SourceCursor()
        self._stream: PythonIterator[Any] | None = None
        # The batch that shows that an epoch goes on.
        self._lookahead: list[Any] = []
        self._started = self._resumes = False
        self._broken = False
        self._early_error: Exception | None = None
        self._has_workers = isinstance(source, DataLoader) and source.num_workers > 0

    def peek(self, ahead: int = 0) -> Any:
        """Return the batch that comes after ``ahead`` others, without advancing.

        Args:
            ahead: The number of batches to skip, at least 0.

        Raises:
            StopIteration: If there are not that many batches left.
            TypeError: If the batch is not a list of samples although it should be.
            ValueError: If an epoch is empty, or does not have as many batches as the ``len()`` of the source.
            OrderError: If the source has raised an error before and can be iterated over only once.
            Exception: Any exception of the source; the position is unchanged.
        """
        check_integer("ahead", ahead, minimum=0)
        while len(self._ahead) <= ahead:
            if self._early_error is not None:
                error, self._early_error = self._early_error, None
                try:
                    raise error
                finally:
                    # Its traceback holds this frame, and what the source held.
                    del error
            self._look_ahead()
            # Before reading, which would start another epoch.
            if self._end.epoch > 0 and not self.repeat:
                raise StopIteration
            with self._reading():
                self._read()
        batch, cursor = self._ahead[ahead]
        if self.batches_of == "samples":
            batch = _samples(batch)
            # The same object at every call.
            self._ahead[ahead] = batch, cursor
        return batch

    @property
    def _end(self) -> SourceCursor:
        """The cursor after the batches that have been read."""
        return self._ahead[-1][1] if self._ahead else self._cursor

    def peek_early(self, ahead: int = 0, *, always: bool = False) -> Any | None:
        """Return a later batch if a DataLoader's workers load it in advance anyway, or if ``always``; see `Iterator`.

        No epoch starts early, because its start may draw random numbers, and you may change the source before it.
        """
        if len(self._ahead) == ahead and not (always or self._has_workers):
            return None
        try:
            self._look_ahead()
            if len(self._ahead) == ahead and self._end.position == 0:
                return None
            return self.peek(ahead) if len(self._ahead) >= ahead else None
        except Exception as error:  # noqa: BLE001 - raised by `peek` when the batch is used
            if len(self._ahead) == ahead:
                # The source may not raise it again: a generator would have ended, and a loader starts anew.
                self._early_error = error
            return None

    def advance(self, num_batches: int = 1) -> None:
        """Advance past the next batches.

        Args:
            num_batches: The number of batches to pass, at least 1.

        Raises:
            StopIteration: If fewer batches are left; the position is unchanged.
        """
        check_integer("num_batches", num_batches, minimum=1)
        # Everything that can fail comes first, so that an error leaves the position unchanged.
        self.peek(num_batches - 1)
        start, previous = self._cursor, self.epoch_detail
        for _ in range(num_batches):
            _, self._cursor = self._ahead.popleft()
        self._previous_epoch_detail = previous
        self._is_new_epoch = self._cursor.epoch > start.epoch

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._settled().epoch

    @property
    def epoch_detail(self) -> float:
        """The number of completed epochs, plus the fraction of the current one if its length is known."""
        return self._settled().epoch + self._cursor.position / (self._num_batches or float("inf"))

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last advance reached the end of an epoch."""
        self._settled()
        return self._is_new_epoch

    def reset(self) -> None:
        """Return to the first batch of epoch 0, by iterating over the source anew.

        Raises:
            OrderError: If the source can be iterated over only once, and batches of it have been passed.
        """
        if not self._go_to(SourceCursor()):
            remedy = "Pass a function that returns the iterator."
            raise OrderError(f"`reset` must not follow a batch if `source` is an iterator. {remedy}")
        self._previous_epoch_detail, self._is_new_epoch = None, False

    def finalize(self) -> None:
        """Release the current iteration if the source can resume it.

        Otherwise the iteration is kept, because a new one might yield other batches. At the end of an epoch
        there is no current iteration.
        """
        if self._cursor.state is not None:
            self._go_to(self._cursor)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iterator, with the state of the source if it has one."""
        return {
            "epoch": self._settled().epoch,
            "position": self._cursor.position,
            **self._last_advance(),
            "source": self._cursor.state,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the position of a saved iterator; the source is used when the next batch is requested.

        Raises:
            StateError: If a key is unknown or missing, a value does not fit this iterator, or its source can be
                iterated over only once and has been started; nothing has changed then.
        """
        check_keys(state_dict, self.state_dict(), of="IterableBatches")
        if not self._go_to(self._saved_cursor(state_dict)):
            remedy = "Load the state right after creating the iterator."
            raise StateError(f"`source` is an iterator that has been started and cannot change position. {remedy}")
        self._resumes = True
        self._load_last_advance(state_dict)

    def _saved_cursor(self, state: Mapping[str, Any]) -> SourceCursor:
        """Return the cursor of a saved state, after checking that it fits this iterator."""
        # Not `isinstance`, because a bool is an int too.
        for name in ("epoch", "position"):
            if type(state[name]) is not int or state[name] < 0:
                raise StateError(f"`{name}` must be an integer of at least 0, got {state[name]!r}.")
        self._check_last_advance(state)
        if self._num_batches is not None and state["position"] >= self._num_batches:
            rule = f"must lie in 0..{self._num_batches - 1}, because `source` holds {self._num_batches} batches"
            raise StateError(f"`position` {rule}, got {state['position']}.")
        if state["source"] is not None and self._resumable is None:
            raise StateError("`source` must have `load_state_dict`, because its own state was saved.")
        return SourceCursor(state["epoch"], state["position"], state["source"])

    def _go_to(self, cursor: SourceCursor) -> bool:
        """Move to a cursor, and return whether the source can continue there; if not, nothing has changed."""
        if self._one_shot and self._started and cursor.state is None:
            # The batches read in advance from such a source could not be read again.
            if (cursor.epoch, cursor.position) != (self._cursor.epoch, self._cursor.position):
                return False
        else:
            self._early_error = None
            self._ahead.clear()
            self._stop()
        self._cursor = cursor
        return True

    def _stop(self) -> None:
        """Drop the current iteration over the source."""
        self._stream = None
        self._lookahead.clear()

    @contextmanager
    def _reading(self) -> PythonIterator[None]:
        """Read within the ``with`` block; after an error the next call starts again at the batch that raised it."""
        if self._broken:
            remedy = "Create a new one, or pass a function that does."
            raise OrderError(f"`source` raised an error, and an iterator cannot be restarted. {remedy}")
        try:
            yield
        except BaseException:
            # A generator that has raised is finished: its end must not pass for the end of the epoch.
            self._broken = self._one_shot and self._started and self._resumable is None
            self._stop()
            raise

    def _read(self) -> None:
        """Read the batch after those that have been read."""
        start = self._end
        stream = self._start(start) if self._stream is None else self._stream
        batch = self._lookahead.pop() if self._lookahead else next(stream, _END)
        if batch is _END:
            raise ValueError(f"`source` must hold {self._expected(start)}, got {start.position}.")
        # The state is read before the next batch is, after which it would be one batch too far.
        cursor = SourceCursor(start.epoch, start.position + 1, self._source_state())
        if cursor.position == self._num_batches:
            cursor = self._following(cursor)
        self._ahead.append((batch, cursor))

    def _following(self, cursor: SourceCursor) -> SourceCursor:
        """Read the batch after a cursor; return the cursor, or that of the next epoch if there is no such batch."""
        stream = self._start(cursor) if self._stream is None else self._stream
        following = next(stream, _END)
        if following is _END:
            self._stream = None
            return SourceCursor(cursor.epoch + 1, 0, self._source_state())
        if self._num_batches is not None:
            raise ValueError(f"`source` must hold {self._expected(cursor)}, got more.")
        self._lookahead.append(following)
        return cursor

    def _look_ahead(self) -> None:
        """Find out whether the last batch that was read has ended an epoch, by reading the next one."""
        # After a batch of a source without a length. A state may have been saved after an error of the source, too.
        if self._num_batches is not None or self._lookahead or self._end.position == 0:
            return
        with self._reading():
            cursor = self._following(self._end)
        if self._ahead:
            self._ahead[-1] = self._ahead[-1][0], cursor
        else:
            self._is_new_epoch |= cursor.epoch > self._cursor.epoch
            self._cursor = cursor

    def _settled(self) -> SourceCursor:
        """Return the current cursor, after finding out whether an epoch has ended; an error is raised by `peek`."""
        # After an error the source is not started anew for a question.
        if not self._ahead and self._stream is not None:
            try:
                self._look_ahead()
            except Exception as error:  # noqa: BLE001 - as in `peek_early`
                self._early_error = error
        return self._cursor

    def _start(self, start: SourceCursor) -> PythonIterator[Any]:
        """Start an iteration at a cursor."""
        source: Any = self.source
        self._started = True
        if start.state is not None and self._resumable is not None:
            self._resumable.load_state_dict(start.state)
            self._stream = _iterator(source)
        elif isinstance(source, Sequence):
            self._stream = islice(source, start.position, None)
        else:
            self._stream = self._skip(_iterator(source), start)
        return self._stream

    def _skip(self, stream: PythonIterator[Any], start: SourceCursor) -> PythonIterator[Any]:
        """Load and discard the batches before a cursor."""
        # In a resumed run, a loader draws the order of the epoch as it drew that of the first one.
        draws = self._resumes and isinstance(getattr(self.source, "sampler", None), RandomSampler)
        if start.position or (start.epoch and draws):
            what = f"{start.position} batches of epoch {start.epoch} are loaded again and discarded"
            warn(
                f"`source` cannot go on where it was: {what if start.position else f'epoch {start.epoch} begins anew'}."
                " This is correct if it yields the same batches again, which a DataLoader that shuffles does not. Use "
                "StatefulDataLoader of torchdata.stateful_dataloader instead, which has the same arguments and saves "
                "its position.",
                ReplayWarning,
            )
        self._resumes = False
        for position in range(start.position):
            if next(stream, _END) is _END:
                raise ValueError(f"`source` must hold {self._expected(start)}, got {position}.")
        return stream

    def _source_state(self) -> Any:
        """Return the state of the source, or None if it has none."""
        return None if self._resumable is None else self._resumable.state_dict()

    def _expected(self, start: SourceCursor) -> str:
        """Describe, for an error message, how many batches the source must have."""
        if self._num_batches is not None:
            return f"as many batches in each epoch as its `len()` ({self._num_batches})"
        return f"at least {start.position + 1} batches in epoch {start.epoch}"


def as_iterator(source: Iterator | Source, *, name: str = "iterator") -> Iterator:
    """Return a lockstep `Iterator` unchanged, and wrap any other iterable of batches of tensors.

    Args:
        source: An `Iterator`, an iterable, or a function that returns one; see `IterableBatches`.
        name: The name of the argument in error messages.

    Raises:
        TypeError: If it is none of these, or cannot contain batches.
        ValueError: If it is empty.

    >>> as_iterator([torch.zeros(2, 1)]).peek().shape
    torch.Size([2, 1])
    """
    if isinstance(source, Iterator):
        return source
    # The constructor checks again, but under the name of its own argument.
    check_source(source, name)
    if isinstance(source, IterableDataset):
        warn(
            f"`{name}` is a {type(source).__name__}, whose items are taken for batches, although an IterableDataset of "
            "torch yields samples. Pass DataLoader(dataset, batch_size); or IterableBatches(dataset) if its items are "
            "batches."
        )
    return IterableBatches(source)


def _samples(batch: object) -> Samples:
    """Return a list of samples as `Samples`, which can be split into shards and stacked by the converter."""
    if isinstance(batch, Samples):
        return batch
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes | torch.Tensor):
        raise TypeError(f"`source` must yield lists of samples, got a {type(batch).__name__}.")
    return Samples(batch, range(len(batch)), batch)
