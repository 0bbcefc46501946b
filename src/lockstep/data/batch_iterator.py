"""Batches of a dataset over any number of epochs, with a state of a few numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import chain, count
from typing import Any, Final, TypeAlias, get_args

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, WeightedRandomSampler

from lockstep.arguments import check_bool, check_choice, check_integer, misfit
from lockstep.data.cursor import Cursor, LastBatch, Order, hash_to_seed, shuffled_order, take_batch
from lockstep.data.iterator import Iterator, SampleFilter
from lockstep.data.parts.dataset import Parts, SectionOrder, num_shared, positions_by_worker
from lockstep.data.samples import MapDataset, Samples, SampleStreams, draws_no_numbers
from lockstep.data.workers import DatasetState, LoadRequest, load_ahead
from lockstep.elsewhere import BATCH_ITERATOR, names_ours
from lockstep.errors import StateError, warn
from lockstep.state import check_keys
from lockstep.streams import restored_generators, seed_default_generators, stream_seed

OrderSampler: TypeAlias = "Callable[[list[int], int], Sequence[int]]"

_ORDER_TAG: Final = 0x4F52444552
"""Separates the streams of order samplers from those of shards and samples, which may have the same seed."""


class BatchIterator(Iterator):
    """Iterates over batches of a dataset, in an order that depends only on the seed.

    A batch is a `Samples`: its samples are loaded when they are read, and a slice of it loads only the samples
    in the slice.

    Args:
        dataset: Any object with ``len()`` and ``[index]`` that has at least one sample.
            `data.Parts` are read in an order of their own.
        batch_size: The number of samples per batch, at least 1.
        shuffle: Whether every epoch has its own random order instead of the order of the dataset.
        repeat: Whether epochs follow each other without end. If False, there is one epoch, whose last batch is
            shorter if the samples run out, unless it is dropped; after it the iterator is at its end, until `reset`.
        last_batch: What happens to a batch for which the epoch has too few samples: ``"short"`` makes it shorter, as
            a `torch.utils.data.DataLoader` does, ``"drop"`` skips it and its samples, and ``"wrap"`` completes it
            from the next epoch (or several).
        seed: The seed of the random orders; any integer.
        order_sampler: A function ``order_sampler(order, position)`` that returns the order of an epoch, as many
            indices as the dataset has samples. For the first epoch it is called with the order of the dataset
            and 0; whenever an epoch ends, with that epoch's order and the position in it at which the batch that
            ends it started. It is called in a random stream of (seed, epoch): what it draws from the default generators
            of torch's CPU, Python and NumPy is the same on any ranks and after a resume, and other for each epoch.
            Peeking and workers call it before the epoch starts, and loading a state or a reset discards those results,
            so it should depend on nothing else: a generator of its own or a count of its calls is in no saved state.
        num_workers: The number of processes that load samples in advance, two batches each. With 0, samples are
            loaded where and when they are read. Workers load whole batches, or the parts chosen by `load_only`. When
            attributes of the dataset have changed, such as its transform or the epoch, new workers load the following
            batches with them. Changes of single elements of its arrays and long lists are not noticed.
        sample_streams: Whether each sample is loaded with its own random stream, keyed by (seed, epoch, sample),
            see `Samples` and `SampleStreams`. It costs about 15 µs per sample, and samples are loaded one by one,
            without ``__getitems__``; pass False for a dataset that draws no random numbers. It has no effect for a
            `TensorDataset`, a tensor, list, tuple, string or range, or a `Subset` of one.

    Raises:
        TypeError: If the dataset lacks ``len()`` or ``[index]``, or a count is not an integer.
        ValueError: If the dataset is empty, an argument is out of range, two arguments exclude each other, or
            ``order_sampler`` returned something other than an order of the dataset's samples.

    Determinism: the samples of each batch depend on the seed, the length of the dataset and the arguments. They
    do not depend on ``num_workers``, on calls of `peek`, or on the default generators, which are left untouched.
    With ``sample_streams`` the same holds for what the dataset draws from torch's default generator, Python's
    `random` and ``numpy.random``. It does not hold for generators of the dataset's own.

    References: the bookkeeping is that of ``SerialIterator`` in Chainer (Tokui et al., "Chainer: A
    Deep Learning Framework for Accelerating the Research Cycle", 2019, arXiv:1908.00213).

    >>> batches = BatchIterator("abcde", batch_size=2, last_batch="wrap")
    >>> [list(next(batches)) for _ in range(3)], batches.epoch, batches.epoch_detail
    ([['a', 'b'], ['c', 'd'], ['e', 'a']], 1, 1.2)
    >>> list(batches.peek()), list(batches.peek(1)), batches.epoch_detail
    (['b', 'c'], ['d', 'e'], 1.2)
    """

    @names_ours(BATCH_ITERATOR)
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
        for name, value in (("shuffle", shuffle), ("repeat", repeat), ("sample_streams", sample_streams)):
            check_bool(name, value)
        check_choice("last_batch", last_batch, get_args(LastBatch))
        if last_batch == "drop" and batch_size > len(dataset):
            rule = f"must be at most the number of samples ({len(dataset)}) if the last batch is dropped"
            raise ValueError(f"`batch_size` {rule}, got {batch_size}.")
        if shuffle and order_sampler is not None:
            raise ValueError("`shuffle` must be False if `order_sampler` is given, got True.")
        _check_order_sampler(order_sampler)
        if repeat and batch_size > len(dataset):
            warn(
                f"`batch_size` is {batch_size}, but there are only {len(dataset)} samples: a batch then holds "
                + ("some of them several times." if last_batch == "wrap" else "no more than these.")
            )
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.repeat = repeat
        self.last_batch = last_batch
        self.seed = seed
        self.order_sampler = order_sampler
        self.num_workers = num_workers
        self.sample_streams = sample_streams
        self._read(dataset)
        self._num_samples = len(dataset)
        # The batches that were requested but not passed yet: their indices and the cursor after each. `_ahead`
        # holds the first of them as `Samples`; `finalize` discards it but keeps the plan, for which the order
        # sampler has been called.
        self._planned: deque[tuple[Sequence[int], Cursor]] = deque()
        self._ahead: deque[Samples] = deque()
        self._supply: Generator[Samples] | None = None
        self._loaded_from: DatasetState | None = None
        self._wanted: SampleFilter | None = None
        self._num_advanced = 0
        self._warned = False
        self._cursor = Cursor(0, 0, self._first_order())

    def _read(self, dataset: MapDataset) -> None:
        """Load samples from a dataset from now on."""
        self._dataset = dataset
        self._reader = self._new_reader()
        self._in_streams = self.sample_streams and not draws_no_numbers(dataset)

    @property
    def dataset(self) -> MapDataset:
        """The dataset. The next batch is loaded from another one with as many samples if that is set.

        Raises:
            ValueError: If it has another number of samples, or if one of both is `data.Parts`.
        """
        return self._dataset

    @dataset.setter
    def dataset(self, dataset: MapDataset) -> None:
        _check_dataset(dataset)
        if len(dataset) != self._num_samples or isinstance(dataset, Parts) or isinstance(self._dataset, Parts):
            raise ValueError(
                f"`dataset` must have as many samples as before ({self._num_samples}) and be no `data.Parts`, because "
                f"the orders of epochs depend on them, got a {type(dataset).__name__} of {len(dataset)}. At the "
                "end of an epoch, create an iterator and an updater with it, and load the state of this one into that."
            )
        # What is loaded ahead comes from the old one; the order in which samples follow stays.
        self.finalize()
        self._read(dataset)

    def __repr__(self) -> str:
        return (
            f"BatchIterator({type(self._dataset).__name__} of {self._num_samples}, batch_size={self.batch_size}, "
            f"shuffle={self.shuffle}, repeat={self.repeat}, last_batch={self.last_batch!r}, seed={self.seed}), "
            f"{self.epoch_detail:g} epochs passed"
        )

    def __len__(self) -> int:
        """Return the number of batches in an epoch; with ``last_batch="wrap"``, rounded up, as epochs share batches."""
        whole, rest = divmod(self._num_samples, self.batch_size)
        return whole + (rest > 0 and self.last_batch != "drop")

    def reset(self) -> None:
        """Return to the first batch of epoch 0, and call the order sampler for its order again."""
        self._go_to(Cursor(0, 0, self._first_order()))
        self._previous_epoch_detail, self._is_new_epoch = None, False

    def peek(self, ahead: int = 0) -> Samples:
        """Return the batch that comes after ``ahead`` others, without advancing.

        Args:
            ahead: The number of batches to skip, at least 0.

        Raises:
            StopIteration: If there are not that many batches left.
            Exception: Any exception of the order sampler or, in a worker, of the dataset; the position is unchanged.
        """
        # `check_integer` takes longer than the comparison, and this runs in every update.
        if type(ahead) is not int or ahead < 0:
            check_integer("ahead", ahead, minimum=0)
        if self._loaded_from is not None and self._loaded_from.values != DatasetState(self._dataset).values:
            # Workers were given a copy of the dataset as it was.
            self.finalize()
        while len(self._ahead) <= ahead:
            if self._supply is None:
                self._loaded_from = DatasetState(self._dataset) if self.num_workers else None
                self._supply = self._samples_from(self._num_advanced + len(self._ahead))
            try:
                self._ahead.append(next(self._supply))
            except StopIteration:
                raise
            except BaseException:
                # The queue of the workers has moved on without this batch, so the next call must start a new one.
                self.finalize()
                raise
        return self._ahead[ahead]

    def peek_early(self, ahead: int = 0, *, always: bool = False) -> Samples | None:
        """Return a later batch if worker processes load it in advance anyway, or if ``always``; see `Iterator`."""
        if not (always or self.num_workers):
            return None
        try:
            return self.peek(ahead)
        except Exception:  # noqa: BLE001 - `peek` raises it again when the batch is used, and the end of the data
            return None

    def advance(self, num_batches: int = 1) -> None:
        """Advance past the next batches.

        Args:
            num_batches: The number of batches to pass, at least 1.

        Raises:
            StopIteration: If fewer batches are left; the position is unchanged.
        """
        if type(num_batches) is not int or num_batches < 1:
            check_integer("num_batches", num_batches, minimum=1)
        # Everything that can fail comes first, so that an error leaves the position unchanged.
        if len(self._ahead) < num_batches:
            self.peek(num_batches - 1)
        start = self._cursor
        for _ in range(num_batches):
            self._ahead.popleft()
            _, self._cursor = self._planned.popleft()
        self._num_advanced += num_batches
        self._previous_epoch_detail = start.epoch + start.position / len(start.order)  # its epoch_detail
        self._is_new_epoch = self._cursor.epoch > start.epoch

    def load_only(self, wanted: SampleFilter) -> None:
        """Restrict workers to the samples of each batch that this process will read; see `Iterator`."""
        # Running workers have whole batches in their queue.
        self.finalize()
        self._wanted = wanted

    @property
    def current_position(self) -> int:
        """The number of samples of the current epoch that have been passed."""
        return self._cursor.position

    @property
    def samples_passed(self) -> int:
        """The number of samples passed over all epochs, including dropped ones."""
        return self._cursor.epoch * self._num_samples + self._cursor.position

    @property
    def epoch(self) -> int:
        """The number of completed epochs."""
        return self._cursor.epoch

    @property
    def epoch_detail(self) -> float:
        """The number of completed epochs, plus the fraction of the current one that has been passed."""
        return self._cursor.epoch_detail

    def finalize(self) -> None:
        """Stop the workers and discard what they have loaded; reading a further batch starts them again."""
        # In this order, because an interrupt in between must not leave a supply that continues after batches that
        # were discarded.
        supply, self._supply, self._loaded_from = self._supply, None, None
        self._ahead.clear()
        if supply is not None:
            supply.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the seed, the position and the last advance.

        With an order sampler, the state also contains the order of the current epoch, which cannot be requested again,
        and with `data.Parts` what the order depends on.
        """
        state: dict[str, Any] = {
            "seed": self.seed,
            "epoch": self._cursor.epoch,
            "position": self._cursor.position,
            **self._last_advance(),
        }
        if self.order_sampler is not None:
            state["order"] = torch.as_tensor(self._cursor.order).clone()
        # Those of the order in use: the attributes may have been changed since.
        return state | (self._cursor.order.depends_on if isinstance(self._cursor.order, SectionOrder) else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the position and the seed of a saved iterator.

        The dataset must have the same length as when the state was saved; the batch size may differ, but for
        `data.Parts` only at the start of an epoch.

        Raises:
            StateError: If a key is unknown or missing, or a value does not fit this iterator; nothing has changed then.
        """
        check_keys(state_dict, self.state_dict(), of="BatchIterator")
        try:
            cursor = self._saved_cursor(state_dict)
        except (TypeError, ValueError, RuntimeError) as error:
            raise StateError(f"Cannot load the state of a BatchIterator: {error}") from error
        self.seed = state_dict["seed"]
        self._go_to(cursor)
        self._load_last_advance(state_dict)

    def _saved_cursor(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor of a saved state, after checking that it fits this iterator."""
        seed, epoch, position = state["seed"], state["epoch"], state["position"]
        check_integer("seed", seed)
        check_integer("epoch", epoch, minimum=0)
        check_integer("position", position, minimum=0)
        # After the last batch of an epoch an iterator is at the start of the next one.
        last = self._num_samples - (self.batch_size if self.last_batch == "drop" else 1)
        if position > last:
            rule = f"must lie in 0..{last}, because there are {self._num_samples} samples and a batch must follow"
            raise ValueError(f"`position` {rule}, got {position}.")
        self._check_last_advance(state)
        if self.order_sampler is not None:
            return Cursor(epoch, position, self._checked_order(state["order"], "order"))
        order = self._seeded_order(epoch, seed)
        for name, own in order.depends_on.items() if isinstance(order, SectionOrder) and position else ():
            if state[name] != own:
                rule = f"must be {state[name]}, as when the state was saved, until the epoch ends"
                raise ValueError(f"`{name}` {rule}, got {own}. The order of `data.Parts` depends on it.")
        return Cursor(epoch, position, order)

    def _go_to(self, cursor: Cursor) -> None:
        """Move to a cursor and discard the plan."""
        self.finalize()
        self._planned.clear()
        self._cursor = cursor
        # The batch size may be another one.
        self._reader = self._new_reader()

    def _new_reader(self) -> MapDataset:
        """Return what loads the samples, which keeps the blocks of parts while batches use them."""
        return self._dataset.reader(2 * self.batch_size) if isinstance(self._dataset, Parts) else self._dataset

    def _samples_from(self, number: int) -> Generator[Samples]:
        """Yield batches from the given number on, counted like `_num_advanced`."""
        if isinstance(self._dataset, Parts) and self._wanted is not None:
            self._warn_of_shared_sections(self._dataset, self._wanted)
        batches = self._unloaded_from(number)
        if self.num_workers == 0:
            return batches
        return load_ahead(
            self._with_positions(batches, number),
            self._reader,
            in_streams=self._in_streams,
            num_workers=self.num_workers,
            seed=hash_to_seed(self.seed, self._cursor.epoch, self._cursor.position),
        )

    def _with_positions(self, batches: Iterable[Samples], number: int) -> Generator[LoadRequest]:
        """Add to each batch, starting with the given number, the positions of its samples to load."""
        for ahead, batch in enumerate(batches, number - self._num_advanced):
            size = len(batch)
            ranges = [range(size)] if self._wanted is None else self._wanted(ahead, size)
            positions = sorted(chain(*ranges))
            if isinstance(self._dataset, Parts):
                counts = {"num_sections": self._dataset.num_sections, "num_workers": self.num_workers}
                yield batch, positions_by_worker(positions, size, **counts)
            else:
                yield batch, [positions]

    def _warn_of_shared_sections(self, parts: Parts, wanted: SampleFilter) -> None:
        """Warn if this process needs only some samples of a section, so that another one reads the same blocks."""
        shared = num_shared(list(chain(*wanted(0, self.batch_size))), self.batch_size, parts.num_sections)
        if shared and not self._warned:
            self._warned = True
            warn(
                f"`num_sections` should be a multiple of the number of shards, and `batch_size` of `num_sections`, got "
                f"{parts.num_sections} for {self.batch_size} samples: {shared} of the sections are read by another "
                "process, too. The result is the same."
            )

    def _unloaded_from(self, number: int) -> Generator[Samples]:
        """Yield the planned batches from the given number on, and plan more where they end."""
        for batch in count(number):
            # Computed anew for every batch, because the first ones are removed when the iterator advances.
            index = batch - self._num_advanced
            if index == len(self._planned) and not self._plan_next():
                return
            indices, _ = self._planned[index]
            streams = self._streams_of(index) if self._in_streams else None
            yield Samples(self._reader, indices, streams=streams)

    def _streams_of(self, index: int) -> SampleStreams:
        """Return the random streams of the samples of one planned batch."""
        start = self._planned[index - 1][1] if index else self._cursor
        first = start.epoch * self._num_samples + start.position
        ordinals = range(first, first + len(self._planned[index][0]))
        return SampleStreams(self.seed, self._num_samples, ordinals)

    def _plan_next(self) -> bool:
        """Plan one more batch, and return whether there is one."""
        _, start = self._planned[-1] if self._planned else ((), self._cursor)
        if start.epoch > 0 and not self.repeat:
            return False
        # Without a next epoch there are no samples to complete the last batch with.
        last_batch = self.last_batch if self.repeat or self.last_batch == "drop" else "short"
        self._planned.append(take_batch(start, self.batch_size, last_batch=last_batch, next_order=self._next_order))
        return True

    def _first_order(self) -> Order:
        """Return the order of epoch 0."""
        return self._next_order(Cursor(-1, 0, range(self._num_samples)))

    def _next_order(self, cursor: Cursor) -> Order:
        """Return the order of the epoch after that of a cursor."""
        if len(self._dataset) != self._num_samples:
            raise ValueError(
                f"`dataset` must keep its number of samples ({self._num_samples}), because the orders of epochs depend "
                f"on it, but has {len(self._dataset)} now. For one that grows, pass an iterable that draws batches of "
                "it; or at the end of an epoch, create an iterator and an updater, and load the state of this one into "
                "that."
            )
        if self.order_sampler is None:
            return self._seeded_order(cursor.epoch + 1, self.seed)
        with restored_generators():
            seed_default_generators(stream_seed((self.seed << 64) + _ORDER_TAG, cursor.epoch + 1))
            order = self.order_sampler(torch.as_tensor(cursor.order).tolist(), cursor.position)
        return self._checked_order(order, "order_sampler(order, position)")

    def _seeded_order(self, epoch: int, seed: int) -> Order:
        """Return the order of an epoch without an order sampler."""
        if isinstance(self._dataset, Parts):
            # The samples that complete the last batch of the epoch before, so that batches stay whole sections.
            head = -epoch * self._num_samples % self.batch_size if self.last_batch == "wrap" and self.repeat else 0
            key = (seed, epoch) if self.shuffle else None
            return self._dataset.order(batch_size=self.batch_size, head=head, key=key)
        if self.shuffle:
            return shuffled_order(self._num_samples, seed=seed, epoch=epoch)
        return range(self._num_samples)

    def _checked_order(self, order: Sequence[int] | torch.Tensor, name: str) -> torch.Tensor:
        """Return a copy of an order as a tensor, after checking its indices."""
        indices = torch.tensor(order) if not isinstance(order, torch.Tensor) else order
        if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
            raise TypeError(f"`{name}` must hold integers, got {indices.dtype}.")
        if indices.shape != (self._num_samples,):
            rule = f"must hold one index for each of the {self._num_samples} samples"
            raise ValueError(f"`{name}` {rule}, got shape {tuple(indices.shape)}.")
        # The indices need not be distinct: a sampler may weight the samples.
        least, most = indices.aminmax()
        if least < 0 or most >= self._num_samples:
            rule = f"must hold indices in 0..{self._num_samples - 1}"
            raise ValueError(f"`{name}` {rule}, got {int(least)}..{int(most)}.")
        return indices.to("cpu", torch.int64, copy=True)


def _check_dataset(dataset: object) -> None:
    """Check that a dataset has samples that can be accessed by index."""
    rule = "must have `len()` and `[index]`"
    if isinstance(dataset, DataLoader):
        remedy = "Give the updater the DataLoader itself, or pass its `dataset` here."
        raise TypeError(f"`dataset` {rule}, got a DataLoader. {remedy}")
    if isinstance(dataset, type):
        raise TypeError(f"`dataset` must be an object, got the class {dataset.__name__}. Create one of it.")
    if not isinstance(dataset, MapDataset) or isinstance(dataset, IterableDataset):
        remedy = (
            "Pass lockstep.data.Parts with a StreamPart of each of its shards, or give the updater a DataLoader of it"
            if isinstance(dataset, IterableDataset)
            else "Pass a list of samples, a torch Dataset or the like"
        )
        raise TypeError(f"`dataset` {rule}, got a {type(dataset).__name__}. {remedy}.")
    if len(dataset) == 0:
        raise ValueError("`dataset` must hold at least one sample, got none.")
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise TypeError(
            f"`dataset` must have samples at [0], [1] and so on, got a {type(dataset).__name__} with the keys "
            f"{list(dataset)[:5]}. Pass a list with one dict per sample, or torch.utils.data.TensorDataset(*tensors)."
        )
    columns = dataset if isinstance(dataset, tuple | list) and len(dataset) <= MOST_COLUMNS else []
    # Samples are collated, which takes equal shapes: these are the columns of a table and not its rows.
    if len({_shape_of(each) for each in columns}) > 1 and len({_shape_of(each)[:1] for each in columns}) == 1:
        raise TypeError(
            f"`dataset` must hold one entry per sample, got a {type(dataset).__name__} of {len(columns)} tensors with "
            f"{_shape_of(columns[0])[0]} rows each. Pass torch.utils.data.TensorDataset(*tensors)."
        )


MOST_COLUMNS: Final = 8
"""The largest number of tensors that are taken for the columns of a table."""


def _shape_of(value: object) -> tuple[int, ...]:
    """Return the shape of a tensor or an array; that of other values is empty."""
    return tuple(getattr(value, "shape", ()))


def _check_order_sampler(order_sampler: object) -> None:
    """Check that an order sampler can be called with an order and a position."""
    if order_sampler is None:
        return
    rule = "`order_sampler` must be a function of an epoch's order and the position in it, or None"
    if isinstance(order_sampler, Sampler) or not callable(order_sampler):
        plain = isinstance(order_sampler, Sampler) and not isinstance(order_sampler, WeightedRandomSampler)
        remedy = (
            "Pass shuffle=True for a random order of each epoch; lockstep shares each batch among ranks itself."
            if plain
            else "Pass lambda order, position: ... that returns the indices of the next epoch, such as "
            "torch.multinomial(weights, len(order), replacement=True), or give the updater a DataLoader with a sampler."
        )
        raise TypeError(f"{rule}, got a {type(order_sampler).__name__}. {remedy}")
    if reason := misfit(order_sampler, [], 0):
        raise TypeError(f"{rule}, got one that cannot be called with two arguments: {reason}.")
