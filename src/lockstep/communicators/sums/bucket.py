"""One bucket of a sum over ranks: to the owners, added up, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from lockstep.communicators.sums.planning import Bucket, Segment
from lockstep.communicators.sums.wire import ScratchBuffer, WireFormat
from lockstep.communicators.transport import Channel, Parcel, Posted
from lockstep.tree import divide

SCATTER: Final = 1
GATHER: Final = 2
"""Tags that keep the way to the owners apart from the way back."""

Flats: TypeAlias = "dict[int, torch.Tensor]"
"""Tensors by their index, flat."""

Arriving: TypeAlias = "list[tuple[torch.Tensor, torch.Tensor]]"
"""Messages, each with the tensor that it fills."""


@dataclass(frozen=True, slots=True)
class SumContext:
    """What all buckets of one sum have in common.

    Attributes:
        channel: Joins the ranks.
        ranks: The rank that holds each node.
        terms: What each node of this rank has. Its memory is used.
        roots: Where the sums shall lie; it may be the memory of a term.
        wire: What messages look like.
        divisor: The sum is divided by it, unless it is 1.
    """

    channel: Channel
    ranks: Sequence[int]
    terms: Mapping[int, Flats]
    roots: Flats
    wire: WireFormat
    divisor: float


class BucketTransfer:
    """A bucket on its way; the three steps are taken once each, in order.

    The owner of a run adds it up in the memory of its own terms, and all others let the sum arrive in theirs:
    it is made only when what lay there has reached the owner.

    Args:
        job: The sum it is part of.
        bucket: Which elements.
        arena: Memory that is this stage's until `collect` has returned.
    """

    def __init__(self, job: SumContext, bucket: Bucket, arena: ScratchBuffer) -> None:
        self._job = job
        self._runs = bucket.runs
        self._arena = arena
        self._rank = job.channel.rank
        self._others = [rank for rank in range(job.channel.size) if rank != self._rank]
        self._scattered = Posted()
        self._gathered = Posted()
        self._terms_arriving: Arriving = []
        self._sums_arriving: Arriving = []
        self._terms: dict[Segment, list[torch.Tensor]] = {}
        self._apart: list[tuple[Segment, torch.Tensor]] = []

    def scatter(self) -> None:
        """Begin to send what this rank has to the owners, and to receive what it owns."""
        self._arena.clear()
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        for run in self._runs:
            for node in run.nodes:
                if self._job.ranks[node] == self._rank:
                    self._send_term(run, node, sends)
                elif self._is_here(run):
                    term = self._arena.take(run.size, self._dtype(run))
                    receives.append((self._expect(term, self._terms_arriving), self._job.ranks[node]))
                    self._terms.setdefault(run, []).append(term)
        self._scattered = self._job.channel.post(sends, receives, SCATTER)
        if not self._job.channel.is_in_order:
            # Who is ready to receive need not be asked before he is sent to.
            self._gathered = self._job.channel.post([], self._receive_sums(), GATHER)

    def add_up(self) -> None:
        """Wait for what this rank owns, add it up, divide it, and begin to send the sums to all."""
        self._receive(self._scattered, self._terms_arriving)
        sends: list[Parcel] = []
        for run in self._runs:
            if self._is_here(run):
                target = self._target(run)
                self._sum(run, target)
                if run.owner is not None:
                    message = self._job.wire.encode(target, self._arena)
                    self._job.wire.decode(message, target)  # the owner keeps what the others get
                    sends.extend((message, other) for other in self._others)
        receives = self._receive_sums() if self._job.channel.is_in_order else []
        posted = self._job.channel.post(sends, receives, GATHER)
        self._gathered.incoming += posted.incoming
        self._gathered.outgoing += posted.outgoing

    def collect(self) -> None:
        """Wait for the sums of all owners, and put them where they belong."""
        self._receive(self._gathered, self._sums_arriving)
        self._job.channel.wait(self._scattered.outgoing)
        self._job.channel.wait(self._gathered.outgoing)
        for run, target in self._apart:
            pieces = _pieces(run, self._job.roots)
            torch._foreach_copy_(pieces, torch.split(target, [piece.numel() for piece in pieces]))

    def _receive_sums(self) -> list[Parcel]:
        """Make room for the sums that others make."""
        return [
            (self._expect(self._target(run), self._sums_arriving), run.owner)
            for run in self._runs
            if run.owner is not None and run.owner != self._rank
        ]

    def _send_term(self, run: Segment, node: int, sends: list[Parcel]) -> None:
        """Send what a node of this rank has of a run to all who add it up."""
        pieces = _pieces(run, self._job.terms[node])
        term = pieces[0]
        if len(pieces) > 1:
            term = torch.cat(pieces, out=self._arena.take(run.size, term.dtype))
        message = self._job.wire.encode(term, self._arena)
        if self._is_here(run):
            self._job.wire.decode(message, term)
            self._terms.setdefault(run, []).append(term)
        if run.owner is None:
            sends.extend((message, other) for other in self._others)
        elif run.owner != self._rank:
            sends.append((message, run.owner))

    def _expect(self, target: torch.Tensor, arriving: Arriving) -> torch.Tensor:
        """Make room for a message that fills a tensor."""
        message = self._job.wire.room(target, self._arena)
        arriving.append((message, target))
        return message

    def _receive(self, posted: Posted, arriving: Arriving) -> None:
        """Wait for messages, and read them."""
        self._job.channel.wait(posted.incoming)
        for message, target in arriving:
            self._job.wire.decode(message, target)

    def _target(self, run: Segment) -> torch.Tensor:
        """Give the memory in which the sum of a run is made or arrives."""
        pieces = _pieces(run, self._job.roots)
        # Where all ranks add up for themselves, this one's term may lie in the root and still be on its way.
        if len(pieces) == 1 and run.owner is not None:
            return pieces[0]
        target = self._arena.take(run.size, pieces[0].dtype)
        self._apart.append((run, target))
        return target

    def _sum(self, run: Segment, target: torch.Tensor) -> None:
        """Add up the terms of a run in the tree's order; no term that is being sent is written to."""
        terms = self._terms.pop(run)
        sent = [run.owner is None and self._job.ranks[node] == self._rank for node in run.nodes]
        for into, other in run.additions[:-1]:
            if sent[into]:
                terms[into] = torch.add(terms[into], terms[other], out=self._arena.take(run.size, target.dtype))
                sent[into] = False
            else:
                terms[into].add_(terms[other])
        if run.additions:
            into, other = run.additions[-1]
            torch.add(terms[into], terms[other], out=target)
        elif terms[0].data_ptr() != target.data_ptr():
            target.copy_(terms[0])
        divide([target], self._job.divisor)

    def _is_here(self, run: Segment) -> bool:
        return run.owner is None or run.owner == self._rank

    def _dtype(self, run: Segment) -> torch.dtype:
        return self._job.roots[run.pieces[0].tensor].dtype


def _pieces(run: Segment, flats: Flats) -> list[torch.Tensor]:
    """View the elements of a run."""
    return [
        flats[piece.tensor] if piece.whole else flats[piece.tensor][piece.start : piece.stop] for piece in run.pieces
    ]
