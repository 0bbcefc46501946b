"""Data in parts: a dataset of them, and the order in which sections of a batch read them side by side."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import Any, Final, Literal, TypeAlias, final, get_args

import torch
from torch.utils.data import get_worker_info

from lockstep.arguments import check_choice, check_integer, check_number
from lockstep.communicators import Communicator
from lockstep.data.cursor import hash_to_seed, shuffled_order
from lockstep.data.parts.part import BlockPart, Part
from lockstep.errors import LockstepError, PartError, warn
from lockstep.plan import cut
from lockstep.streams import restored_generators

_KEPT: Final = 4
"""The number of slices for which the permutation of a block is kept without being used. Slices are batches in order."""


def sections(batch_size: int, num_sections: int) -> list[range]:
    """Return the positions of each section in a batch, which are cut as a batch is cut into shards.

    >>> sections(10, 4)
    [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    return cut(batch_size, min(num_sections, batch_size))


def positions_by_worker(
    positions: Collection[int], batch_size: int, *, num_sections: int, num_workers: int
) -> list[list[int]]:
    """Distribute positions in a batch to workers, so that each has the same sections in all batches.

    >>> positions_by_worker(range(4, 10), 10, num_sections=4, num_workers=2)
    [[4, 5], [6, 7, 8, 9]]
    """
    found = set(positions)
    mine = [each for section in sections(batch_size, num_sections) if (each := sorted(found.intersection(section)))]
    firsts = [len(mine) * worker // num_workers for worker in range(num_workers + 1)]
    return [list(chain(*mine[first:end])) for first, end in pairwise(firsts)]


def num_shared(positions: Collection[int], batch_size: int, num_sections: int) -> int:
    """Return the number of sections of which some positions, but not all, are among the given ones.

    >>> num_shared(range(4), 10, 4)
    1
    """
    found = set(positions)
    return sum(0 < len(found.intersection(each)) < len(each) for each in sections(batch_size, num_sections))


@final
class SectionOrder:
    """The order of one epoch, in which each position of a batch belongs to a section that reads its blocks in order.

    The blocks of the dataset, in the order of the epoch, are a sequence of samples. It is cut into contiguous sections,
    each with as many samples as it has in all full batches, and a rest, which is the short last batch. A batch holds
    the next samples of each section. Therefore a process that reads only some positions of each batch reads only their
    sections, from the beginning to the end. Any position is found by arithmetic.

    Args:
        lengths: The number of samples of each block, at least 1.
        units: The index of the first block of each unit, in ascending order. Units are shuffled, and the blocks of a
            unit stay together in their order.
        batch_size: The number of samples in a batch.
        num_sections: The number of sections, at least 1.
        head: The number of samples at the beginning of the epoch that complete a batch of the epoch before.
        key: The seed and the epoch, of which the order of the units and of the samples of each block depends; None for
            the order of the dataset.

    Determinism: integer arithmetic on the arguments, and permutations by a generator with a seed of its own.

    >>> order = SectionOrder([3, 3, 3], [0, 1, 2], batch_size=4, num_sections=2, head=0, key=None)
    >>> order[0:4], order[4:8], order[8:12]
    ((0, 1, 4, 5), (2, 3, 6, 7), (8,))
    """

    def __init__(
        self,
        lengths: Sequence[int],
        units: Sequence[int],
        *,
        batch_size: int,
        num_sections: int,
        head: int,
        key: tuple[int, int] | None,
    ) -> None:
        self._lengths = torch.tensor(lengths, dtype=torch.int64)
        self._key = key
        self._starts = self._lengths.cumsum(0) - self._lengths
        self._blocks = _block_order(torch.tensor(units, dtype=torch.int64), len(lengths), key)
        self._ends = self._lengths[self._blocks].cumsum(0)
        self._bounds: array[int] = array("q", self._ends.tolist())
        self._size = self._bounds[-1]
        self._head = min(head, self._size)
        self.depends_on: dict[str, int | str] = {"batch_size": batch_size, "num_sections": num_sections}
        """What the order depends on besides the key; `Parts` adds the hash of its blocks."""
        self._batch_size = batch_size
        self._num_full = (self._size - self._head) // batch_size
        # For each position in a batch: where its section begins, and how far the section advances in a batch.
        cuts = sections(batch_size, num_sections)
        self._base = torch.cat([self._num_full * part.start + torch.arange(len(part)) for part in cuts])
        self._step = torch.cat([torch.full((len(part),), len(part)) for part in cuts])
        # By block: the number of the slice that used it last, and the order of its samples.
        self._permutations: dict[int, tuple[int, torch.Tensor]] = {}
        self._num_slices = 0

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> tuple[int, ...]:
        start, stop, step = part.indices(self._size)
        places = self._places(torch.arange(start, max(start, stop), step))
        # Not `torch.searchsorted`, whose threads wait for each other for milliseconds on a machine that is busy.
        found = torch.tensor([bisect_right(self._bounds, place) for place in places.tolist()], dtype=torch.int64)
        blocks = self._blocks[found]
        offsets = places - (self._ends[found] - self._lengths[blocks])
        if self._key is not None:
            self._num_slices += 1
            for block in set(blocks.tolist()):
                mine = blocks == block
                offsets[mine] = self._permutation(block)[offsets[mine]]
            oldest = self._num_slices - _KEPT
            self._permutations = {block: kept for block, kept in self._permutations.items() if kept[0] > oldest}
        return tuple((self._starts[blocks] + offsets).tolist())

    def _places(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the places, in the sequence of samples, of positions in the epoch."""
        batch = (positions - self._head).div(self._batch_size, rounding_mode="floor")
        position = (positions - self._head) % self._batch_size
        in_sections = (positions >= self._head) & (batch < self._num_full)
        return torch.where(in_sections, self._head + self._base[position] + batch * self._step[position], positions)

    def _permutation(self, block: int) -> torch.Tensor:
        """Return the order of the samples of a block."""
        _, permutation = self._permutations.get(block, (0, None))
        if permutation is None:
            generator = torch.Generator().manual_seed(hash_to_seed(*(self._key or ()), block))
            permutation = torch.randperm(int(self._lengths[block]), generator=generator)
        self._permutations[block] = self._num_slices, permutation
        return permutation


def _block_order(units: torch.Tensor, num_blocks: int, key: tuple[int, int] | None) -> torch.Tensor:
    """Return the indices of the blocks in the order of an epoch."""
    if key is None:
        return torch.arange(num_blocks)
    seed, epoch = key
    order = shuffled_order(len(units), seed=seed, epoch=epoch)
    sizes = torch.diff(units, append=torch.tensor([num_blocks]))[order]
    firsts = sizes.cumsum(0) - sizes
    return torch.repeat_interleave(units[order] - firsts, sizes) + torch.arange(num_blocks)


OnBadRecord: TypeAlias = Literal["raise", "skip"]

MOST_WORKERS: Final = 255
"""The number of workers per process that count bad records separately."""

LOG: Final = logging.getLogger("lockstep")


@final
@dataclass(eq=False, repr=False)
class Parts:
    """A dataset of files or streams, which a `BatchIterator` reads side by side in sections.

    The sequence of all blocks is cut into `num_sections` contiguous sections, and each position of a batch reads one of
    them, see `data.SectionOrder`. A process reads the sections of the positions in its shards, and each worker some of
    these, so that every block is read once per epoch over all processes, apart from those at the ends of sections.

    Make `batch_size` a multiple of `num_sections`, and `num_sections` a multiple of `num_shards`. Otherwise the result
    is the same on any placement, too, but some sections are read by two ranks, with a warning.

    With ``shuffle=True``, each epoch has its own order of blocks, and of the samples in each block. A batch then mixes
    samples of as many blocks as there are sections. More sections mix better and use more memory: one block each.

    Args:
        parts: The parts; at least one sample over all.
        num_sections: The number of sections that are read side by side, at least 1. It belongs to the recipe: another
            number is another order. With 1 and without shuffling, the order is that of the dataset.
        transform: A function that makes a sample of a record; None to use records as they are. Random numbers that it
            draws belong to the sample, see `data.SampleStreams`.
        on_bad_record: What happens if a record cannot be read or transformed: ``"raise"`` ends the run with a
            `PartError` that names the part; ``"skip"`` takes the next good record of its block instead, which is then
            used twice in the epoch, counts it in `num_skipped` and logs it.
        slow_after: The seconds after which the log names a block that is still being read, and a warning one that took
            longer.

    Raises:
        TypeError: If a part is not a `data.Part`, or a number no integer.
        ValueError: If there are no parts, or an argument is out of range.
    """

    parts: Sequence[Part]
    _: KW_ONLY
    num_sections: int = 16
    transform: Callable[[Any], Any] | None = None
    on_bad_record: OnBadRecord = "raise"
    slow_after: float = 30.0

    def __post_init__(self) -> None:
        check_integer("num_sections", self.num_sections, minimum=1)
        if isinstance(self.parts, Part):
            raise TypeError(f"`parts` must be a list of parts, got a {type(self.parts).__name__}. Put it into a list.")
        self.parts = list(self.parts)
        if not self.parts:
            raise ValueError("`parts` must hold at least one part, got none.")
        names = dict[str, str]()
        for part in self.parts:
            if not isinstance(part, Part):
                raise TypeError(
                    f"`parts` must hold parts such as lockstep.data.TextLines, got a {type(part).__name__}. "
                    "lockstep.data.StreamPart makes a part of an iterable."
                )
            index = part.index if isinstance(part, BlockPart) else None
            if index and (name := names.setdefault(index, part.name)) != part.name:
                raise ValueError(f"`parts` must have an index each, got {index} as that of {name} and {part.name}.")
        check_choice("on_bad_record", self.on_bad_record, get_args(OnBadRecord))
        check_number("slow_after", self.slow_after, above=0)
        # A number for this process and for each of its workers, which share the memory and write their own number only.
        self._skipped: torch.Tensor | None = None
        if self.on_bad_record == "skip":
            self._skipped = torch.zeros(1 + MOST_WORKERS, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def num_skipped(self) -> int:
        """The number of bad records that this process and its workers have skipped since the dataset was created.

        A record that an audited update reads once more is counted once more.
        """
        return 0 if self._skipped is None else int(self._skipped.sum())

    def num_skipped_by_all(self, communicator: Communicator) -> int:
        """Return the sum of `num_skipped` over all ranks, each of which must make this call.

        Args:
            communicator: The communicator of the ranks, such as ``updater.communicator``.
        """
        return sum(communicator.gather_objects(self.num_skipped))

    @cached_property
    def _lengths(self) -> array[int]:
        """The number of samples of each block of all parts."""
        lengths: array[int] = array("q")
        for part in self.parts:
            with _reading(f"{part.name} to count its samples", self.slow_after, "Keep the count with index=."):
                lengths.extend(part.lengths)
        return lengths

    @cached_property
    def _ends(self) -> array[int]:
        return array("q", accumulate(self._lengths))

    @cached_property
    def _first_blocks(self) -> list[int]:
        """The index of the first block of each part, among those of all parts."""
        return list(accumulate((len(part.lengths) for part in self.parts[:-1]), initial=0))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> Any:
        """Read one sample, and for this its block; a `BatchIterator` keeps blocks."""
        return self.reader(0)[index]

    def reader(self, keep: int) -> PartReader:
        """Return a dataset with the same samples that keeps the blocks that it has read last.

        Args:
            keep: The number of samples that are read from other blocks until a block is dropped.
        """
        return PartReader(self, keep)

    def order(self, *, batch_size: int, head: int, key: tuple[int, int] | None) -> SectionOrder:
        """Return the order of one epoch; see `SectionOrder`."""
        units: list[int] = []
        for part, first in zip(self.parts, self._first_blocks, strict=True):
            blocks = range(first, first + len(part.lengths))
            units += blocks[:1] if part.in_order else blocks
        order = SectionOrder(
            self._lengths, units, batch_size=batch_size, num_sections=self.num_sections, head=head, key=key
        )
        order.depends_on["blocks"] = self.fingerprint()
        return order

    def fingerprint(self) -> str:
        """Return a hash of the number of sections and of the blocks, on which orders depend."""
        content = repr((self.num_sections, [part.in_order for part in self.parts])).encode() + self._lengths.tobytes()
        return hashlib.sha256(content).hexdigest()[:16]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the block of a sample, among those of all parts, and its place in the block.

        Raises:
            IndexError: If there is no such sample.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"`index` must lie in 0..{len(self) - 1}, got {index}.")
        block = bisect_right(self._ends, index)
        return block, index - (self._ends[block] - self._lengths[block])

    def read(self, block: int) -> tuple[str, Sequence[Any]]:
        """Read a block, and return it with its name.

        Args:
            block: The index of the block among those of all parts.

        Raises:
            PartError: If it cannot be read, or holds another number of samples than when it was counted.
        """
        place = bisect_right(self._first_blocks, block) - 1
        part, number = self.parts[place], block - self._first_blocks[place]
        name = f"block {number} of {part.name}"
        remedy = "Copy it to a faster disk, or read ahead with num_workers=2 or more."
        with _reading(name, self.slow_after, remedy):
            records = part.read(number)
        if len(records) != self._lengths[block]:
            raise PartError(
                f"{name} must hold {self._lengths[block]} samples as when it was counted, got {len(records)}. Delete "
                "the index of a file that has changed."
            )
        return name, records

    def sample(self, name: str, records: Sequence[Any], offset: int) -> Any:
        """Return a sample of a block, or the next good one; see `on_bad_record`.

        Raises:
            PartError: If the record is bad, or if all of the block are.
        """
        for step in range(len(records)):
            try:
                record = records[(offset + step) % len(records)]
                return record if self.transform is None else self.transform(record)
            except Exception as error:
                what = f"Record {(offset + step) % len(records)} in {name} is bad: {type(error).__name__}: {error}"
                if self._skipped is None:
                    raise PartError(what) from error
                LOG.warning("%s The next one is used instead.", what)
                worker = get_worker_info()
                self._skipped[0 if worker is None else 1 + worker.id % MOST_WORKERS] += 1
        raise PartError(f"All {len(records)} records in {name} are bad.")


class PartReader:
    """Reads samples of `Parts`, and keeps the blocks that are in use.

    A block is dropped when many samples have been read since it was used last. A section reads some samples of its
    block in every batch, so a block that was not used during two batches will not be used again.
    """

    __slots__ = ("_blocks", "_keep", "_num_read", "_parts")

    def __init__(self, parts: Parts, keep: int) -> None:
        self._parts = parts
        self._keep = keep
        self._num_read = 0
        # By index: the time of the last use, counted in samples, the name and the records; the oldest first.
        self._blocks: OrderedDict[int, tuple[int, str, Sequence[Any]]] = OrderedDict()

    def __reduce__(self) -> tuple[type[PartReader], tuple[Parts, int]]:
        # A process that is given a copy reads its own blocks.
        return PartReader, (self._parts, self._keep)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Any:
        block, offset = self._parts.locate(index)
        if block in self._blocks:
            _, name, records = self._blocks.pop(block)
        else:
            # The blocks that were not used for a while.
            while self._blocks and next(iter(self._blocks.values()))[0] < self._num_read - self._keep:
                self._blocks.popitem(last=False)
            name, records = self._parts.read(block)
        self._num_read += 1
        self._blocks[block] = self._num_read, name, records
        return self._parts.sample(name, records, offset)


@contextmanager
def _reading(name: str, seconds: float, remedy: str) -> Iterator[None]:
    """Return a context manager that names what is read in errors, and if it takes longer in the log and a warning.

    What reading draws from random generators is undone: the next sample would depend on whether a block was read.
    """
    timer = threading.Timer(seconds, LOG.warning, ("Still reading %s after %g s.", name, seconds))
    timer.daemon = True
    start = time.perf_counter()
    timer.start()
    try:
        with restored_generators():
            yield
    except LockstepError:
        raise
    except Exception as error:
        raise PartError(f"Cannot read {name}: {type(error).__name__}: {error}") from error
    finally:
        timer.cancel()
    if time.perf_counter() - start > seconds:
        warn(
            f"Reading {name} took {time.perf_counter() - start:.3g} s. {remedy} `slow_after` sets the time after "
            "which this is said."
        )
