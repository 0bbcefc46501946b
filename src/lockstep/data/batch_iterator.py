"""Batches of a dataset, epoch after epoch, from a state of a few numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeAlias, final, get_args

import torch
from torch.utils.data import IterableDataset

from lockstep.data.cursor import Cursor, LastBatch, Order, hashed, shuffled, take
from lockstep.data.iterator import RecountingIterator, Wanted
from lockstep.data.prefetch import load_ahead
from lockstep.data.sample_streams import SampleStreams, draws_nothing
from lockstep.data.samples import MapDataset, Samples
from lockstep.errors import StateError
from lockstep.integers import check_integer

OrderSampler: TypeAlias = "Callable[[list[int], int], Sequence[int]]"


@final
class BatchIterator(RecountingIterator):
    """Batches of a dataset, in an order that follows from the seed alone.

    A batch is a `Samples`: its samples are loaded when somebody reads them, and a slice of it loads
    only its own.

    Args:
        dataset: Anything with ``len()`` and ``[index]``; at least one sample.
        batch_size: Samples per batch, at least 1.
        shuffle: Whether every epoch has a random order of its own; else it is the dataset's.
        repeat: Whether epoch follows epoch without end. If not, there is one epoch, whose last batch
            is as short as it comes, unless dropped; then the iterator is at its end, until `reset`.
        last_batch: How an epoch ends whose number of samples is not a multiple of `batch_size`: ``"short"``
            (the default, as in a `torch.utils.data.DataLoader`) makes a smaller last batch, ``"drop"``
            leaves its samples out, and ``"wrap"`` fills it up from the next epoch (or the next few).
        seed: Where the random orders come from; any integer.
        order_sampler: Called as ``order_sampler(order, position)`` for the order of the first epoch,
            with the dataset's own and 0, and whenever an epoch ends, with that epoch's order and the
            position in it where the batch that ends it began. Returns as many indices as the dataset
            has samples. Peeking and workers ask for an order before its epoch begins, and loading or
            a reset forgets what was asked ahead, so it had better be a function of its arguments.
        num_workers: Processes that load samples ahead, two batches each; 0 loads where and when
            they are read. Workers load whole batches, or what `read_only` says of each.
        sample_streams: Whether each sample is loaded in a random stream of its own, keyed by (seed, epoch,
            sample), as `Samples` and `SampleStreams` describe. Costs some 15 µs a sample, and samples are
            then loaded one by one, without ``__getitems__``: False is for a dataset that draws no random
            numbers. Without effect where the dataset is a `TensorDataset`, a tensor, list, tuple, text or
            range, or a `Subset` of one.

    Raises:
        TypeError: The dataset lacks ``len()`` or ``[index]``, or a count is no integer.
        ValueError: The dataset is empty, an argument is out of range, two exclude each other, or
            ``order_sampler`` returned no order of the dataset's samples.

    Determinism: which samples make which batch depends on the seed, the dataset's length and the
    arguments, never on ``num_workers``, on what was peeked at, or on the default generator, which is
    left alone. With ``sample_streams`` this includes what the dataset draws from torch's default
    generator, Python's `random` and ``numpy.random``. Generators of its own are outside of this.

    References: the bookkeeping is that of ``SerialIterator`` in Chainer (Tokui et al., "Chainer: A
    Deep Learning Framework for Accelerating the Research Cycle", 2019, arXiv:1908.00213).

    >>> batches = BatchIterator("abcde", batch_size=2, last_batch="wrap")
    >>> [list(next(batches)) for _ in range(3)], batches.epoch, batches.epoch_detail
    ([['a', 'b'], ['c', 'd'], ['e', 'a']], 1, 1.2)
    >>> list(batches.peek()), list(batches.peek(1)), batches.epoch_detail
    (['b', 'c'], ['d', 'e'], 1.2)
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        *,
        shuffle: bool = False,
        repeat: bool = True,
        last_batch: LastBatch = "short",
        seed: int = 0,
        order_sampler: OrderSampler | None = None,
        num_workers: int = 0,
        sample_streams: bool = True,
    ) -> None:
        _check_dataset(dataset)
        check_integer("batch_size", batch_size, minimum=1)
        check_integer("seed", seed)
        check_integer("num_workers", num_workers, minimum=0)
        if last_batch not in get_args(LastBatch):
            raise ValueError(f"`last_batch` must be 'wrap', 'short' or 'drop', got {last_batch!r}.")
        if last_batch == "drop" and batch_size > len(dataset):
            rule = f"must be at most the number of samples ({len(dataset)}) where the last batch is dropped"
            raise ValueError(f"`batch_size` {rule}, got {batch_size}.")
        if shuffle and order_sampler is not None:
            raise ValueError("`shuffle` must be False where `order_sampler` is given, got True.")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.repeat = repeat
        self.last_batch = last_batch
        self.seed = seed
        self.order_sampler = order_sampler
        self.num_workers = num_workers
        self.sample_streams = sample_streams
        self._in_streams = sample_streams and not draws_nothing(dataset)
        self._num_samples = len(dataset)
        # The plan: batches that somebody asked for and has not moved past, as their indices and the
        # place behind each. The first of them are loaded, or as good as that.
        self._plan: deque[tuple[Sequence[int], Cursor]] = deque()
        self._ahead: deque[Samples] = deque()
        self._supply: Generator[Samples] | None = None
        self._wanted: Wanted | None = None
        self._num_advanced = 0
        self._cursor = Cursor(0, 0, self._first_order())

    def reset(self) -> None:
        """Go back to the first batch of epoch 0, and ask the order sampler for its order again."""
        self._go_to(Cursor(0, 0, self._first_order()))
        self._previous_epoch_detail, self._is_new_epoch = None, False

    def peek(self, ahead: int = 0) -> Samples:
        """Give the batch that comes after ``ahead`` others, without moving.

        Raises:
            StopIteration: The batches end before it.
            Exception: What the order sampler or, in a worker, the dataset raised; nothing has moved.
        """
        if type(ahead) is not int or ahead < 0:
            check_integer("ahead", ahead, minimum=0)
        while len(self._ahead) <= ahead:
            if self._supply is None:
                self._supply = self._samples_from(self._num_advanced + len(self._ahead))
            try:
                self._ahead.append(next(self._supply))
            except StopIteration:
                raise
            except BaseException:
                # A worker's queue has moved on without this batch, so the next call starts anew.
                self.finalize()
                raise
        return self._ahead[ahead]

    def advance(self, num_batches: int = 1) -> None:
        """Move past the next batches.

        Raises:
            StopIteration: Fewer batches are left; nothing has moved.
        """
        if type(num_batches) is not int or num_batches < 1:
            check_integer("num_batches", num_batches, minimum=1)
        if len(self._ahead) < num_batches:
            self.peek(num_batches - 1)
        start = self._cursor
        for _ in range(num_batches):
            self._ahead.popleft()
            _, self._cursor = self._plan.popleft()
        self._num_advanced += num_batches
        self._previous_epoch_detail = start.epoch + start.position / len(start.order)  # its epoch_detail
        self._is_new_epoch = self._cursor.epoch > start.epoch

    def read_only(self, wanted: Wanted) -> None:
        """Let workers load only the samples of each batch that this process will read; see `Iterator`."""
        self.finalize()
        self._wanted = wanted

    @property
    def current_position(self) -> int:
        """The number of samples of the current epoch that lie behind."""
        return self._cursor.position

    @property
    def epoch(self) -> int:
        """The number of whole epochs passed."""
        return self._cursor.epoch

    @property
    def epoch_detail(self) -> float:
        """The number of epochs passed, plus the share of the dataset that lies behind in this one."""
        return self._cursor.epoch_detail

    def finalize(self) -> None:
        """Stop the workers and forget what they loaded; a further batch would start them again."""
        # In this order, an interrupt in between leaves a supply that goes on where the batches end.
        supply, self._supply = self._supply, None
        self._ahead.clear()
        if supply is not None:
            supply.close()

    def state_dict(self) -> dict[str, Any]:
        """Say where the iterator stands: the seed, the place, the last advance.

        With an order sampler the order of this epoch belongs to it, for nobody can ask for it again.
        """
        state: dict[str, Any] = {
            "seed": self.seed,
            "epoch": self._cursor.epoch,
            "position": self._cursor.position,
            **self._last_advance(),
        }
        if self.order_sampler is not None:
            state["order"] = torch.as_tensor(self._cursor.order).clone()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go where a saved iterator stood, and take over its seed.

        The dataset must be as long as it was. The size of batches may be another.

        Raises:
            StateError: A key is unknown or missing, or a value does not fit this iterator; nothing
                has been changed.
        """
        _check_keys(state_dict, expected=self.state_dict())
        try:
            cursor = self._saved_cursor(state_dict)
        except (TypeError, ValueError, RuntimeError) as error:
            raise StateError(f"Cannot load the state of a BatchIterator: {error}") from error
        self.seed = state_dict["seed"]
        self._go_to(cursor)
        self._load_last_advance(state_dict)

    def _saved_cursor(self, state: Mapping[str, Any]) -> Cursor:
        """Read a saved place, and refuse what does not fit this iterator."""
        seed, epoch, position = state["seed"], state["epoch"], state["position"]
        check_integer("seed", seed)
        check_integer("epoch", epoch, minimum=0)
        check_integer("position", position, minimum=0)
        last = self._num_samples - (self.batch_size if self.last_batch == "drop" else 1)
        if position > last:
            rule = f"must lie in 0..{last}, for there are {self._num_samples} samples and a batch must follow"
            raise ValueError(f"`position` {rule}, got {position}.")
        self._check_last_advance(state)
        if self.order_sampler is not None:
            return Cursor(epoch, position, self._checked_order(state["order"], "order"))
        return Cursor(epoch, position, self._own_order(epoch, seed))

    def _go_to(self, cursor: Cursor) -> None:
        """Stand at a place, with nothing planned."""
        self.finalize()
        self._plan.clear()
        self._cursor = cursor

    def _samples_from(self, number: int) -> Generator[Samples]:
        """Supply batches from the number-th on, counted like those passed so far."""
        batches = self._unloaded_from(number)
        if self.num_workers == 0:
            return batches
        return load_ahead(
            self._with_places(batches, number),
            self.dataset,
            in_streams=self._in_streams,
            num_workers=self.num_workers,
            seed=hashed(self.seed, self._cursor.epoch, self._cursor.position),
        )

    def _with_places(self, batches: Iterable[Samples], number: int) -> Generator[tuple[Samples, Sequence[int]]]:
        """Add to each batch, the first of which is the number-th, the places of the samples to load."""
        ahead = number - self._num_advanced
        for batch in batches:
            size = len(batch)
            runs = [range(size)] if self._wanted is None else self._wanted(ahead, size)
            yield batch, sorted(place for run in runs for place in run)
            ahead += 1

    def _unloaded_from(self, number: int) -> Generator[Samples]:
        """Read the plan from the number-th batch on, and make it longer where it ends."""
        for batch in count(number):
            place = batch - self._num_advanced
            if place == len(self._plan) and not self._plan_one_more():
                return
            indices, _ = self._plan[place]
            streams = self._streams_of(place) if self._in_streams else None
            yield Samples(self.dataset, indices, streams=streams)

    def _streams_of(self, place: int) -> SampleStreams:
        """Give the random streams of the samples of one planned batch."""
        start = self._plan[place - 1][1] if place else self._cursor
        first = start.epoch * self._num_samples + start.position
        ordinals = range(first, first + len(self._plan[place][0]))
        return SampleStreams(self.seed, self._num_samples, ordinals)

    def _plan_one_more(self) -> bool:
        """Plan one batch more, or say that there is none."""
        _, start = self._plan[-1] if self._plan else ((), self._cursor)
        if start.epoch > 0 and not self.repeat:
            return False
        # There is nothing to fill the last batch up from.
        last_batch = self.last_batch if self.repeat or self.last_batch == "drop" else "short"
        self._plan.append(take(start, self.batch_size, last_batch=last_batch, next_order=self._next_order))
        return True

    def _first_order(self) -> Order:
        """Make the order of epoch 0."""
        if self.order_sampler is None:
            return self._own_order(0, self.seed)
        return self._asked_order(list(range(self._num_samples)), 0, self.order_sampler)

    def _next_order(self, cursor: Cursor) -> Order:
        """Make the order that follows a cursor's."""
        if self.order_sampler is None:
            return self._own_order(cursor.epoch + 1, self.seed)
        return self._asked_order(torch.as_tensor(cursor.order).tolist(), cursor.position, self.order_sampler)

    def _own_order(self, epoch: int, seed: int) -> Order:
        """Make the order of an epoch without asking anybody."""
        if self.shuffle:
            return shuffled(self._num_samples, seed=seed, epoch=epoch)
        return range(self._num_samples)

    def _asked_order(self, order: list[int], position: int, order_sampler: OrderSampler) -> torch.Tensor:
        """Ask the order sampler."""
        return self._checked_order(order_sampler(order, position), "order_sampler(order, position)")

    def _checked_order(self, order: Sequence[int] | torch.Tensor, name: str) -> torch.Tensor:
        """Refuse what is no order of the dataset's samples; else make a tensor of its own of it."""
        indices = torch.tensor(order) if not isinstance(order, torch.Tensor) else order
        if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
            raise TypeError(f"`{name}` must hold integers, got {indices.dtype}.")
        if indices.shape != (self._num_samples,):
            rule = f"must hold one index for each of the {self._num_samples} samples"
            raise ValueError(f"`{name}` {rule}, got shape {tuple(indices.shape)}.")
        least, most = indices.aminmax()
        if least < 0 or most >= self._num_samples:
            rule = f"must hold indices in 0..{self._num_samples - 1}"
            raise ValueError(f"`{name}` {rule}, got {int(least)}..{int(most)}.")
        return indices.to("cpu", torch.int64, copy=True)


def _check_dataset(dataset: object) -> None:
    """Refuse what has no samples by index."""
    if not isinstance(dataset, MapDataset) or isinstance(dataset, IterableDataset):
        rule = "must have `len()` and `[index]`"
        raise TypeError(f"`dataset` {rule}, got a {type(dataset).__name__}.")
    if len(dataset) == 0:
        raise ValueError("`dataset` must hold at least one sample, got none.")


def _check_keys(state: Mapping[str, Any], *, expected: Mapping[str, Any]) -> None:
    """Refuse a state with other keys."""
    unknown = sorted(set(state) - set(expected))
    missing = sorted(set(expected) - set(state))
    if unknown or missing:
        rule = f"must have the keys {list(expected)}"
        raise StateError(f"`state_dict` {rule}; unknown: {unknown}, missing: {missing}.")
