"""A dataset of parts, each of which is read in blocks."""

from __future__ import annotations

import hashlib
import logging
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, Final, Literal, TypeAlias, final, get_args

import torch
from torch.utils.data import get_worker_info

from lockstep.data.parts.part import Part
from lockstep.data.parts.sections import SectionOrder
from lockstep.errors import PartError
from lockstep.integers import check_integer

OnBadRecord: TypeAlias = Literal["raise", "skip"]

MOST_WORKERS: Final = 255
"""The number of workers per process that count bad records separately."""

LOG: Final = logging.getLogger("lockstep")


@final
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
        slow_after: The seconds after which the log names a block that is still being read.

    Raises:
        TypeError: If a part is not a `data.Part`, or a number no integer.
        ValueError: If there are no parts, or an argument is out of range.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        *,
        num_sections: int = 16,
        transform: Callable[[Any], Any] | None = None,
        on_bad_record: OnBadRecord = "raise",
        slow_after: float = 30.0,
    ) -> None:
        check_integer("num_sections", num_sections, minimum=1)
        self.parts = list(parts)
        if not self.parts:
            raise ValueError("`parts` must hold at least one part, got none.")
        for part in self.parts:
            if not isinstance(part, Part):
                raise TypeError(
                    f"`parts` must hold parts such as lockstep.data.TextLines, got a {type(part).__name__}."
                )
        if on_bad_record not in get_args(OnBadRecord):
            raise ValueError(f"`on_bad_record` must be 'raise' or 'skip', got {on_bad_record!r}.")
        if not slow_after > 0:
            raise ValueError(f"`slow_after` must be above 0 seconds, got {slow_after}.")
        self.num_sections = num_sections
        self.transform = transform
        self.on_bad_record = on_bad_record
        self.slow_after = slow_after
        # A number for this process and for each of its workers, which share the memory and write their own number only.
        skips = on_bad_record == "skip"
        self._skipped = torch.zeros(1 + MOST_WORKERS, dtype=torch.int64) if skips else None
        if self._skipped is not None:
            self._skipped.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def num_skipped(self) -> int:
        """The number of bad records that this process and its workers have skipped since the dataset was created."""
        return 0 if self._skipped is None else int(self._skipped.sum())

    @cached_property
    def _lengths(self) -> array[int]:
        """The number of samples of each block of all parts."""
        return array("q", chain.from_iterable(part.lengths for part in self.parts))

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
        return SectionOrder(
            self._lengths, units, batch_size=batch_size, num_sections=self.num_sections, head=head, key=key
        )

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
        try:
            with _named_if_slow(name, self.slow_after):
                records = part.read(number)
        except Exception as error:
            raise PartError(f"Cannot read {name}: {type(error).__name__}: {error}") from error
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


@final
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

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> Any:
        block, offset = self._parts.locate(index)
        if block in self._blocks:
            _, name, records = self._blocks.pop(block)
        else:
            self._drop()
            name, records = self._parts.read(block)
        self._num_read += 1
        self._blocks[block] = self._num_read, name, records
        return self._parts.sample(name, records, offset)

    def _drop(self) -> None:
        """Drop the blocks that were not used for a while."""
        while self._blocks and next(iter(self._blocks.values()))[0] < self._num_read - self._keep:
            self._blocks.popitem(last=False)


@contextmanager
def _named_if_slow(name: str, seconds: float) -> Iterator[None]:
    """Return a context manager that warns from a thread if its body takes longer."""

    def warn() -> None:
        LOG.warning("Still reading %s after %g s.", name, seconds)

    timer = threading.Timer(seconds, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
