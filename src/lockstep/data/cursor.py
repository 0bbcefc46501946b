"""The position in a dataset, and the step from one batch to the next, as pure values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol, TypeAlias

import torch

LastBatch: TypeAlias = Literal["wrap", "short", "drop"]


class ComputedOrder(Protocol):
    """The order of an epoch whose indices are computed when they are read."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, part: slice, /) -> tuple[int, ...]:
        """Return the indices at some positions."""


Order: TypeAlias = "range | torch.Tensor | ComputedOrder"


@dataclass(frozen=True, slots=True)
class Cursor:
    """A position between two batches.

    Args:
        epoch: The number of epochs that have ended before it.
        position: The number of samples of this epoch that come before it.
        order: The indices of this epoch's samples, as a range, as a 1-d int64 tensor, or computed.
    """

    epoch: int
    position: int
    order: Order

    @property
    def epoch_detail(self) -> float:
        """The number of epochs passed, including the fraction of the current one."""
        return self.epoch + self.position / len(self.order)

    def upcoming(self, num_samples: int) -> Sequence[int]:
        """Return the next indices of this epoch; fewer if the epoch ends before."""
        indices = self.order[self.position : self.position + num_samples]
        return tuple(indices.tolist()) if isinstance(indices, torch.Tensor) else indices


def take_batch(
    cursor: Cursor, batch_size: int, *, last_batch: LastBatch, next_order: Callable[[Cursor], Order]
) -> tuple[Sequence[int], Cursor]:
    """Return the indices of one batch, and the cursor after it.

    An epoch that ends exactly with the batch is over: the cursor is then at position 0 of the next epoch.

    Args:
        cursor: The position at which the batch starts.
        batch_size: The number of samples in the batch, at least 1.
        last_batch: What happens to a batch for which the epoch has too few samples. ``"wrap"`` completes it from
            the next epoch, or from several; ``"short"`` makes it shorter; ``"drop"`` ends the epoch before it.
        next_order: A function that returns the order of the epoch after that of a cursor. It is called once for
            each epoch that ends, with the cursor at which that epoch's part of the batch started.

    Returns:
        The indices of the samples, and the cursor after them.

    >>> take_batch(Cursor(0, 3, range(5)), 4, last_batch="wrap", next_order=lambda cursor: cursor.order)
    ((3, 4, 0, 1), Cursor(epoch=1, position=2, order=range(0, 5)))
    """
    parts, missing = list[Sequence[int]](), batch_size
    # A batch may span several epochs.
    while missing:
        parts.append(cursor.upcoming(missing))
        missing -= len(parts[-1])
        position = cursor.position + len(parts[-1])
        # An epoch that ends exactly with the batch is over.
        if len(cursor.order) - position >= (batch_size if last_batch == "drop" else 1):
            cursor = Cursor(cursor.epoch, position, cursor.order)
        else:
            cursor = Cursor(cursor.epoch + 1, 0, next_order(cursor))
        if last_batch != "wrap":
            break
    return parts[0] if len(parts) == 1 else tuple(chain.from_iterable(parts)), cursor


def shuffled_order(num_samples: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the order of one epoch as a random permutation.

    Determinism: a function of the three numbers alone; no two epochs of one seed share their random numbers.
    The default generator is neither read nor advanced.

    >>> sorted(shuffled_order(4, seed=0, epoch=7).tolist())
    [0, 1, 2, 3]
    """
    # The hash puts two seeds far apart, and counting from there keeps the epochs of one seed distinct.
    generator = torch.Generator().manual_seed((hash_to_seed(seed) + epoch) % 2**32)
    return torch.randperm(num_samples, generator=generator)


def hash_to_seed(*numbers: int) -> int:
    """Hash integers to a seed of 32 bits, which is all that PyTorch's CPU generator uses of a seed.

    >>> hash_to_seed(0) == hash_to_seed(2**32), 0 <= hash_to_seed(0, 7) < 2**32
    (False, True)
    """
    return int.from_bytes(hashlib.sha256(repr(numbers).encode()).digest()[:4], "little")
