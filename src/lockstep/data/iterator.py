"""What an updater needs from a source of batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from lockstep.errors import StateError

Wanted: TypeAlias = "Callable[[int, int], Sequence[range]]"
"""Called as ``wanted(ahead, size)``; returns the places in a batch of the samples that will be read.

The batch comes after ``ahead`` others, counted from one with which an update begins, and holds ``size``
samples.
"""


class Iterator(ABC):
    """A source of batches that is looked at first and moved past afterwards.

    An updater peeks at the next batch, computes with it, and advances only when the update is
    applied or the batch is given up. So an exception on the way leaves the iterator where it was.

    Progress is counted in epochs: ``epoch_detail`` is the number of epochs passed, fractions
    included, and ``previous_epoch_detail`` what it was before the last advance, however many
    batches that passed at once. A trigger finds what lies between the two.
    """

    @abstractmethod
    def peek(self, ahead: int = 0) -> Sequence[Any]:
        """Give the batch that comes after ``ahead`` others, without moving.

        Raises:
            StopIteration: The batches end before it.
        """

    @abstractmethod
    def advance(self, num_batches: int = 1) -> None:
        """Move past the next batches.

        Raises:
            StopIteration: Fewer batches are left; nothing has moved.
        """

    def __next__(self) -> Sequence[Any]:
        batch = self.peek()
        self.advance()
        return batch

    def __iter__(self) -> Iterator:
        return self

    def read_only(self, wanted: Wanted) -> None:  # noqa: B027 - optional; most load what is read when it is read
        """Take note of which samples of a batch this process will read, so as to load no others ahead.

        Batches stay what they are, and samples that are read all the same are loaded then. By default
        nothing is done.

        Args:
            wanted: Says which.
        """

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The number of whole epochs passed."""

    @property
    @abstractmethod
    def epoch_detail(self) -> float:
        """The number of epochs passed, fractions included."""

    @property
    @abstractmethod
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last advance; None before the first."""

    @property
    @abstractmethod
    def is_new_epoch(self) -> bool:
        """Whether the last advance reached the end of an epoch."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to the first batch of epoch 0."""

    @abstractmethod
    def finalize(self) -> None:
        """Let go of what costs something to hold, such as worker processes."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Say where the iterator stands, in numbers and tensors."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go where a saved iterator stood; all of it or, after an error, nothing.

        Raises:
            StateError: A key is unknown or missing, or a value does not fit this iterator.
        """


class RecountingIterator(Iterator):
    """An iterator that remembers what its last advance passed."""

    _previous_epoch_detail: float | None = None
    _is_new_epoch = False

    def __next__(self) -> Any:
        """Return the next batch and move past it.

        At the end ``previous_epoch_detail`` catches up with ``epoch_detail``, as in Chainer's iterators:
        this call passed nothing, so no trigger finds anything between the two.
        """
        try:
            batch = self.peek()
        except StopIteration:
            self._previous_epoch_detail = self.epoch_detail
            raise
        self.advance()
        return batch

    @property
    def previous_epoch_detail(self) -> float | None:
        """``epoch_detail`` before the last advance; None before the first."""
        return self._previous_epoch_detail

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last advance reached the end of an epoch."""
        return self._is_new_epoch

    def _last_advance(self) -> dict[str, Any]:
        """Return what is saved of the last advance."""
        return {"previous_epoch_detail": self._previous_epoch_detail, "is_new_epoch": self._is_new_epoch}

    def _check_last_advance(self, state: Mapping[str, Any]) -> None:
        """Refuse what cannot have been saved of an advance.

        Raises:
            StateError: A value is of another type.
        """
        if not isinstance(state["previous_epoch_detail"], float | None):
            rule = "must be a float or None"
            raise StateError(f"`previous_epoch_detail` {rule}, got {state['previous_epoch_detail']!r}.")
        if not isinstance(state["is_new_epoch"], bool):
            raise StateError(f"`is_new_epoch` must be a bool, got {state['is_new_epoch']!r}.")

    def _load_last_advance(self, state: Mapping[str, Any]) -> None:
        """Take over what was saved of the last advance, after `_check_last_advance`."""
        self._previous_epoch_detail = state["previous_epoch_detail"]
        self._is_new_epoch = state["is_new_epoch"]
