"""The sum over all ranks of what each has of some tensors, as `ordered` has planned it."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

import torch

from lockstep.communicators.communicator import PendingSum, check_brought, check_complete
from lockstep.communicators.sums.bucket import BucketTransfer, Flats, SumContext
from lockstep.communicators.sums.planning import Plan
from lockstep.communicators.sums.wire import ScratchBuffer, WireFormat
from lockstep.communicators.transport import Channel
from lockstep.errors import OrderError
from lockstep.tree import Tensors

AHEAD: Final = 2
"""Buckets. So many are on their way to their owners at once, and as many on their way back."""

ARENAS: Final = 2 * AHEAD
"""So many buckets are under way at once, each with memory of its own."""


class OrderedSum(PendingSum):
    """A sum over all ranks, made bucket by bucket; see `PendingSum`.

    Args:
        channel: Joins the ranks.
        plan: What is sent, and who adds it up.
        like: Tensors that have the shapes, dtypes and devices of the result.
        divisor: The sum is divided by it, unless it is 1.
        wire: What messages look like.
        arenas: `ARENAS` of them, which nobody else uses until the end.
        background: Whether a thread sends each bucket as soon as all of it has been brought, while the caller
            goes on computing. Otherwise `finish` does all.
    """

    def __init__(
        self,
        channel: Channel,
        plan: Plan,
        like: Sequence[torch.Tensor],
        *,
        divisor: float,
        wire: WireFormat,
        arenas: Sequence[ScratchBuffer],
        background: bool = False,
    ) -> None:
        self._like = like
        self._results: Tensors = [None] * len(like)
        self._roots: Flats = {}
        own = [node for node, rank in enumerate(plan.ranks) if rank == channel.rank]
        self._terms: dict[int, Flats] = {node: {} for node in own}
        self._missing = [set(plan.present[node]) for node in own]
        here = set().union(*self._missing)
        for index in set().union(*plan.present) - here:
            result = torch.empty_like(like[index])
            self._results[index], self._roots[index] = result, result.reshape(-1)
        job = SumContext(channel, plan.ranks, self._terms, self._roots, wire, divisor)
        self._stages = [
            BucketTransfer(job, bucket, arenas[index % ARENAS]) for index, bucket in enumerate(plan.buckets)
        ]
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._readiness: BucketReadiness | None = None
        if background:
            self._readiness = BucketReadiness([bucket.tensors & here for bucket in plan.buckets])
            self._thread = threading.Thread(target=self._work, name="lockstep reduction")
            self._thread.start()

    def bring(self, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Bring what this rank has of one tensor; see `PendingSum.bring`."""
        for terms, missing, tensor in zip(self._terms.values(), self._missing, tensors, strict=True):
            check_brought(index, tensor, awaited=index in missing)
            if tensor is not None:
                terms[index] = tensor.detach().reshape(-1)
                if self._results[index] is None:
                    self._results[index], self._roots[index] = tensor, terms[index]
                missing.discard(index)
        if self._readiness is not None:
            self._readiness.brought(index)

    def finish(self) -> Tensors:
        """Give the sums; see `PendingSum.finish`."""
        check_complete(set().union(*self._missing))
        self._end()
        with torch.no_grad():
            for index, result in enumerate(self._results):
                if result is not None and result.data_ptr() != self._roots[index].data_ptr():
                    result.copy_(self._roots[index].view(result.shape))
        return self._results

    def abandon(self) -> None:
        """Bring zeros for all that is missing; see `PendingSum.abandon`."""
        for index in set().union(*self._missing):
            zeros = torch.zeros_like(self._like[index])
            self.bring(index, [zeros.clone() if index in missing else None for missing in self._missing])
        self._end()

    def give_up(self) -> None:
        """Let the thread end after the buckets that are on their way."""
        if self._readiness is not None:
            self._readiness.give_up()

    def _end(self) -> None:
        """See all buckets to their end."""
        if self._thread is None:
            self._run()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        """Do the thread's work; what goes wrong is raised by who waits for it."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # the others are computing
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            self._error = error
        finally:
            torch.set_num_threads(before)  # which later threads would begin with

    @torch.no_grad()
    def _run(self) -> None:
        """Take all stages through their steps in order, with some under way in either direction.

        No rank waits for a bucket that another has not begun for want of this one's: all take the buckets in
        the same order, and what has been sent needs nothing more of its sender to be received.
        """
        stages = self._stages
        scattered = added = collected = 0
        while collected < len(stages):
            may_scatter = scattered < len(stages) and scattered < added + AHEAD
            if may_scatter and self._is_ready(scattered, wait=scattered == collected):
                stages[scattered].scatter()
                scattered += 1
            elif added < scattered and added < collected + AHEAD:
                stages[added].add_up()
                added += 1
            else:
                stages[collected].collect()
                collected += 1

    def _is_ready(self, bucket: int, *, wait: bool) -> bool:
        """Tell whether all of a bucket has been brought, or wait until it has."""
        if self._readiness is None:
            return True
        if wait:
            self._readiness.wait(bucket)
        return self._readiness.is_ready(bucket)


class BucketReadiness:
    """Buckets that become ready as the tensors they need are brought.

    Args:
        needs: The tensors that each bucket waits for.

    >>> readiness = BucketReadiness([{2, 1}, {1, 0}, set()])
    >>> readiness.brought(2)
    >>> readiness.brought(1)
    >>> [readiness.is_ready(bucket) for bucket in range(3)]
    [True, False, True]
    """

    def __init__(self, needs: Sequence[Collection[int]]) -> None:
        self._given_up = False
        self._ready = [threading.Event() for _ in needs]
        self._left = [len(each) for each in needs]
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)
        for bucket, each in enumerate(needs):
            if not each:
                self._ready[bucket].set()
            for index in each:
                self._waiting[index].append(bucket)

    def brought(self, index: int) -> None:
        """Count a tensor in; called by one thread only."""
        for bucket in self._waiting[index]:
            self._left[bucket] -= 1
            if self._left[bucket] == 0:
                self._ready[bucket].set()

    def is_ready(self, bucket: int) -> bool:
        """Return whether all that a bucket needs has been brought."""
        return self._ready[bucket].is_set() and not self._given_up

    def wait(self, bucket: int) -> None:
        """Wait until all that a bucket needs has been brought.

        Raises:
            OrderError: Nothing more will be.
        """
        self._ready[bucket].wait()
        if self._given_up:
            raise OrderError("Everything announced must be brought before Python ends.")

    def give_up(self) -> None:
        """Let nobody wait any longer."""
        self._given_up = True
        for each in self._ready:
            each.set()


def give_up_at_exit(reductions: weakref.WeakSet[OrderedSum]) -> None:
    """Let Python end though sums are under way that nobody will finish.

    An error between the beginning of a sum and its end may leave a thread that waits for what nobody brings.
    """
    # Python joins its threads before `atexit` functions run, and calls these before that.
    threading._register_atexit(_give_up, weakref.ref(reductions))  # type: ignore[attr-defined]


def _give_up(reference: weakref.ref[weakref.WeakSet[OrderedSum]]) -> None:
    for reduction in list(reference() or ()):
        reduction.give_up()
