"""Compute a sum over ranks twice, and find the rank that is wrong where a term or the sum differs.

The second computation is that of a single process: every rank receives all terms, and adds them in the order of the
tree. By the law of this library it has the same bits as the sum that owners compute.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep.communicators.communicator import SumAudit, SumFault
from lockstep.communicators.sums.bucket import FlatTensors, flat_views
from lockstep.communicators.sums.ordered_sum import OrderedSum
from lockstep.communicators.sums.planning import Segment, SumPlan
from lockstep.communicators.sums.wire import EXACT
from lockstep.communicators.transport import Channel, broadcast, exchange
from lockstep.digest import checksum
from lockstep.tree import PartialSum, Tensors


@torch.no_grad()
def audited_sum(
    audit: SumAudit, channel: Channel, plan: SumPlan, partials: Sequence[PartialSum], like: Sequence[torch.Tensor]
) -> Tensors:
    """Sum over ranks as planned, and compare every term and sum with those of a second computation.

    Args:
        audit: What was recorded of the partial sums of this rank; receives what is found.
        channel: The connection to the other ranks.
        plan: The plan of a sum that owners compute.
        partials: The partial sums of this rank, all dense. Their memory is overwritten.
        like: Tensors that have the shapes, dtypes and devices of the result.
    """
    changed = audit.has_changed(partials)
    own = (node for node, rank in enumerate(plan.ranks) if rank == channel.rank)
    terms = {node: _flattened(each.tensors) for node, each in zip(own, partials, strict=True)}
    segments = [segment for bucket in plan.buckets for segment in bucket.segments]
    again = [_added_again(channel, plan, each, terms, like) for each in segments]
    added: dict[Segment, list[int]] = {}
    ordered = OrderedSum(channel, plan, like, wire=EXACT, added=added)
    for index in reversed(range(len(like))):
        ordered.add(index, [partial.tensors[index] for partial in partials])
    sums = ordered.finish()
    results = _flattened(sums)
    found = [checksum(torch.cat(flat_views(each, results))) for each in segments]
    row = [changed, [(*each, found[at], added.get(segments[at], ())) for at, each in enumerate(again)]]
    rows = [json.loads(each) for each in exchange(channel, json.dumps(row).encode())]
    audit.fault = audit.fault or next(_faults(plan, segments, rows), None)
    return sums


def _flattened(tensors: Tensors) -> FlatTensors:
    """Return the dense tensors of a list as flat ones, by their indices."""
    return {index: each.detach().reshape(-1) for index, each in enumerate(tensors) if each is not None}


def _added_again(
    channel: Channel, plan: SumPlan, segment: Segment, own: Mapping[int, FlatTensors], like: Sequence[torch.Tensor]
) -> tuple[list[int], int]:
    """Receive all terms of a segment and add them; return the checksums of the terms and of the sum."""
    terms: list[torch.Tensor] = []
    for node in segment.nodes:
        if node in own:
            term = torch.cat(flat_views(segment, own[node]))
        else:
            term = like[segment.pieces[0].tensor].new_empty(segment.size)
        broadcast(channel, [term], plan.ranks[node])
        terms.append(term)
    seals = list(map(checksum, terms))
    last = 0
    for last, other in segment.additions:
        terms[last].add_(terms[other])
    return seals, checksum(terms[last])


def _faults(plan: SumPlan, segments: Sequence[Segment], rows: Sequence[Any]) -> Iterator[SumFault]:
    """Yield what is wrong, from the beginning of the sum to its end.

    Args:
        plan: The plan of the sum.
        segments: Its segments.
        rows: Of each rank, whether its terms have changed, and for each segment the checksums of the terms and the sum
            of the second computation, of the result, and of the terms that its owner has added.
    """
    for rank, (changed, _) in enumerate(rows):
        if changed:
            yield rank, f"what rank {rank} had computed has changed before it was summed"
    for at, segment in enumerate(segments):
        seen = [seals[at] for _, seals in rows]
        yield from _faults_of_terms(plan, segment, seen)
        yield from _faults_of_sums(segment.owner or 0, seen)


def _faults_of_terms(plan: SumPlan, segment: Segment, seen: Sequence[Any]) -> Iterator[SumFault]:
    """Yield which ranks had other terms of a segment than the rank that has computed them."""
    for place, node in enumerate(segment.nodes):
        sender = plan.ranks[node]
        sent = seen[sender][0][place]
        for rank, (terms, _, _, added) in enumerate(seen):
            if terms[place] != sent or (added and added[place] != sent):
                yield sender, f"rank {rank} has added another term of rank {sender} than that rank has"


def _faults_of_sums(owner: int, seen: Sequence[Any]) -> Iterator[SumFault]:
    """Yield which ranks have another sum of a segment than the rest."""
    sums, results = [each[1] for each in seen], [each[2] for each in seen]
    # Each rank has added up all terms, and the owner has done so twice.
    ((right, _),) = Counter([*sums, results[owner]]).most_common(1)
    for rank, each in enumerate(sums):
        if each != right or (rank == owner and results[owner] != right):
            yield rank, f"rank {rank} has added the same terms to another sum than the rest"
    for rank, each in enumerate(results):
        if each != right:
            yield rank, f"rank {rank} holds another sum than rank {owner} has sent"
