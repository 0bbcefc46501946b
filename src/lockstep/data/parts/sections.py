"""The order of samples that are read side by side from several places of a dataset."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import chain, pairwise
from typing import Final, final

import torch

from lockstep.data.cursor import hash_to_seed, shuffled_order
from lockstep.plan import cut

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
        self.numbers = {"batch_size": batch_size, "num_sections": num_sections}
        """The numbers on which the order depends besides the dataset and the key."""
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
