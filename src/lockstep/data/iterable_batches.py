"""Give batches that somebody else makes the bookkeeping of an `Iterator`."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, final, get_args

import torch

from lockstep.data.iterator import Iterator, RecountingIterator
from lockstep.data.samples import Samples
from lockstep.data.source import BatchSource, Place, Source, check_source
from lockstep.errors import OrderError, StateError
from lockstep.state import check_keys

BatchesOf: TypeAlias = Literal["tensors", "samples"]


@final
class IterableBatches(RecountingIterator):
    """Batches of any iterable: a DataLoader, a list, a generator, a function that makes one.

    What can be iterated over again is, epoch after epoch. A generator, or another iterator, has one
    epoch and is then at its end. Progress is counted in batches: ``epoch_detail`` has fractions where the
    iterable has a ``len()``, which must then be right, and counts whole epochs where it has none.

    An iterable without a length is asked for one batch ahead of its use, to know the end of an epoch
    when it comes. A length that is no more than a guess is hidden by a function: ``lambda: loader``.

    The state is the place: the epoch, and the number of batches passed in it. An iterable with
    ``state_dict`` and ``load_state_dict`` (torchdata's ``StatefulDataLoader``) keeps its own, asked for
    after each batch. A list begins anywhere. Anything else is begun anew, and the batches before the
    place are loaded once more and dropped, under a `ReplayWarning`; that this is the same place is up to
    it: a shuffling DataLoader has another order each time. `BatchIterator` needs none of this.

    Of several processes every one pulls whole batches, and cuts its own shards out of them.

    Args:
        source: The iterable, or a function without arguments that returns one for each epoch.
        batches_of: ``"tensors"`` where a batch is ready: a tensor, or a tuple, list or dict of such, with
            the samples along the first dimension; ``"samples"`` where it is a list of samples, to go
            through the converter.
        repeat: Whether epoch follows epoch without end; by default, wherever `source` allows it.

    Raises:
        TypeError: The source is nothing to iterate over, or holds no batches.
        ValueError: It says that it is empty, or is to be repeated and cannot be, or `batches_of` is unknown.

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
            rule = "must be no lockstep Iterator, which needs no adapter"
            raise TypeError(f"`source` {rule}, got a {type(source).__name__}.")
        if batches_of not in get_args(BatchesOf):
            raise ValueError(f"`batches_of` must be 'tensors' or 'samples', got {batches_of!r}.")
        self._source = BatchSource(source)
        if repeat and self._source.one_shot:
            rule = "must be None or False where `source` can be iterated over but once"
            raise ValueError(f"`repeat` {rule}, got True. Give a function that makes the iterator.")
        self.source = source
        self.batches_of = batches_of
        self.repeat = not self._source.one_shot if repeat is None else repeat
        # Batches that somebody looked at and has not moved past, each with the place behind it.
        self._ahead: deque[tuple[Any, Place]] = deque()
        self._place = Place()

    def peek(self, ahead: int = 0) -> Any:
        """Give the batch that comes after ``ahead`` others, without moving.

        Raises:
            StopIteration: The batches end before it.
            TypeError: It should be a list of samples and is none.
            ValueError: An epoch is empty or not as long as the ``len()`` of the source.
            OrderError: The source raised before, and can be iterated over but once.
            Exception: What the source raised; nothing has moved.
        """
        if ahead < 0:
            raise ValueError(f"`ahead` must be at least 0, got {ahead}.")
        while len(self._ahead) <= ahead:
            start = self._ahead[-1][1] if self._ahead else self._place
            if start.epoch > 0 and not self.repeat:
                raise StopIteration
            self._ahead.append(self._source.pull())
        batch, _ = self._ahead[ahead]
        return _samples(batch) if self.batches_of == "samples" else batch

    def advance(self, num_batches: int = 1) -> None:
        """Move past the next batches.

        Raises:
            StopIteration: Fewer batches are left; nothing has moved.
        """
        if num_batches < 1:
            raise ValueError(f"`num_batches` must be at least 1, got {num_batches}.")
        self.peek(num_batches - 1)
        start, previous = self._place, self.epoch_detail
        for _ in range(num_batches):
            _, self._place = self._ahead.popleft()
        self._previous_epoch_detail = previous
        self._is_new_epoch = self._place.epoch > start.epoch

    @property
    def epoch(self) -> int:
        """The number of whole epochs passed."""
        return self._place.epoch

    @property
    def epoch_detail(self) -> float:
        """The number of epochs passed, with the share of this one's batches where their number is known."""
        return self._place.epoch + self._place.position / (self._source.num_batches or float("inf"))

    def reset(self) -> None:
        """Go back to the first batch of epoch 0, by iterating over the source anew.

        Raises:
            OrderError: The source can be iterated over but once, and has been left behind its first batch.
        """
        if not self._can_go_to(Place()):
            remedy = "Give a function that makes the iterator."
            raise OrderError(f"`reset` must not follow a batch where `source` is an iterator. {remedy}")
        self._go_to(Place())
        self._previous_epoch_detail, self._is_new_epoch = None, False

    def finalize(self) -> None:
        """Let go of the iteration under way, where the source can resume it.

        Where it cannot, the iteration is kept: begun anew, it might give other batches. At the end of an
        epoch there is none.
        """
        if self._place.state is not None:
            self._go_to(self._place)

    def state_dict(self) -> dict[str, Any]:
        """Say where the iterator stands, with the source's own state where it has one."""
        return {
            "epoch": self._place.epoch,
            "position": self._place.position,
            **self._last_advance(),
            "source": self._place.state,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go where a saved iterator stood; the source is asked when the next batch is.

        Raises:
            StateError: A key is unknown or missing, or a value does not fit this iterator, or its source
                can be iterated over but once and has begun; nothing has been changed.
        """
        check_keys(state_dict, self.state_dict(), of="IterableBatches")
        place = self._saved_place(state_dict)
        if not self._can_go_to(place):
            remedy = "Load the state right after making the iterator."
            raise StateError(f"`source` is an iterator that has begun, and cannot go elsewhere. {remedy}")
        self._go_to(place)
        self._load_last_advance(state_dict)

    def _saved_place(self, state: Mapping[str, Any]) -> Place:
        """Read a saved place, and refuse what does not fit."""
        for name in ("epoch", "position"):
            if type(state[name]) is not int or state[name] < 0:
                raise StateError(f"`{name}` must be an integer of at least 0, got {state[name]!r}.")
        self._check_last_advance(state)
        num_batches = self._source.num_batches
        if num_batches is not None and state["position"] >= num_batches:
            rule = f"must lie in 0..{num_batches - 1}, for `source` holds {num_batches} batches"
            raise StateError(f"`position` {rule}, got {state['position']}.")
        if state["source"] is not None and not self._source.resumable:
            raise StateError("`source` must have `load_state_dict`, for a state of its own was saved.")
        return Place(state["epoch"], state["position"], state["source"])

    def _can_go_to(self, place: Place) -> bool:
        """Tell whether the source can be brought to a place."""
        source = self._source
        return not source.one_shot or not source.begun or place.state is not None or place.same_as(self._place)

    def _go_to(self, place: Place) -> None:
        """Stand at a place; a source that cannot begin again and is there already stays as it is."""
        stays = self._source.one_shot and self._source.begun and place.state is None
        if not stays:
            self._ahead.clear()
            self._source.go_to(place)
        self._place = place


def as_iterator(source: Iterator | Source, *, name: str = "iterator") -> Iterator:
    """Take a lockstep `Iterator` as it is, and adapt any other iterable of batches of tensors.

    Args:
        source: An `Iterator`, an iterable, or a function that returns one; see `IterableBatches`.
        name: What errors call it.

    Raises:
        TypeError: It is none of these, or surely holds no batches.
        ValueError: It says that it is empty.

    >>> as_iterator([torch.zeros(2, 1)]).peek().shape
    torch.Size([2, 1])
    """
    if isinstance(source, Iterator):
        return source
    check_source(source, name)
    return IterableBatches(source)


def _samples(batch: object) -> Samples:
    """Make a list of samples something to cut into shards that go through the converter."""
    if isinstance(batch, Samples):
        return batch
    if not isinstance(batch, Sequence) or isinstance(batch, str | bytes | torch.Tensor):
        raise TypeError(f"`source` must give lists of samples, got a {type(batch).__name__}.")
    return Samples(batch, range(len(batch)), batch)
