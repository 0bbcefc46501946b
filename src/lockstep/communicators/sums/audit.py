"""Compute a sum over ranks twice, and find the rank that is wrong where a term or the sum differs.

The second computation is that of a single process: every rank receives all terms, and adds them in the order of the
tree. By the law of this library it has the same bits as the sum that owners compute.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from lockstep.communicators.communicator import SumAudit, SumFault
from lockstep.communicators.sums.bucket import FlatTensors, flat_views
from lockstep.communicators.sums.ordered_sum import OrderedSum
from lockstep.communicators.sums.planning import Segment, SumPlan
from lockstep.communicators.sums.wire import WireFormat
from lockstep.communicators.transport import Channel, broadcast, exchange
from lockstep.digest import checksum
from lockstep.tree import PartialSum, Tensors


class SeenSlice(NamedTuple):
    """What a rank has seen of a slice of a sum, as checksums.

    Attributes:
        terms: The terms that the second computation has added.
        again: The sum of the second computation.
        result: The sum that the rank holds in the end.
        added: The terms that the rank has added if it owns the slice; else empty.
    """

    terms: Sequence[object]
    again: object
    result: object
    added: Sequence[object] = ()


@torch.no_grad()
def audited_sum(
    audit: SumAudit,
    channel: Channel,
    plan: SumPlan,
    partials: Sequence[PartialSum],
    like: Sequence[torch.Tensor],
    *,
    wire: WireFormat,
) -> Tensors:
    """Sum over ranks as planned, and compare every term and sum with those of a second computation.

    Args:
        audit: What was recorded of the partial sums of this rank; receives what is found.
        channel: The connection to the other ranks.
        plan: The plan of a sum that owners compute.
        partials: The partial sums of this rank, all dense. Their memory is overwritten.
        like: Tensors that have the shapes, dtypes and devices of the result.
        wire: The format of messages.
    """
    changed = audit.has_changed(partials)
    added: dict[Segment, list[int]] = {}
    ordered = OrderedSum(channel, plan, like, wire=wire, added=added)
    own = (node for node, rank in enumerate(plan.ranks) if rank == channel.rank)
    terms = {node: _flattened(each.tensors) for node, each in zip(own, partials, strict=True)}
    segments = [segment for bucket in plan.buckets for segment in bucket.segments]
    again = [_added_again(channel, plan, each, terms, like, (wire, ordered.wire_back)) for each in segments]
    for index in reversed(range(len(like))):
        ordered.add(index, [partial.tensors[index] for partial in partials])
    sums = ordered.finish()
    results = _flattened(sums)
    seen = [
        SeenSlice(*twice, checksum(torch.cat(flat_views(each, results))), added.get(each, ()))
        for each, twice in zip(segments, again, strict=True)
    ]
    slices = [([plan.ranks[node] for node in each.nodes], each.owner or 0) for each in segments]
    compare(audit, channel, changed, slices, seen)
    return sums


def _flattened(tensors: Tensors) -> FlatTensors:
    """Return the dense tensors of a list as flat ones, by their indices."""
    return {index: each.detach().reshape(-1) for index, each in enumerate(tensors) if each is not None}


def _added_again(  # noqa: PLR0917 - what a segment is summed from
    channel: Channel,
    plan: SumPlan,
    segment: Segment,
    own: Mapping[int, FlatTensors],
    like: Sequence[torch.Tensor],
    wires: tuple[WireFormat, WireFormat],
) -> tuple[list[int], int]:
    """Receive all terms of a segment and add them; return the checksums of the terms and of the sum."""
    wire, wire_back = wires
    terms: list[torch.Tensor] = []
    for node in segment.nodes:
        if node in own:
            term = torch.cat(flat_views(segment, own[node]))
        else:
            term = like[segment.pieces[0].tensor].new_empty(segment.size)
        broadcast(channel, [term], plan.ranks[node])
        # Rounded as its message is.
        wire.decode(wire.encode(term), term)
        terms.append(term)
    seals = list(map(checksum, terms))
    last = 0
    for last, other in segment.additions:
        terms[last].add_(terms[other])
    wire_back.decode(wire_back.encode(terms[last]), terms[last])
    return seals, checksum(terms[last])


def compare(
    audit: SumAudit,
    channel: Channel,
    changed: bool,
    slices: Sequence[tuple[Sequence[int], int]],
    seen: Sequence[SeenSlice],
) -> None:
    """Compare what all ranks have seen of a sum, from its beginning to its end.

    Args:
        audit: Receives what is wrong, unless something was found before.
        channel: The connection to the other ranks.
        changed: Whether the partial sums of this rank have changed before they were summed.
        slices: For each slice of the sum, the rank of each term, and the rank that has added them.
        seen: What this rank has seen of each slice.
    """
    rows = [json.loads(each) for each in exchange(channel, json.dumps([changed, seen]).encode())]
    of_ranks = zip(*([SeenSlice(*each) for each in row] for _, row in rows), strict=True)
    audit.fault = audit.fault or next(_faults([each for each, _ in rows], slices, of_ranks), None)


def _faults(
    changed: Sequence[bool], slices: Sequence[tuple[Sequence[int], int]], seen: Iterable[Sequence[SeenSlice]]
) -> Iterator[SumFault]:
    """Yield what is wrong, given what each rank has seen of each slice."""
    for rank, has_changed in enumerate(changed):
        if has_changed:
            yield rank, f"what rank {rank} had computed has changed before it was summed"
    for (senders, owner), by_rank in zip(slices, seen, strict=True):
        yield from _faults_of_terms(senders, by_rank)
        yield from _faults_of_sums(owner, by_rank)


def _faults_of_terms(senders: Sequence[int], seen: Sequence[SeenSlice]) -> Iterator[SumFault]:
    """Yield which ranks had other terms of a slice than the rank that has computed them."""
    for place, sender in enumerate(senders):
        sent = seen[sender].terms[place]
        for rank, each in enumerate(seen):
            if each.terms[place] != sent or (each.added and each.added[place] != sent):
                yield sender, f"rank {rank} has added another term of rank {sender} than that rank has"


def _faults_of_sums(owner: int, seen: Sequence[SeenSlice]) -> Iterator[SumFault]:
    """Yield which ranks have another sum of a slice than the rest."""
    sums, results = [each.again for each in seen], [each.result for each in seen]
    # Each rank has added up all terms, and the owner has done so twice.
    ((right, _),) = Counter([*sums, results[owner]]).most_common(1)
    for rank, each in enumerate(sums):
        if each != right or (rank == owner and results[owner] != right):
            yield rank, f"rank {rank} has added the same terms to another sum than the rest"
    for rank, each in enumerate(results):
        if each != right:
            yield rank, f"rank {rank} holds another sum than the rest"
