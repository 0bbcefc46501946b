"""Iterables that can be opened again, such as a shard of a streamed dataset, as parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import islice
from typing import Any, Final, final
from weakref import WeakValueDictionary

from torch.utils.data._utils import worker as worker_module

from lockstep.data.batch_fingerprint import fingerprint
from lockstep.data.parts.part import BlockPart, indexed
from lockstep.data.samples import Samples
from lockstep.state import Loadable, temporarily

_DIFFERS: Final = (
    "It yields other samples than when it was counted. An iterable must yield the same samples whenever it is opened, "
    "and after `load_state_dict` those that follow. Leave out its shuffling and random numbers: pass shuffle=True to "
    "the BatchIterator, and draw random numbers in the `transform` of data.Parts."
)


@final
class StreamPart(BlockPart):
    """The samples of an iterable, such as an `IterableDataset` or a shard of a streamed Hugging Face dataset.

    The iterable must yield all its samples in every process: not those of a rank. Samples that it would distribute to
    workers, it yields in each, because `torch.utils.data.get_worker_info` is None while it is read.

    It is read once to count its samples. If it has ``state_dict`` and ``load_state_dict``, its states at the
    start of each block are kept in the index, and a block is found by loading one. Otherwise samples before a block are
    read and discarded, at the start of a section and after a resume only. Some samples of each block are compared with
    those that were counted, so that one that shuffles, or that loses a buffer with its state, is an error.

    Args:
        open_iterable: A function that returns a new iterable with the same samples whenever it is called.
        name: The name of the part in errors, and in the index.
        block: The number of samples that are read at once, at least 1.
        index: The path of the index; it is written if it does not exist. None to count in every process. It is not
            noticed if the data behind the iterable changes: delete the index then.

    Raises:
        TypeError: If `open_iterable` cannot be called.
        StateError: When samples are read, if the index is that of another part.
        ValueError: When samples are read, if they are others than when they were counted.
    """

    in_order = True

    def __init__(
        self,
        open_iterable: Callable[[], Iterable[Any]],
        name: str,
        *,
        block: int = 256,
        index: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(name, block, index)
        if not callable(open_iterable):
            rule = "must be a function that returns a new iterable, such as functools.partial(Dataset, path)"
            raise TypeError(f"`open_iterable` {rule}, got a {type(open_iterable).__name__}.")
        self.open_iterable = open_iterable
        self._last_read = _LastRead()

    @cached_property
    def _index(self) -> dict[str, Any]:
        """The number of samples, and by block a checksum and the state at its start, None if there are no states."""
        found: dict[str, Any] = indexed(self.index, {"stream": self._name, "block": self.block}, self._count)
        return found

    def _count_samples(self) -> int:
        return int(self._index["samples"])

    def _count(self) -> dict[str, Any]:
        """Read the iterable to its end."""
        with _outside_of_workers():
            iterable = self.open_iterable()
            size, states, checksums, iterator = self.block, list[Any](), list[int](), iter(iterable)
            while size == self.block:
                states.append(iterable.state_dict() if isinstance(iterable, Loadable) else None)
                samples = list(islice(iterator, self.block))
                checksums.append(_checksum(samples))
                size = len(samples)
            # The last block with samples: a buffer of datasets is lost only after some blocks.
            last = len(states) - (1 if size else 2)
            if last > 0 and states[last] is not None:
                again = list(islice(self._from(last, states[last]), self.block))
                if _checksum(again) != checksums[last]:
                    raise ValueError(_DIFFERS)
            return {"samples": self.block * (len(states) - 1) + size, "states": states, "checksums": checksums}

    def _from(self, block: int, state: Any) -> Iterator[Any]:
        """Open the iterable, and return an iterator over the samples from a block on."""
        iterable, skipped = self.open_iterable(), block * self.block
        if skipped and state is not None and isinstance(iterable, Loadable):
            iterable.load_state_dict(state)
            skipped = 0
        return islice(iter(iterable), skipped, None)

    def read(self, block: int) -> Sequence[Any]:
        """Read a block, from where the one before has ended if that is still in use."""
        before = self._last_read.blocks.pop((os.getpid(), block), None)
        with _outside_of_workers():
            iterator = self._from(block, self._index["states"][block]) if before is None else before.rest
            samples = _Block(iterator, self.block)
        # Another number of samples is named by `Parts`.
        if len(samples) == self.lengths[block] and _checksum(samples) != self._index["checksums"][block]:
            raise ValueError(_DIFFERS)
        self._last_read.blocks[os.getpid(), block + 1] = samples
        return samples


def _checksum(samples: Sequence[Any]) -> int:
    """Return a checksum of a few samples, and of their number."""
    return fingerprint(Samples(samples, range(len(samples)), samples)).checksum


def _outside_of_workers() -> AbstractContextManager[None]:
    """Return a context manager within which `torch.utils.data.get_worker_info` returns None.

    Iterables distribute their samples to the workers that it names, but a part must be whole in each.
    """
    return temporarily(worker_module, _worker_info=None)


class _Block(list[Any]):
    """The samples of a block, and the iterator over those after them, which is closed when the block is dropped."""

    def __init__(self, iterator: Iterator[Any], size: int) -> None:
        super().__init__(islice(iterator, size))
        self.rest = iterator


class _LastRead:
    """Blocks in use, by the process that has read them and the block that comes next."""

    # Not in the `__dict__`, where a change would be one of the dataset.
    __slots__ = ("blocks",)

    def __init__(self) -> None:
        # A process that was forked shares the positions of open files, and opens its own.
        self.blocks: WeakValueDictionary[tuple[int, int], _Block] = WeakValueDictionary()

    def __reduce__(self) -> tuple[type[_LastRead], tuple[()]]:
        return type(self), ()
