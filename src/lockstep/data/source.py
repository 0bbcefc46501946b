"""Pull batches out of whatever somebody made to iterate over, epoch after epoch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator as PythonIterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol, TypeAlias, final, runtime_checkable

import torch
from torch import nn

from lockstep.data.split_by_rank import refuse_split_by_rank
from lockstep.errors import OrderError, ReplayWarning

Source: TypeAlias = "Iterable[Any] | Callable[[], Iterable[Any]]"

_END: Final = object()


@runtime_checkable
class Resumable(Protocol):
    """A source that says where it stands and goes on from there, as ``StatefulDataLoader`` of torchdata does.

    The next iteration over it, after it has loaded a state, begins there; after a state at the end of
    an epoch, with the next epoch.
    """

    def state_dict(self) -> dict[str, Any]:
        """Say where the iteration under way stands."""

    def load_state_dict(self, state_dict: Any, /) -> object:
        """Let the next iteration go on from there."""


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A place between two batches.

    Args:
        epoch: How many epochs have ended before it.
        position: How many batches of this epoch lie before it.
        state: What the source said of it; None where it cannot, or had not begun.
    """

    epoch: int = 0
    position: int = 0
    state: Any = None

    def same_as(self, other: Place) -> bool:
        """Tell whether two are one place, whatever the source said."""
        return (self.epoch, self.position) == (other.epoch, other.position)


@final
class BatchSource:
    """Gives one batch after another, each with the place behind it.

    To know the last batch of an epoch it asks for one more: always where the source has no length; else
    only behind the last batch that the length promises.

    Args:
        source: Something to iterate over, or a function that returns such.
        name: What errors call it.

    Raises:
        TypeError: It is neither, or surely holds no batches.
        ValueError: It says that it is empty.
    """

    def __init__(self, source: Source, name: str = "source") -> None:
        check_source(source, name)
        self._source: Any = source
        # Asked once: the answer takes Python as long as a small update's optimizer step.
        self._resumable = _as_resumable(source)
        self._name = name
        self.one_shot = isinstance(source, PythonIterator)
        """Whether it can be iterated over but once, and so has one epoch."""
        self.num_batches = _length(source)
        """How many batches an epoch has, where the source says so."""
        if self.num_batches == 0:
            raise ValueError(f"`{name}` must hold at least one batch, got none.")
        self._place = Place()
        self._stream: PythonIterator[Any] | None = None
        self._held: list[Any] = []
        self._spent = False
        self.begun = False
        """Whether anything was asked of it."""

    @property
    def resumable(self) -> bool:
        """Whether the source can say where it stands."""
        return self._resumable is not None

    def go_to(self, place: Place) -> None:
        """Give the batch behind this place next; the iteration under way is dropped."""
        self._stream = None
        self._held.clear()
        self._place = place

    def pull(self) -> tuple[Any, Place]:
        """Give the next batch, and the place behind it.

        Raises:
            ValueError: The source holds fewer or more batches than it promised.
            OrderError: It raised before, and can be iterated over but once.
            Exception: What the source raised; the next call begins again at this batch.
        """
        if self._spent:
            remedy = "Make a new one, or give a function that does."
            raise OrderError(f"`{self._name}` raised, and an iterator cannot be begun again. {remedy}")
        try:
            batch, place = self._pull(self._place)
        except BaseException:
            self._spent = self.one_shot and self.begun and not self.resumable
            self.go_to(self._place)
            raise
        self._place = place
        return batch, place

    def _pull(self, start: Place) -> tuple[Any, Place]:
        stream = self._begin(start) if self._stream is None else self._stream
        batch = self._held.pop() if self._held else next(stream, _END)
        if batch is _END:
            raise ValueError(f"`{self._name}` must hold {self._promise(start)}, got {start.position}.")
        position = start.position + 1
        place = Place(start.epoch, position, self._state())
        if self.num_batches is not None and position < self.num_batches:
            return batch, place
        following = next(stream, _END)
        if following is _END:
            self._stream = None
            return batch, Place(start.epoch + 1, 0, self._state())
        if self.num_batches is not None:
            raise ValueError(f"`{self._name}` must hold {self._promise(start)}, got more.")
        self._held.append(following)
        return batch, place

    def _begin(self, start: Place) -> PythonIterator[Any]:
        """Begin an iteration at a place."""
        source = self._source
        self.begun = True
        if start.state is not None and self._resumable is not None:
            self._resumable.load_state_dict(start.state)
            self._stream = _iterator(source, self._name)
        elif isinstance(source, Sequence):
            self._stream = islice(source, start.position, None)
        else:
            self._stream = self._skip(_iterator(source, self._name), start)
        return self._stream

    def _skip(self, stream: PythonIterator[Any], start: Place) -> PythonIterator[Any]:
        """Load and drop the batches before a place."""
        if start.position:
            warnings.warn(
                f"`{self._name}` cannot begin in the middle: {start.position} batches of epoch {start.epoch} "
                "are loaded once more and dropped. What follows is right if it gives the same batches again.",
                ReplayWarning,
                stacklevel=2,
            )
        for position in range(start.position):
            if next(stream, _END) is _END:
                raise ValueError(f"`{self._name}` must hold {self._promise(start)}, got {position}.")
        return stream

    def _state(self) -> Any:
        return None if self._resumable is None else self._resumable.state_dict()

    def _promise(self, start: Place) -> str:
        if self.num_batches is not None:
            return f"as many batches in each epoch as its `len()` says ({self.num_batches})"
        return f"at least {start.position + 1} batches in epoch {start.epoch}"


def check_source(source: object, name: str) -> None:
    """Refuse what surely is no source of batches, or of other batches on each rank.

    Raises:
        TypeError: It cannot be iterated over, or what it would give are no batches.
        ValueError: Its sampler shares the samples among processes.
    """
    no_batches = isinstance(source, torch.Tensor | nn.Module | Mapping | str | bytes | type)
    if no_batches or not (isinstance(source, Iterable) or callable(source)):
        rule = "must be a lockstep Iterator, an iterable of batches or a function that returns one"
        remedy = "`BatchIterator` makes batches of a dataset."
        raise TypeError(f"`{name}` {rule}, got a {type(source).__name__}. {remedy}")
    refuse_split_by_rank(source, name)


def _as_resumable(source: object) -> Resumable | None:
    return source if isinstance(source, Resumable) else None


def _iterator(source: Any, name: str) -> PythonIterator[Any]:
    if isinstance(source, Iterable):
        return iter(source)
    made = source()
    refuse_split_by_rank(made, name)  # a function's DataLoader is not seen before
    return iter(made)


def _length(source: object) -> int | None:
    if not isinstance(source, Sized):
        return None
    try:
        return len(source)
    except TypeError:
        return None  # so says a DataLoader whose dataset has no length
