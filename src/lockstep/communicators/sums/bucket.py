"""The transfer of one bucket of an ordered sum: to the owners, summed, and back to all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from lockstep.communicators.sums.planning import Bucket, Segment
from lockstep.communicators.sums.wire import ScratchBuffer, WireFormat
from lockstep.communicators.transport import Channel, PeerTensor, PostedWork
from lockstep.tree import divide

TERMS_TAG: Final = 1
"""The tag of terms that are sent to the owners."""
SUMS_TAG: Final = 2
"""The tag of sums that the owners send. A sum must not be taken for a term of the same length."""

FlatTensors: TypeAlias = "dict[int, torch.Tensor]"
"""Flat tensors by the index of the tensor whose memory they view."""

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
        wire: The format of messages.
        divisor: The number by which the sums are divided, unless it is 1.
    """

    channel: Channel
    ranks: Sequence[int]
    terms: Mapping[int, FlatTensors]
    results: FlatTensors
    wire: WireFormat
    divisor: float


class BucketTransfer:
    """The transfer of one bucket, in three steps that must be called once each and in order.

    The owner of a segment sums it in the memory of its own terms. All other ranks receive the sum in the memory of
    theirs. That is safe because the sum can only be computed after what lay there has reached the owner.

    Args:
        context: The sum that the bucket is part of.
        bucket: The elements to sum.
        scratch: Memory that nothing else uses from `send_terms` until `receive_sums` has returned.
    """

    def __init__(self, context: SumContext, bucket: Bucket, scratch: ScratchBuffer) -> None:
        self._context = context
        self._segments = bucket.segments
        self._scratch = scratch
        self._rank = context.channel.rank
        self._others = [rank for rank in range(context.channel.size) if rank != self._rank]
        self._posted_terms = PostedWork()
        self._posted_sums = PostedWork()
        self._terms_arriving: Arriving = []
        self._sums_arriving: Arriving = []
        self._terms: dict[Segment, list[torch.Tensor]] = {}
        self._sums_in_scratch: list[tuple[Segment, torch.Tensor]] = []

    def send_terms(self) -> None:
        """Start to send the terms of this rank to the owners, and to receive terms of what this rank owns."""
        self._scratch.reset()
        sends: list[PeerTensor] = []
        receives: list[PeerTensor] = []
        for segment in self._segments:
            # Nodes ascend on every rank, so the terms of a segment are collected in the order of the tree's leaves,
            # and messages between two ranks are posted in the same order at both ends.
            for node in segment.nodes:
                if self._context.ranks[node] == self._rank:
                    self._send_term(segment, node, sends)
                elif self._is_summed_here(segment):
                    term = self._scratch.allocate(segment.size, self._dtype(segment))
                    receives.append((self._expect(term, self._terms_arriving), self._context.ranks[node]))
                    self._terms.setdefault(segment, []).append(term)
        self._posted_terms = self._context.channel.post(sends, receives, TERMS_TAG)
        if not self._context.channel.posts_must_match:
            # These receives are posted early, so that the owner can send without a further round trip.
            self._posted_sums = self._context.channel.post([], self._sum_receives(), SUMS_TAG)

    def reduce(self) -> None:
        """Wait for the terms of what this rank owns, sum and divide them, and start to send the sums to all ranks."""
        self._receive(self._posted_terms, self._terms_arriving)
        sends: list[PeerTensor] = []
        for segment in self._segments:
            if self._is_summed_here(segment):
                target = self._target(segment)
                self._sum(segment, target)
                if segment.owner is not None:
                    message = self._context.wire.encode(target, self._scratch)
                    # The owner rounds its own copy as well, so that all ranks end with the same bits.
                    self._context.wire.decode(message, target)
                    sends.extend((message, other) for other in self._others)
        # NCCL requires that a receive is posted together with its send, hence not before the sums are there.
        receives = self._sum_receives() if self._context.channel.posts_must_match else []
        posted = self._context.channel.post(sends, receives, SUMS_TAG)
        self._posted_sums.incoming += posted.incoming
        self._posted_sums.outgoing += posted.outgoing

    def receive_sums(self) -> None:
        """Wait for the sums of all owners, and copy them to where they belong."""
        self._receive(self._posted_sums, self._sums_arriving)
        # Memory that is still being sent must not be reused: scratch memory, and results, which are returned next.
        self._context.channel.wait(self._posted_terms.outgoing)
        self._context.channel.wait(self._posted_sums.outgoing)
        for segment, target in self._sums_in_scratch:
            pieces = _views(segment, self._context.results)
            torch._foreach_copy_(pieces, torch.split(target, [piece.numel() for piece in pieces]))

    def _sum_receives(self) -> list[PeerTensor]:
        """Return the tensors that receive the sums of other owners."""
        return [
            (self._expect(self._target(segment), self._sums_arriving), segment.owner)
            for segment in self._segments
            if segment.owner is not None and segment.owner != self._rank
        ]

    def _send_term(self, segment: Segment, node: int, sends: list[PeerTensor]) -> None:
        """Add the term of a node of this rank to what is sent to the ranks that sum the segment."""
        pieces = _views(segment, self._context.terms[node])
        term = pieces[0]
        if len(pieces) > 1:
            term = torch.cat(pieces, out=self._scratch.allocate(segment.size, term.dtype))
        message = self._context.wire.encode(term, self._scratch)
        if self._is_summed_here(segment):
            # Rounded as if it had been sent, so that the sum does not depend on which rank owns the segment.
            self._context.wire.decode(message, term)
            self._terms.setdefault(segment, []).append(term)
        if segment.owner is None:
            sends.extend((message, other) for other in self._others)
        elif segment.owner != self._rank:
            sends.append((message, segment.owner))

    def _expect(self, target: torch.Tensor, arriving: Arriving) -> torch.Tensor:
        """Return a receive buffer for the message that fills a tensor, and add it to the messages to decode."""
        message = self._context.wire.receive_buffer(target, self._scratch)
        arriving.append((message, target))
        return message

    def _receive(self, posted: PostedWork, arriving: Arriving) -> None:
        """Wait for messages, and decode them."""
        self._context.channel.wait(posted.incoming)
        for message, target in arriving:
            self._context.wire.decode(message, target)

    def _target(self, segment: Segment) -> torch.Tensor:
        """Return the memory in which the sum of a segment is computed or received."""
        pieces = _views(segment, self._context.results)
        # If every rank computes the sum, the term of this rank may share the memory of the result while it is still
        # being sent to the others, so the sum must not overwrite it.
        if len(pieces) == 1 and segment.owner is not None:
            return pieces[0]
        target = self._scratch.allocate(segment.size, pieces[0].dtype)
        self._sums_in_scratch.append((segment, target))
        return target

    def _sum(self, segment: Segment, target: torch.Tensor) -> None:
        """Sum the terms of a segment in the order of the tree."""
        terms = self._terms.pop(segment)
        # A term that is being sent must not be written to: its partial sum goes to other memory.
        sent = [segment.owner is None and self._context.ranks[node] == self._rank for node in segment.nodes]
        for into, other in segment.additions[:-1]:
            if sent[into]:
                scratch = self._scratch.allocate(segment.size, target.dtype)
                terms[into] = torch.add(terms[into], terms[other], out=scratch)
                sent[into] = False
            else:
                terms[into].add_(terms[other])
        if segment.additions:
            into, other = segment.additions[-1]
            torch.add(terms[into], terms[other], out=target)
        elif terms[0].data_ptr() != target.data_ptr():
            target.copy_(terms[0])
        divide([target], self._context.divisor)

    def _is_summed_here(self, segment: Segment) -> bool:
        return segment.owner is None or segment.owner == self._rank

    def _dtype(self, segment: Segment) -> torch.dtype:
        return self._context.results[segment.pieces[0].tensor].dtype


def _views(segment: Segment, flats: FlatTensors) -> list[torch.Tensor]:
    """Return views of the elements of a segment, one per piece."""
    return [
        flats[piece.tensor] if piece.whole else flats[piece.tensor][piece.start : piece.stop]
        for piece in segment.pieces
    ]
