"""Iterables that can be opened again, such as a shard of a streamed dataset, as parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import islice
from typing import Any, Final, final

from torch.utils.data._utils import worker as worker_module

from lockstep.data.iterable_batches import Resumable
from lockstep.data.parts.part import BlockPart, indexed

_MOST_OPEN: Final = 16
"""The number of positions at which an iterable is kept open."""


@final
class StreamPart(BlockPart):
    """The samples of an iterable, such as an `IterableDataset` or a shard of a streamed Hugging Face dataset.

    The iterable must yield all its samples in every process: not those of a rank. Samples that it would distribute to
    workers, it yields in each, because `torch.utils.data.get_worker_info` is None while it is read.

    It is read once to count its samples. If it has ``state_dict`` and ``load_state_dict``, its states at the
    start of each block are kept in the index, and a block is found by loading one. Otherwise samples before a block are
    read and discarded, at the start of a section and after a resume only.

    Args:
        open_iterable: A function that returns a new iterable with the same samples whenever it is called.
        name: The name of the part in errors, and in the index.
        block: The number of samples that are read at once, at least 1.
        index: The path of the index; it is written if it does not exist. None to count in every process. It is not
            noticed if the data behind the iterable changes: delete the index then.

    Raises:
        StateError: When samples are read, if the index is that of another part.
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
        super().__init__(name, block)
        self.index = index
        self.open_iterable = open_iterable
        self._open = _OpenIterators()

    @cached_property
    def _index(self) -> dict[str, Any]:
        """The number of samples, and the state at the start of each block, None if there are no states."""
        found: dict[str, Any] = indexed(self.index, {"samples of": self._name, "block": self.block}, self._count)
        return found

    @property
    def _num_samples(self) -> int:
        return int(self._index["samples"])

    def _count(self) -> dict[str, Any]:
        """Read the iterable to its end."""
        with _outside_of_workers():
            iterable = self.open_iterable()
            states, samples, iterator = [], 0, iter(iterable)
            while True:
                states.append(iterable.state_dict() if isinstance(iterable, Resumable) else None)
                read = sum(1 for _ in islice(iterator, self.block))
                samples += read
                if read < self.block:
                    return {"samples": samples, "states": states}

    def read(self, block: int) -> Sequence[Any]:
        """Read a block, from where the one before has ended if that was read."""
        with _outside_of_workers():
            iterator = self._open.pop(block)
            if iterator is None:
                iterable, skipped = self.open_iterable(), block * self.block
                state = self._index["states"][block]
                if skipped and state is not None and isinstance(iterable, Resumable):
                    iterable.load_state_dict(state)
                    skipped = 0
                iterator = islice(iter(iterable), skipped, None)
            samples = list(islice(iterator, self.block))
        self._open.add(block + 1, iterator)
        return samples


@contextmanager
def _outside_of_workers() -> Iterator[None]:
    """Return a context manager within which `torch.utils.data.get_worker_info` returns None.

    Iterables distribute their samples to the workers that it names, but a part must be whole in each.
    """
    module: Any = worker_module
    info, module._worker_info = module._worker_info, None  # noqa: SLF001 - there is no public way
    try:
        yield
    finally:
        module._worker_info = info  # noqa: SLF001


class _OpenIterators:
    """Iterators by the block that they read next; a process that is given a copy opens its own."""

    # Not in the `__dict__`, where a change would be one of the dataset.
    __slots__ = ("_iterators", "_process")

    def __init__(self) -> None:
        self._iterators: dict[int, Iterator[Any]] = {}
        self._process = os.getpid()

    def __reduce__(self) -> tuple[type[_OpenIterators], tuple[()]]:
        return type(self), ()

    def pop(self, block: int) -> Iterator[Any] | None:
        """Return the iterator that reads a block next, if there is one."""
        if self._process != os.getpid():
            # A process that was forked shares the positions of open files.
            self.__init__()  # type: ignore[misc]
        return self._iterators.pop(block, None)

    def add(self, block: int, iterator: Iterator[Any]) -> None:
        """Keep an iterator, and close the oldest of too many."""
        self._iterators[block] = iterator
        while len(self._iterators) > _MOST_OPEN:
            del self._iterators[next(iter(self._iterators))]
