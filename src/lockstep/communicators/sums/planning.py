"""Plan the ordered sum over ranks: who adds up which elements, and what is sent for it.

Every rank brings partial sums, which are nodes of the tree over shards. The elements of all tensors are laid
end to end and cut into buckets, and every bucket into one slice for each rank. All ranks send what they have
of a slice to the slice's owner, who adds it up in the tree's order and sends the sum to all. So an element
travels (W - 1)/W times the number of nodes towards its owner and (W - 1)/W times back: with one node a rank
just what a ring sends. Where that is little, every rank sends all it has to every other, and each adds
everything up for itself: more bytes, but only one journey.

Integers only: ranks that are given the same numbers reach the same plan without a message. Addition is
elementwise, so no cut shows in the bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Final

from lockstep.communicators.communicator import Contribution
from lockstep.plan import Piece, slices
from lockstep.tree import merge_order

SLICE: Final = 2**22
"""Bytes. About the length of a slice: shorter ones wake threads too often, longer ones leave them idle."""
DIRECT: Final = 2**18
"""Bytes. Pieces from here on travel from their own memory; to copy shorter ones together costs less."""
WHOLE: Final = 2**20
"""Bytes. Where a rank receives no more than this of whole tensors, it adds them up by itself."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What a plan knows of a tensor.

    Attributes:
        size: Its elements.
        width: Bytes of an element.
        kind: Equal for tensors that may travel in one message.
    """

    size: int
    width: int
    kind: Hashable


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements that travel together and are added up at once.

    Attributes:
        pieces: Where they lie; of one kind, and there in the same nodes.
        size: How many they are.
        nodes: The nodes that have them, by their index in `Plan.ranks`.
        additions: The additions that sum them, as pairs of indices into `nodes`; see `tree.merge_order`.
        owner: The rank that adds them up; None where every rank does.
    """

    pieces: tuple[Piece, ...]
    size: int
    nodes: tuple[int, ...]
    additions: tuple[tuple[int, int], ...]
    owner: int | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """What is sent, added up and sent back at one time.

    Attributes:
        runs: In the order in which they are sent.
        tensors: Those that must be there before the bucket can start.
    """

    runs: tuple[Segment, ...]
    tensors: frozenset[int]


@dataclass(frozen=True, slots=True)
class Plan:
    """How the partial sums of all ranks become one.

    Attributes:
        ranks: The rank that holds each node, in order of shards.
        buckets: In the order in which they start.
        present: The tensors that each node has.
    """

    ranks: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    present: tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Where a plan cuts, in bytes; see the constants of this module."""

    slice: int = SLICE
    direct: int = DIRECT
    whole: int = WHOLE


@lru_cache(maxsize=64)
def plan_sum(contributions: tuple[Contribution, ...], tensors: tuple[Extent, ...], sizes: Sizes = Sizes()) -> Plan:
    """Plan the sum of what all ranks bring.

    Args:
        contributions: One for each rank; shards ascend over all of them.
        tensors: What is summed. The last come first, as backward makes them.
        sizes: Where to cut.

    >>> both = (Contribution((0,), (1,)), Contribution((1,), (1,)))
    >>> plan = plan_sum(both, (Extent(200, 4, "float"),), Sizes(whole=0))
    >>> [(run.owner, run.pieces[0].start, run.pieces[0].stop) for run in plan.buckets[0].runs]
    [(0, 0, 128), (1, 128, 200)]
    """
    ranks = tuple(rank for rank, each in enumerate(contributions) for _ in each.shards)
    shards = [shard for each in contributions for shard in each.shards]
    masks = [mask for each in contributions for mask in each.present]
    groups = _groups(masks, tensors)
    received = sum(
        sum(tensors[index].size * tensors[index].width for index in group) * len(nodes) for nodes, group in groups
    )
    owners: list[int | None] = [None] if received <= sizes.whole else list(range(len(contributions)))
    buckets: list[Bucket] = []
    for nodes, group in groups:
        additions = tuple(merge_order([shards[node] for node in nodes]))
        for slices_ in _cut_buckets([tensors[index] for index in group], owners, sizes):
            runs = tuple(
                Segment(pieces, sum(piece.stop - piece.start for piece in pieces), nodes, additions, owner)
                for owner, slice_ in zip(owners, slices_, strict=True)
                for pieces in _runs(slice_, group, tensors, sizes.direct if owner is not None else None)
            )
            buckets.append(Bucket(runs, frozenset(piece.tensor for run in runs for piece in run.pieces)))
    present = tuple(frozenset(index for index in range(len(tensors)) if mask >> index & 1) for mask in masks)
    return Plan(ranks, tuple(buckets), present)


def _groups(masks: Sequence[int], tensors: Sequence[Extent]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Sort tensors by kind and by the nodes that have them; those that nobody has are in no group."""
    groups: defaultdict[tuple[Hashable, tuple[int, ...]], list[int]] = defaultdict(list)
    for index in reversed(range(len(tensors))):
        nodes = tuple(node for node, mask in enumerate(masks) if mask >> index & 1)
        if nodes and tensors[index].size:
            groups[tensors[index].kind, nodes].append(index)
    return [(nodes, group) for (_, nodes), group in groups.items()]


def _cut_buckets(tensors: Sequence[Extent], owners: Sequence[int | None], sizes: Sizes) -> Iterator[list[list[Piece]]]:
    """Cut tensors into buckets, and each of these into a slice for each owner."""
    num_bytes = sum(tensor.size * tensor.width for tensor in tensors)
    num_buckets = max(1, num_bytes // (sizes.slice * len(owners)))
    cut = slices([tensor.size for tensor in tensors], num_buckets * len(owners))
    for start in range(0, len(cut), len(owners)):
        yield cut[start : start + len(owners)]


def _runs(
    pieces: Sequence[Piece], group: Sequence[int], tensors: Sequence[Extent], direct: int | None
) -> Iterator[tuple[Piece, ...]]:
    """Let long pieces travel alone, and the short ones between them together."""

    def alone(piece: Piece) -> int:
        long = direct is not None and (piece.stop - piece.start) * tensors[group[piece.tensor]].width >= direct
        return piece.tensor + 1 if long else 0

    for _, together in groupby(pieces, alone):
        yield tuple(Piece(group[piece.tensor], piece.start, piece.stop, piece.whole) for piece in together)
