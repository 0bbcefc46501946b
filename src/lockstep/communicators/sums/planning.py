"""Plan the ordered sum over ranks: which rank sums which elements, and what is sent for that.

Every rank contributes partial sums, which are nodes of the tree over shards. The elements of all tensors are
concatenated and cut into buckets, and every bucket into one slice per rank. All ranks send their terms of a slice
to the owner of the slice, which sums them in the order of the tree and sends the sum to all ranks. Over W ranks an
element is therefore sent (W - 1)/W times the number of nodes towards its owner, and (W - 1)/W times back; with one
node per rank that is what a ring all-reduce sends. If there is little to send, every rank sends all its terms
to every other rank, and each rank computes the whole sum: that sends more bytes, but needs one step instead of two.

The plan is computed with integers only, so ranks that have the same numbers find the same plan without a message.
Additions are elementwise, so the bits do not depend on where the tensors are cut.
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

SLICE_BYTES: Final = 2**22
"""Bytes. The approximate length of a slice: shorter ones wake threads too often, longer ones leave them idle."""
DIRECT_BYTES: Final = 2**18
"""Bytes. Pieces of this length or more are sent without a copy; shorter ones are cheaper to copy together."""
WHOLE_BYTES: Final = 2**20
"""Bytes. If the terms of all nodes are no longer than this in total, every rank computes the whole sum."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The properties of a tensor that a plan depends on.

    Attributes:
        size: The number of elements.
        width: The number of bytes per element.
        kind: A value that is equal for tensors whose elements may be sent in one message.
    """

    size: int
    width: int
    kind: Hashable


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements that are sent together and summed together.

    Attributes:
        pieces: The parts of tensors that hold the elements; all of one kind, and present in the same nodes.
        size: The number of elements.
        nodes: The nodes that have these elements, as indices into `SumPlan.ranks`.
        additions: The additions that sum the terms, as pairs of indices into `nodes`; see `tree.merge_order`.
        owner: The rank that sums the elements; None if every rank does.
    """

    pieces: tuple[Piece, ...]
    size: int
    nodes: tuple[int, ...]
    additions: tuple[tuple[int, int], ...]
    owner: int | None


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements that are sent, summed and sent back at one time.

    Attributes:
        segments: The segments in the order in which they are sent.
        tensors: The indices of the tensors that must be available before the bucket can start.
    """

    segments: tuple[Segment, ...]
    tensors: frozenset[int]


@dataclass(frozen=True, slots=True)
class SumPlan:
    """The plan of a sum over the partial sums of all ranks.

    Attributes:
        ranks: The rank that holds each node, in order of shards.
        buckets: The buckets in the order in which they start.
        present: For each node, the indices of the tensors that it has.
    """

    ranks: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    present: tuple[frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """The lengths in bytes by which a plan is cut; see the constants of this module."""

    slice: int = SLICE_BYTES
    direct: int = DIRECT_BYTES
    whole: int = WHOLE_BYTES


@lru_cache(maxsize=64)
def plan_sum(
    contributions: tuple[Contribution, ...], tensors: tuple[TensorSpec, ...], sizes: PlanSizes = PlanSizes()
) -> SumPlan:
    """Plan the sum of the contributions of all ranks.

    Args:
        contributions: One contribution per rank. Shards must ascend over all of them.
        tensors: The tensors to sum. The last one comes first, in the order in which backward computes gradients.
        sizes: The lengths in bytes by which to cut.

    >>> both = (Contribution((0,), (1,)), Contribution((1,), (1,)))
    >>> plan = plan_sum(both, (TensorSpec(200, 4, "float"),), PlanSizes(whole=0))
    >>> [(segment.owner, segment.pieces[0].start, segment.pieces[0].stop) for segment in plan.buckets[0].segments]
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
        # The additions follow from the numbers of the shards alone, so they are those of a single process, wherever
        # shards run.
        additions = tuple(merge_order([shards[node] for node in nodes]))
        for slices_ in _cut_buckets([tensors[index] for index in group], owners, sizes):
            segments = tuple(
                Segment(pieces, sum(piece.stop - piece.start for piece in pieces), nodes, additions, owner)
                for owner, slice_ in zip(owners, slices_, strict=True)
                for pieces in _segments(slice_, group, tensors, sizes.direct if owner is not None else None)
            )
            buckets.append(Bucket(segments, frozenset(piece.tensor for each in segments for piece in each.pieces)))
    present = tuple(frozenset(index for index in range(len(tensors)) if mask >> index & 1) for mask in masks)
    return SumPlan(ranks, tuple(buckets), present)


def _groups(masks: Sequence[int], tensors: Sequence[TensorSpec]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Group tensors by kind and by the nodes that have them, without tensors that no node has."""
    groups: defaultdict[tuple[Hashable, tuple[int, ...]], list[int]] = defaultdict(list)
    for index in reversed(range(len(tensors))):
        nodes = tuple(node for node, mask in enumerate(masks) if mask >> index & 1)
        if nodes and tensors[index].size:
            groups[tensors[index].kind, nodes].append(index)
    return [(nodes, group) for (_, nodes), group in groups.items()]


def _cut_buckets(
    tensors: Sequence[TensorSpec], owners: Sequence[int | None], sizes: PlanSizes
) -> Iterator[list[list[Piece]]]:
    """Cut tensors into buckets, and each bucket into one slice per owner."""
    num_bytes = sum(tensor.size * tensor.width for tensor in tensors)
    num_buckets = max(1, num_bytes // (sizes.slice * len(owners)))
    cut = slices([tensor.size for tensor in tensors], num_buckets * len(owners))
    for start in range(0, len(cut), len(owners)):
        yield cut[start : start + len(owners)]


def _segments(
    pieces: Sequence[Piece], group: Sequence[int], tensors: Sequence[TensorSpec], direct: int | None
) -> Iterator[tuple[Piece, ...]]:
    """Yield each long piece alone, and the short pieces between two long ones together."""

    def alone(piece: Piece) -> int:
        # Every tensor has a different number, so that `groupby` does not join long pieces that follow each other.
        long = direct is not None and (piece.stop - piece.start) * tensors[group[piece.tensor]].width >= direct
        return piece.tensor + 1 if long else 0

    for _, together in groupby(pieces, alone):
        yield tuple(Piece(group[piece.tensor], piece.start, piece.stop, piece.whole) for piece in together)
