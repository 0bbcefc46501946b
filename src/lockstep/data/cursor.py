"""Where a run through a dataset stands, and the step from one batch to the next; values only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, TypeAlias

import torch

LastBatch: TypeAlias = Literal["wrap", "short", "drop"]
Order: TypeAlias = "range | torch.Tensor"


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place between two batches.

    Args:
        epoch: How many epochs have ended before it.
        position: How many samples of this epoch lie before it.
        order: The indices of this epoch's samples; a range, or int64 in one dimension.
    """

    epoch: int
    position: int
    order: Order

    @property
    def epoch_detail(self) -> float:
        """The number of epochs passed, fractions included."""
        return self.epoch + self.position / len(self.order)

    def upcoming(self, num_samples: int) -> Sequence[int]:
        """List the next indices of this epoch, fewer where it ends before."""
        indices = self.order[self.position : self.position + num_samples]
        return indices if isinstance(indices, range) else tuple(indices.tolist())


def take(
    cursor: Cursor, batch_size: int, *, last_batch: LastBatch, next_order: Callable[[Cursor], Order]
) -> tuple[Sequence[int], Cursor]:
    """Take one batch, and say where the next begins.

    An epoch that ends exactly with the batch is over: the next batch starts at position 0 of the
    next epoch.

    Args:
        cursor: Where the batch begins.
        batch_size: The number of samples in it, at least 1.
        last_batch: What becomes of a batch that the epoch is too short for. ``"wrap"`` takes the
            rest from the next order, or the next few; ``"short"`` leaves it short; ``"drop"``
            ends the epoch before it.
        next_order: Gives the order that follows the cursor's; called once for each epoch that ends,
            with the place where its part of the batch began.

    Returns:
        The indices of the samples, and the cursor behind them.

    >>> take(Cursor(0, 3, range(5)), 4, last_batch="wrap", next_order=lambda cursor: cursor.order)
    ((3, 4, 0, 1), Cursor(epoch=1, position=2, order=range(0, 5)))
    """
    if last_batch != "wrap":
        return _take_within_epoch(cursor, batch_size, last_batch == "drop", next_order)
    pieces = []
    missing = batch_size
    while missing >= len(cursor.order) - cursor.position:
        pieces.append(cursor.upcoming(missing))
        missing -= len(pieces[-1])
        cursor = Cursor(cursor.epoch + 1, 0, next_order(cursor))
    if missing:
        pieces.append(cursor.upcoming(missing))
        cursor = replace(cursor, position=cursor.position + missing)
    return pieces[0] if len(pieces) == 1 else tuple(chain.from_iterable(pieces)), cursor


def _take_within_epoch(
    cursor: Cursor, batch_size: int, drop: bool, next_order: Callable[[Cursor], Order]
) -> tuple[Sequence[int], Cursor]:
    """Take a batch that stays in its epoch; the epoch is over when no further batch fits."""
    indices = cursor.upcoming(batch_size)
    position = cursor.position + len(indices)
    if len(cursor.order) - position >= (batch_size if drop else 1):
        return indices, replace(cursor, position=position)
    return indices, Cursor(cursor.epoch + 1, 0, next_order(cursor))


def shuffled(num_samples: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Draw the order of one epoch: a random permutation.

    Determinism: a function of the three numbers and of nothing else; no two epochs of a seed share
    their random numbers. The default generator is neither read nor moved.

    >>> sorted(shuffled(4, seed=0, epoch=7).tolist())
    [0, 1, 2, 3]
    """
    # The hash sets two seeds far apart, and counting from there keeps the epochs of one seed distinct.
    generator = torch.Generator().manual_seed((hashed(seed) + epoch) % 2**32)
    return torch.randperm(num_samples, generator=generator)


def hashed(*numbers: int) -> int:
    """Mix numbers into a seed of 32 bits, which is all that PyTorch's generator on the CPU reads of one.

    >>> hashed(0) == hashed(2**32), 0 <= hashed(0, 7) < 2**32
    (False, True)
    """
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "little")
