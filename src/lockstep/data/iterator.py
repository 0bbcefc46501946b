"""The interface of the batch iterators that an updater uses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from lockstep.errors import StateError

SampleFilter: TypeAlias = "Callable[[int, int], Sequence[range]]"
"""A function ``wanted(ahead, size)`` that returns the positions, in a batch, of the samples that will be read.

The batch comes after ``ahead`` others, counted from a batch with which an update starts, and has ``size`` samples.
"""


class Iterator(ABC):
    """A source of batches that are looked at first and passed afterwards.

    An updater peeks at the next batch, computes with it, and advances only when the update has been applied or
    the batch has been given up. An exception in between therefore leaves the iterator where it was.

    Progress is counted in epochs: ``epoch_detail`` is the number of epochs passed, including fractions, and
    ``previous_epoch_detail`` is its value before the last advance, however many batches that passed. Triggers
    compare the two.
    """

    # `advance` sets them; an iterator of your own may override the properties instead.
    _previous_epoch_detail: float | None = None
    _is_new_epoch = False

    @abstractmethod
    def peek(self, ahead: int = 0) -> Sequence[Any]:
        """Return the batch that comes after ``ahead`` others, without advancing.

        Args:
            ahead: The number of batches to skip, at least 0.

        Raises:
            StopIteration: If there are not that many batches left.
        """

    def peek_early(self, ahead: int = 0, *, always: bool = False) -> Any | None:  # noqa: ARG002 - for those that override it
        """Return a later batch before the update that uses it begins, if that changes no result.

        An updater copies this batch to accelerators while they compute another one. Errors are not raised here, but by
        `peek` when the batch is used. Returns None by default, so that the iterators you write are not read early.

        Args:
            ahead: The number of batches to skip, at least 0.
            always: Whether the batches depend on nothing that happens between two updates, so that any can be read.

        Returns:
            The object that `peek` will return; None if the batch must not be read early, or there is none.
        """
        return None

    @abstractmethod
    def advance(self, num_batches: int = 1) -> None:
        """Advance past the next batches.

        Args:
            num_batches: The number of batches to pass, at least 1.

        Raises:
            StopIteration: If fewer batches are left; the position is unchanged.
        """

    def __next__(self) -> Any:
        """Return the next batch and advance past it.

        At the end, ``previous_epoch_detail`` becomes ``epoch_detail``, as in Chainer's iterators: this call has
        passed nothing, so that no trigger may fire for it.
        """
        try:
            batch = self.peek()
        except StopIteration:
            self._previous_epoch_detail = self.epoch_detail
            raise
        self.advance()
        return batch

    def __iter__(self) -> Iterator:
        return self

    def load_only(self, wanted: SampleFilter) -> None:  # noqa: B027 - optional; most load samples when they are read
        """Announce which samples of each batch this process will read, so that no others are loaded in advance.

        The batches do not change, and a sample that is read nevertheless is loaded then. Does nothing by default.

        Args:
            wanted: A function that returns the positions of the samples to read, see `SampleFilter`.
        """

    @property
    @abstractmethod
    def epoch(self) -> int:
        """The number of completed epochs."""

    @property
    @abstractmethod
    def epoch_detail(self) -> float:
        """The number of epochs passed, including the fraction of the current one."""

    @property
    def samples_passed(self) -> int | None:
        """The number of samples passed over all epochs, including dropped ones; None if samples are not counted."""
        return None

    @property
    def previous_epoch_detail(self) -> float | None:
        """The value of ``epoch_detail`` before the last advance, or None before the first."""
        return self._previous_epoch_detail

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last advance reached the end of an epoch."""
        return self._is_new_epoch

    @abstractmethod
    def reset(self) -> None:
        """Return to the first batch of epoch 0."""

    @abstractmethod
    def finalize(self) -> None:
        """Release resources such as worker processes."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iterator, as numbers and tensors."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the position of a saved iterator; after an error, nothing has changed.

        Raises:
            StateError: If a key is unknown or missing, or a value does not fit this iterator.
        """

    def _last_advance(self) -> dict[str, Any]:
        """Return the part of the state that describes the last advance."""
        return {"previous_epoch_detail": self._previous_epoch_detail, "is_new_epoch": self._is_new_epoch}

    def _check_last_advance(self, state: Mapping[str, Any]) -> None:
        """Check the part of a state that describes the last advance.

        Raises:
            StateError: If a value has another type.
        """
        if not isinstance(state["previous_epoch_detail"], float | None):
            rule = "must be a float or None"
            raise StateError(f"`previous_epoch_detail` {rule}, got {state['previous_epoch_detail']!r}.")
        if not isinstance(state["is_new_epoch"], bool):
            raise StateError(f"`is_new_epoch` must be a bool, got {state['is_new_epoch']!r}.")

    def _load_last_advance(self, state: Mapping[str, Any]) -> None:
        """Load the part of a state that describes the last advance, after `_check_last_advance`."""
        self._previous_epoch_detail = state["previous_epoch_detail"]
        self._is_new_epoch = state["is_new_epoch"]
