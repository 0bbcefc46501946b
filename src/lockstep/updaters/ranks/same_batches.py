"""Describe the batches of an attempt, so that ranks which were given different ones find out before they step.

Ranks exchange a checksum of each batch in every update. They exchange the descriptions only if something differs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final
from zlib import crc32

from lockstep.data import fingerprint
from lockstep.errors import DisagreementError
from lockstep.updaters.attempt.attempt import Described

BATCHES: Final = "batches"
"""The name under which ranks compare what they were given; its value is a list of the checksums of `Described`."""

CONTENTS_EVERY: Final = 16
"""The number of updates from one look at samples in memory to the next; indices are compared in every update."""

CURE: Final = (
    "Every rank must be given the same batches, because lockstep cuts each of them over the ranks itself: remove a "
    "DistributedSampler and every other split of the data by rank, and use seeds that do not depend on the rank. A "
    "DataLoader that shuffles also needs the same torch.manual_seed on every rank, and a dataset that draws from "
    "random or NumPy the same seeds of these. A loss function must not change batches in place that are used again."
)


def describe_batch(batch: Any, name: str, update: int) -> Described:
    """Describe a batch for the other ranks.

    Args:
        batch: The batch.
        name: The name of its iterator; empty for a batch given to `compute_gradients`.
        update: The number of updates that are done, which is the same on every rank.
    """
    found = fingerprint(batch, contents=update % CONTENTS_EVERY == 0)
    return Described(crc32(name.encode(), found.checksum), name, found)


def find_other_batches(
    positions: Sequence[Mapping[str, Any]], name: str, described: Sequence[Sequence[Any]]
) -> DisagreementError:
    """Return the error for ranks that have other batches than rank 0.

    Args:
        positions: Those of all ranks; at least one differs from the first in `name`.
        name: The name of what differs, ``"batch sizes"`` or `BATCHES`.
        described: For each rank a list of `Described`, as JSON values.
    """
    update = positions[0].get("update")
    others = [rank for rank, each in enumerate(positions) if each.get(name) != positions[0].get(name)]
    listed = f"rank {others[0]}" if len(others) == 1 else f"ranks {', '.join(map(str, others))}"
    what = _difference(described[others[0]], described[0])
    return DisagreementError(
        f"The batches of {listed} must be those of rank 0, but in the update after {update} others, {what}. {CURE}",
        rank=others[0],
        subject=name,
        update=update,
    )


def _difference(mine: Sequence[Any], theirs: Sequence[Any]) -> str:
    """Describe the first batch that differs."""
    for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
        if one == other:
            continue
        (_, source, (_, about, indices)), (_, _, (_, about_first, indices_first)) = one, other
        which = "the batch given to `compute_gradients`"
        if source:
            before, count = ([each[1] for each in part].count(source) for part in (mine[:number], mine))
            which = f"the batch of iterator {source!r}" if count == 1 else f"batch {before} of iterator {source!r}"
        if about != about_first:
            return f"{which} is {about} and not {about_first}"
        if indices is not None and indices == indices_first:
            return f"{which} has the same indices, but the samples of its dataset differ ({about} on both)"
        return f"{which} has other samples ({about} on both)"
    return f"there are {len(mine)} batches and not {len(theirs)}"
