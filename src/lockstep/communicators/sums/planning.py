"""Plan the ordered sum over ranks: which rank sums which elements, and what is sent for that.

Every rank contributes partial sums, which are nodes of the tree over shards. The elements of all tensors are
concatenated and cut into buckets, and every bucket into one slice per rank. All ranks send their terms of a slice
to the owner of the slice, which sums them in the order of the tree and sends the sum to all ranks. Over W ranks an
element is therefore sent (W - 1)/W times the number of nodes towards its owner, and (W - 1)/W times back; with one
node per rank that is what a ring all-reduce sends. A small sum has a single owner, so that it takes few messages; on
the host its terms are rather sent to every rank by one collective (`small`), unless they are rounded on their way.

Where two ranks have one node each, there is only one addition per element. Addition is commutative, so a collective
that adds while it transfers has the bits of the tree, and a bucket is a packet that it sums. Two restrictions remain:
which NaN results from two different NaNs is open, and 16-bit dtypes are excluded, because backends round them in
different ways.

The plan is computed with integers only, so ranks that have the same numbers find the same plan without a message.
Additions are elementwise, so the bits do not depend on where the tensors are cut.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Final

import torch

from lockstep.communicators.communicator import Contribution
from lockstep.communicators.sums.small import size_of_terms
from lockstep.communicators.transport.channel import PAIR_SIZE
from lockstep.communicators.transport.packing import LONG_TENSOR_BYTES, TensorSpec, plan_packets
from lockstep.plan import Piece, slices
from lockstep.tree import merge_order

SLICE_BYTES: Final = 2**22
"""Bytes. The approximate length of a slice: shorter ones wake threads too often, longer ones leave them idle."""
WHOLE_BYTES: Final = 2**20
"""Bytes. Terms of all nodes that are no longer than this in total are sent to every rank by one collective."""
COMMUTING_DTYPES: Final = (torch.float32, torch.float64)
"""The dtypes in which every backend adds two numbers with the single rounding of IEEE 754."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements that are sent together and summed together.

    Attributes:
        pieces: The parts of tensors that hold the elements; all of one dtype and device, and present in the same nodes.
        size: The number of elements.
        nodes: The nodes that have these elements, as indices into `SumPlan.ranks`.
        additions: The additions that sum the terms, as pairs of indices into `nodes`; see `tree.merge_order`.
        owner: The rank that sums the elements; None if the transport adds them.
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
        commutes: Whether the transport adds, because every sum is a single addition.
        is_small: Whether the terms of all nodes together are short.
        body_bytes: The length of the terms of one rank, if those of all ranks may be sent by one collective; or 0.
    """

    ranks: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    present: tuple[frozenset[int], ...]
    commutes: bool
    is_small: bool
    body_bytes: int


@dataclass(frozen=True, slots=True)
class PlanSizes:
    """The lengths in bytes by which a plan is cut; see the constants of this module.

    Attributes:
        slice: The approximate length of a slice.
        direct: The length from which on pieces are sent without a copy.
        whole: The total length up to which all terms are sent to every rank.
    """

    slice: int = SLICE_BYTES
    direct: int = LONG_TENSOR_BYTES
    whole: int = WHOLE_BYTES


def commutes(contributions: Sequence[Contribution], tensors: Sequence[TensorSpec]) -> bool:
    """Return whether two ranks have one partial sum each of the same tensors, in dtypes that are summed exactly.

    Args:
        contributions: The contributions of all ranks.
        tensors: The tensors to sum.

    >>> one, two = Contribution((0,), (3,)), Contribution((4,), (3,))
    >>> commutes([one, two], [TensorSpec(1, torch.float32)] * 2), commutes([one, two, two], [])
    (True, False)
    """
    return (
        len(contributions) == PAIR_SIZE
        and all(len(each.shards) == 1 for each in contributions)
        and contributions[0].present == contributions[1].present
        and all(tensor.dtype in COMMUTING_DTYPES for tensor in tensors)
    )


@lru_cache(maxsize=64)
def plan_sum(
    contributions: tuple[Contribution, ...],
    tensors: tuple[TensorSpec, ...],
    sizes: PlanSizes = PlanSizes(),
    *,
    exact: bool = True,
) -> SumPlan:
    """Plan the sum of the contributions of all ranks.

    Args:
        contributions: One contribution per rank. Shards must ascend over all of them.
        tensors: The tensors to sum. The last one comes first, in the order in which backward computes gradients.
        sizes: The lengths in bytes by which to cut.
        exact: Whether terms are sent as they are, so that the transport may add them.

    >>> both = (Contribution((0, 1), (1, 1)), Contribution((2,), (1,)))
    >>> plan = plan_sum(both, (TensorSpec(200, torch.float32),), PlanSizes(whole=0))
    >>> [(segment.owner, segment.pieces[0].start, segment.pieces[0].stop) for segment in plan.buckets[0].segments]
    [(0, 0, 128), (1, 128, 200)]
    """
    ranks = tuple(rank for rank, each in enumerate(contributions) for _ in each.shards)
    shards = [shard for each in contributions for shard in each.shards]
    masks = [mask for each in contributions for mask in each.present]
    adds_in_transit = exact and commutes(contributions, tensors)
    groups = _groups(masks, tensors)
    received = sum(sum(tensors[index].nbytes for index in group) * len(nodes) for nodes, group in groups)
    is_small = received <= sizes.whole
    owners: list[int | None] = [None] if adds_in_transit else [0] if is_small else list(range(len(contributions)))
    buckets: list[Bucket] = []
    for nodes, group in groups:
        # The additions follow from the numbers of the shards alone, so they are those of a single process, wherever
        # shards run.
        additions = tuple(merge_order([shards[node] for node in nodes]))
        cut = _packets if adds_in_transit else _cut_buckets
        for slices_ in cut(group, tensors, len(owners), sizes):
            segments = tuple(
                Segment(pieces, sum(piece.stop - piece.start for piece in pieces), nodes, additions, owner)
                for owner, slice_ in zip(owners, slices_, strict=True)
                for pieces in _segments(slice_, tensors, sys.maxsize if is_small else sizes.direct)
            )
            buckets.append(Bucket(segments, frozenset(piece.tensor for each in segments for piece in each.pieces)))
    present = tuple(frozenset(index for index in range(len(tensors)) if mask >> index & 1) for mask in masks)
    body = max(size_of_terms(each, tensors) for each in contributions) if is_small else sys.maxsize
    return SumPlan(ranks, tuple(buckets), present, adds_in_transit, is_small, 0 if body == sys.maxsize else body)


def _groups(masks: Sequence[int], tensors: Sequence[TensorSpec]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Group tensors by kind and by the nodes that have them, without tensors that no node has."""
    groups: defaultdict[tuple[torch.dtype, torch.device, tuple[int, ...]], list[int]] = defaultdict(list)
    for index in reversed(range(len(tensors))):
        nodes = tuple(node for node, mask in enumerate(masks) if mask >> index & 1)
        if nodes and tensors[index].size:
            groups[tensors[index].dtype, tensors[index].device, nodes].append(index)
    return [(nodes, group) for (_, _, nodes), group in groups.items()]


def _cut_buckets(
    group: Sequence[int], tensors: Sequence[TensorSpec], num_owners: int, sizes: PlanSizes
) -> Iterator[list[list[Piece]]]:
    """Cut tensors into buckets, and each bucket into one slice per owner."""
    num_bytes = sum(tensors[index].nbytes for index in group)
    num_buckets = max(1, num_bytes // (sizes.slice * num_owners))
    cut = slices([tensors[index].size for index in group], num_buckets * num_owners)
    for start in range(0, len(cut), num_owners):
        yield [
            [Piece(group[each.tensor], each.start, each.stop, each.whole) for each in slice_]
            for slice_ in cut[start : start + num_owners]
        ]


def _packets(
    group: Sequence[int], tensors: Sequence[TensorSpec], _: int, sizes: PlanSizes
) -> Iterator[list[list[Piece]]]:
    """Combine short tensors, and leave each long one alone: the transport cuts them itself."""
    for packet in plan_packets(tensors, group, limit=sizes.direct, alone=sizes.direct):
        yield [[Piece(index, 0, tensors[index].size, whole=True) for index in packet]]


def _segments(pieces: Sequence[Piece], tensors: Sequence[TensorSpec], direct: int) -> Iterator[tuple[Piece, ...]]:
    """Yield each long piece alone, and the short pieces between two long ones together."""

    def alone(piece: Piece) -> int:
        # Every tensor has a different number, so that `groupby` does not join long pieces that follow each other.
        long = (piece.stop - piece.start) * tensors[piece.tensor].dtype.itemsize >= direct
        return piece.tensor + 1 if long else 0

    for _, together in groupby(pieces, alone):
        yield tuple(together)
