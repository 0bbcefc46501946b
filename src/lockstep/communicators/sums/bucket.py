"""The transfer of one bucket of an ordered sum: to the owners, summed, and back to all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from lockstep.communicators.sums.planning import Bucket, Segment
from lockstep.communicators.sums.wire import WireFormat
from lockstep.communicators.transport.channel import Channel, PeerTensor, PostedWork
from lockstep.communicators.transport.packing import begin_all_reduce, unpack

TERMS_TAG: Final = 1
"""The tag of terms that are sent to the owners."""
SUMS_TAG: Final = 2
"""The tag of sums that the owners send. A sum must not be taken for a term of the same length."""

FlatTensors: TypeAlias = "dict[int, torch.Tensor]"
"""Flat tensors by the index of the tensor whose memory they view."""

BeforeAdding: TypeAlias = "Callable[[Segment, Sequence[torch.Tensor]], None]"
"""Looks at the terms of a segment, which it must not change."""

Arriving: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor]]"
"""Messages that are being received, each with the tensor that it is decoded into."""


@dataclass(frozen=True, slots=True)
class SumContext:
    """What all buckets of one sum have in common.

    Attributes:
        channel: The connection to the other ranks.
        ranks: The rank that holds each node.
        terms: The tensors of each node of this rank. Their memory is overwritten.
        results: The tensors that receive the sums. They may share the memory of a term.
        wire: The format of terms.
        wire_back: The format of sums.
        before_adding: Is called with each segment that this rank adds, and its terms; None where nothing is to be done.
    """

    channel: Channel
    ranks: Sequence[int]
    terms: Mapping[int, FlatTensors]
    results: FlatTensors
    wire: WireFormat
    wire_back: WireFormat
    before_adding: BeforeAdding | None = None


class BucketTransfer:
    """The transfer of one bucket, in three steps that must be called once each and in order.

    The owner of a segment sums it in the memory of its own terms. All other ranks receive the sum in the memory of
    theirs. That is safe because the sum can only be computed after what lay there has reached the owner. A segment
    without an owner is summed by the transport, in the memory of the terms.

    Args:
        context: The sum that the bucket is part of.
        bucket: The elements to sum.
    """

    def __init__(self, context: SumContext, bucket: Bucket) -> None:
        self._context = context
        self._segments = bucket.segments
        self._rank = context.channel.rank
        self._others = [rank for rank in range(context.channel.size) if rank != self._rank]
        self._posted_terms = PostedWork()
        self._posted_sums = PostedWork()
        self._terms_arriving: Arriving = []
        self._sums_arriving: Arriving = []
        self._terms: dict[Segment, list[torch.Tensor]] = {}
        self._unplaced: list[tuple[Segment, torch.Tensor]] = []
        """Sums that are not computed or received where they belong."""

    def send_terms(self) -> None:
        """Start to send the terms of this rank to the owners, and to receive terms of what this rank owns."""
        sends: list[PeerTensor] = []
        receives: list[PeerTensor] = []
        for segment in self._segments:
            # Nodes ascend on every rank, so the terms of a segment are collected in the order of the tree's leaves,
            # and messages between two ranks are posted in the same order at both ends.
            for node in segment.nodes:
                if self._context.ranks[node] == self._rank:
                    self._send_term(segment, node, sends)
                elif segment.owner == self._rank:
                    term = self._new(segment)
                    message = self._context.wire.receive_buffer(term)
                    self._terms_arriving.append((message, term))
                    receives.append((message, self._context.ranks[node]))
                    self._terms.setdefault(segment, []).append(term)
        self._context.channel.post(sends, receives, self._posted_terms, TERMS_TAG)
        if not self._context.channel.posts_must_match:
            # These receives are posted early, so that the owner can send without a further round trip.
            self._context.channel.post([], self._sum_receives(), self._posted_sums, SUMS_TAG)

    def reduce(self) -> None:
        """Wait for the terms of what this rank owns, sum them, and start to send the sums to all ranks."""
        self._context.channel.wait(self._posted_terms.incoming)
        for message, term in self._terms_arriving:
            self._context.wire.decode(message, term)
        # What has arrived is not kept until the sum ends.
        self._terms_arriving.clear()
        sends: list[PeerTensor] = []
        for segment in self._segments:
            if segment.owner == self._rank:
                target = self._target(segment)
                self._sum(segment, target)
                message = self._context.wire_back.encode(target)
                # The owner rounds its own copy as well, so that all ranks end with the same bits.
                self._context.wire_back.decode(message, target)
                sends.extend((message, other) for other in self._others)
        # NCCL requires that a receive is posted together with its send, hence not before the sums are there.
        receives = self._sum_receives() if self._context.channel.posts_must_match else []
        self._context.channel.post(sends, receives, self._posted_sums, SUMS_TAG)

    def receive_sums(self) -> None:
        """Wait for the sums of all owners, and copy them to where they belong."""
        self._context.channel.wait(self._posted_sums.incoming)
        for message, target in self._sums_arriving:
            self._context.wire_back.decode(message, target)
        self._sums_arriving.clear()
        # Memory that is still being sent must not be changed: results are returned next.
        self._context.channel.wait(self._posted_terms.outgoing)
        self._context.channel.wait(self._posted_sums.outgoing)
        for segment, flat in self._unplaced:
            unpack(flat, flat_views(segment, self._context.results))
        self._unplaced.clear()

    def _sum_receives(self) -> list[PeerTensor]:
        """Return the tensors that receive the sums of other owners."""
        receives: list[PeerTensor] = []
        for segment in self._segments:
            if segment.owner is not None and segment.owner != self._rank:
                target = self._target(segment)
                message = self._context.wire_back.receive_buffer(target)
                self._sums_arriving.append((message, target))
                receives.append((message, segment.owner))
        return receives

    def _send_term(self, segment: Segment, node: int, sends: list[PeerTensor]) -> None:
        """Add the term of a node of this rank to what is sent to the rank that sums the segment."""
        pieces = flat_views(segment, self._context.terms[node])
        term = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        if segment.owner is None:
            self._posted_terms.incoming += begin_all_reduce(self._context.channel, [term])
            self._unplaced.append((segment, term))
            return
        message = self._context.wire.encode(term)
        if segment.owner == self._rank:
            # Rounded as if it had been sent, so that the sum does not depend on which rank owns the segment.
            self._context.wire.decode(message, term)
            self._terms.setdefault(segment, []).append(term)
        else:
            sends.append((message, segment.owner))

    def _target(self, segment: Segment) -> torch.Tensor:
        """Return the memory in which the sum of a segment is computed or received."""
        pieces = flat_views(segment, self._context.results)
        if len(pieces) == 1:
            return pieces[0]
        target = self._new(segment)
        self._unplaced.append((segment, target))
        return target

    def _sum(self, segment: Segment, target: torch.Tensor) -> None:
        """Sum the terms of a segment in the order of the tree."""
        terms = self._terms.pop(segment)
        if self._context.before_adding is not None:
            self._context.before_adding(segment, terms)
        for into, other in segment.additions[:-1]:
            terms[into].add_(terms[other])
        if segment.additions:
            into, other = segment.additions[-1]
            torch.add(terms[into], terms[other], out=target)
        elif terms[0].data_ptr() != target.data_ptr():
            target.copy_(terms[0])

    def _new(self, segment: Segment) -> torch.Tensor:
        """Return new memory for the elements of a segment."""
        return self._context.results[segment.pieces[0].tensor].new_empty(segment.size)


def flat_views(segment: Segment, flats: FlatTensors) -> list[torch.Tensor]:
    """Return views of the elements of a segment, one per piece."""
    return [
        flats[piece.tensor] if piece.whole else flats[piece.tensor][piece.start : piece.stop]
        for piece in segment.pieces
    ]
