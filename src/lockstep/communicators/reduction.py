"""The sum over all ranks of what each has of some tensors, as `ordered` has planned it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lockstep.communicators.arena import Arena
from lockstep.communicators.channel import Channel
from lockstep.communicators.ordered import Plan
from lockstep.communicators.stage import Flats, Job, Stage
from lockstep.communicators.wire import WireFormat
from lockstep.tree import Tensors

AHEAD: Final = 2
"""Buckets. So many are on their way to their owners while one is added up, and as many on their way back."""

ARENAS: Final = 2 * AHEAD + 1
"""So many buckets are under way at once, each with memory of its own."""


class Reduction:
    """A sum over all ranks, of tensors that this rank brings one after the other.

    Args:
        channel: Joins the ranks.
        plan: What is sent, and who adds it up.
        like: Tensors that have the shapes, dtypes and devices of the result.
        divisor: The sum is divided by it, unless it is 1.
        wire: What messages look like.
        arenas: `ARENAS` of them, which nobody else uses until the end.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        like: Sequence[torch.Tensor],
        *,
        divisor: float,
        wire: WireFormat,
        arenas: Sequence[Arena],
    ) -> None:
        own = [node for node, rank in enumerate(plan.ranks) if rank == channel.rank]
        self._terms: dict[int, Flats] = {node: {} for node in own}
        self._roots: Flats = {}
        self._results: Tensors = [None] * len(like)
        self._like = like
        self._present = plan.present
        job = Job(channel, plan.ranks, self._terms, self._roots, wire, divisor)
        self._stages = [
            Stage(job, bucket, arenas[index % ARENAS]) for index, bucket in enumerate(plan.buckets)
        ]

    def bring(self, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Bring what this rank has of one tensor.

        Args:
            index: Which tensor.
            tensors: One for each partial sum of this rank; None where it has none. They are changed, and the
                first of them will hold the result.
        """
        for terms, tensor in zip(self._terms.values(), tensors, strict=True):
            if tensor is not None:
                terms[index] = tensor.detach().reshape(-1)
                if index not in self._roots:
                    self._roots[index] = terms[index]
                    self._results[index] = tensor

    @torch.no_grad()
    def finish(self) -> Tensors:
        """Give the sums, one entry a tensor, once everything has been brought."""
        for index in self._present - self._roots.keys():
            fresh = torch.empty_like(self._like[index])
            self._roots[index] = fresh.reshape(-1)
            self._results[index] = fresh
        self._run()
        for index, result in enumerate(self._results):
            if result is not None and result.data_ptr() != self._roots[index].data_ptr():
                result.copy_(self._roots[index].view(result.shape))
        return self._results

    def _run(self) -> None:
        """Take all stages through their steps, with some under way in either direction."""
        stages = self._stages
        for step in range(len(stages) + 2 * AHEAD):
            if step < len(stages):
                stages[step].scatter()
            if 0 <= step - AHEAD < len(stages):
                stages[step - AHEAD].add_up()
            if step >= 2 * AHEAD:
                stages[step - 2 * AHEAD].collect()
