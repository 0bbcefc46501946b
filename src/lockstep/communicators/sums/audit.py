"""Compute a sum over ranks twice, and find the rank that is wrong where a term or the sum differs.

The owner of a slice adds its terms twice, and one slice after the other is also added by all other ranks, as a single
process would: by the law of this library it then has the same bits. So damage in the memory of a rank or on the way to
another is found in the update, and a rank that always adds wrongly is found when its turn comes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from lockstep.communicators.communicator import SumAudit, SumFault
from lockstep.communicators.sums.bucket import FlatTensors, flat_views
from lockstep.communicators.sums.ordered_sum import OrderedSum, format_back
from lockstep.communicators.sums.planning import Segment, SumPlan
from lockstep.communicators.sums.wire import WireFormat
from lockstep.communicators.transport.channel import Channel
from lockstep.communicators.transport.messages import exchange
from lockstep.communicators.transport.packing import broadcast
from lockstep.digest import checksum, checksums
from lockstep.tree import PartialSum, Tensors


class SeenSlice(NamedTuple):
    """What a rank has seen of a slice of a sum, as checksums.

    Attributes:
        sent: The terms of this rank before they were sent; None for those of other ranks.
        result: The sum that the rank holds in the end.
        added: The terms that the rank has added; empty if others have added them.
        again: The sum of the second computation, if the rank has added the terms.
    """

    sent: Sequence[object]
    result: object
    added: Sequence[object] = ()
    again: object = None


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
    added: dict[Segment, tuple[list[int], int]] = {}

    def add_twice(segment: Segment, terms: Sequence[torch.Tensor]) -> None:
        # Without a reference to `ordered`, which refers to this function.
        added[segment] = _added(segment, terms, format_back(plan, wire))

    ordered = OrderedSum(channel, plan, like, wire=wire, before_adding=add_twice)
    own = (node for node, rank in enumerate(plan.ranks) if rank == channel.rank)
    flats = {node: _flattened(each.tensors) for node, each in zip(own, partials, strict=True)}
    segments = [segment for bucket in plan.buckets for segment in bucket.segments]
    sent = [_sent(each, flats, wire) for each in segments]
    if segments:
        _add_elsewhere(channel, plan, segments[audit.turn % len(segments)], flats, like, wire, add_twice)
    for index in reversed(range(len(like))):
        ordered.add(index, [partial.tensors[index] for partial in partials])
    sums = ordered.finish()
    results = _flattened(sums)
    seen = [
        SeenSlice(seals, checksum(_joined(flat_views(each, results))), *added.get(each, ()))
        for each, seals in zip(segments, sent, strict=True)
    ]
    slices = [([plan.ranks[node] for node in each.nodes], each.owner or 0) for each in segments]
    compare(audit, channel, changed, slices, seen)
    return sums


def _flattened(tensors: Tensors) -> FlatTensors:
    """Return the dense tensors of a list as flat ones, by their indices."""
    return {index: each.detach().reshape(-1) for index, each in enumerate(tensors) if each is not None}


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all pieces in one flat tensor, without a copy where there is one piece."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _rounded(tensor: torch.Tensor, wire: WireFormat) -> torch.Tensor:
    """Return what the message of a tensor holds; the tensor itself if messages are exact."""
    message = wire.encode(tensor)
    if message is tensor:
        return tensor
    target = torch.empty_like(tensor)
    wire.decode(message, target)
    return target


def _sent(segment: Segment, flats: Mapping[int, FlatTensors], wire: WireFormat) -> list[int | None]:
    """Return the checksums of the terms of this rank, rounded as their messages are; None for those of others."""
    return [
        checksum(_rounded(_joined(flat_views(segment, flats[node])), wire)) if node in flats else None
        for node in segment.nodes
    ]


def _added(segment: Segment, terms: Sequence[torch.Tensor], wire_back: WireFormat) -> tuple[list[int], int]:
    """Add the terms of a segment in new memory; return the checksums of the terms and of the sum."""
    sums, last = list(terms), 0
    for last, other in segment.additions:
        sums[last] = sums[last] + sums[other]
    *seals, seal = checksums([*terms, _rounded(sums[last], wire_back)])
    return seals, seal


def _add_elsewhere(  # noqa: PLR0917 - what a segment is summed from
    channel: Channel,
    plan: SumPlan,
    segment: Segment,
    flats: Mapping[int, FlatTensors],
    like: Sequence[torch.Tensor],
    wire: WireFormat,
    add_twice: Callable[[Segment, Sequence[torch.Tensor]], None],
) -> None:
    """Receive all terms of a segment on every rank, and add them on all but the owner, which adds them later."""
    terms: list[torch.Tensor] = []
    for node in segment.nodes:
        if node in flats:
            term = _joined(flat_views(segment, flats[node]))
        else:
            term = like[segment.pieces[0].tensor].new_empty(segment.size)
        broadcast(channel, [term], plan.ranks[node])
        terms.append(_rounded(term, wire))
    if segment.owner != channel.rank:
        add_twice(segment, terms)


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
    """Yield which ranks had other terms of a slice than the ranks that have added them."""
    for place, sender in enumerate(senders):
        for rank, each in enumerate(seen):
            if each.added and each.added[place] != seen[sender].sent[place]:
                yield sender, f"rank {rank} has added another term of rank {sender} than that rank has"


def _faults_of_sums(owner: int, seen: Sequence[SeenSlice]) -> Iterator[SumFault]:
    """Yield which ranks have another sum of a slice than the rest."""
    result = seen[owner].result
    if seen[owner].again != result:
        yield owner, f"rank {owner} has added the same terms to two sums"
    sums = {rank: each.again for rank, each in enumerate(seen) if each.added}
    (right, votes), *others = Counter(sums.values()).most_common()
    for rank, each in sums.items() if others else ():
        if votes == others[0][1]:
            yield None, f"ranks {', '.join(map(str, sums))} have added the same terms to different sums"
        elif each != right:
            yield rank, f"rank {rank} has added the same terms to another sum than the rest"
    for rank, seen_there in enumerate(seen):
        if seen_there.result != result:
            yield rank, f"rank {rank} holds another sum than rank {owner}, which has added it"
