"""The ordered sum over ranks, computed bucket by bucket as `planning` has planned it."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Final

import torch

from lockstep.communicators.communicator import PendingSum, check_complete, check_term
from lockstep.communicators.sums.bucket import BucketTransfer, FlatTensors, SumContext
from lockstep.communicators.sums.planning import SumPlan
from lockstep.communicators.sums.wire import ScratchBuffer, WireFormat
from lockstep.communicators.transport import Channel
from lockstep.errors import OrderError
from lockstep.tree import Tensors

MAX_IN_FLIGHT: Final = 2
"""The number of buckets that may be on their way to their owners at once, and as many on their way back."""

NUM_SCRATCH_BUFFERS: Final = 2 * MAX_IN_FLIGHT
"""The number of buckets that may be in progress at once, each with its own scratch buffer."""


class OrderedSum(PendingSum):
    """A sum over all ranks that is computed bucket by bucket; see `PendingSum`.

    Args:
        channel: The connection to the other ranks.
        plan: The plan of what is sent, and of which rank sums it.
        like: Tensors that have the shapes, dtypes and devices of the result.
        divisor: The number by which the sums are divided, unless it is 1.
        wire: The format of messages.
        buffers: `NUM_SCRATCH_BUFFERS` scratch buffers that nothing else uses until the sum has ended.
        background: Whether a thread sends each bucket as soon as it is complete, while the caller continues. If
            not, `finish` does all the work.
    """

    def __init__(
        self,
        channel: Channel,
        plan: SumPlan,
        like: Sequence[torch.Tensor],
        *,
        divisor: float,
        wire: WireFormat,
        buffers: Sequence[ScratchBuffer],
        background: bool = False,
    ) -> None:
        self._like = like
        self._results: Tensors = [None] * len(like)
        self._flat_results: FlatTensors = {}
        own = [node for node, rank in enumerate(plan.ranks) if rank == channel.rank]
        self._terms: dict[int, FlatTensors] = {node: {} for node in own}
        self._missing = [set(plan.present[node]) for node in own]
        here = set().union(*self._missing)
        # A tensor that only other ranks have needs new memory; all other sums replace a term of this rank.
        for index in set().union(*plan.present) - here:
            result = torch.empty_like(like[index])
            self._results[index], self._flat_results[index] = result, result.reshape(-1)
        context = SumContext(channel, plan.ranks, self._terms, self._flat_results, wire, divisor)
        # A bucket starts only after the one `NUM_SCRATCH_BUFFERS` before it has ended, so no scratch buffer is used
        # twice at once.
        self._transfers = [
            BucketTransfer(context, bucket, buffers[index % NUM_SCRATCH_BUFFERS])
            for index, bucket in enumerate(plan.buckets)
        ]
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._readiness: BucketReadiness | None = None
        if background:
            self._readiness = BucketReadiness([bucket.tensors & here for bucket in plan.buckets])
            self._thread = threading.Thread(target=self._run_in_background, name="lockstep reduction")
            self._thread.start()

    def add(self, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Add this rank's terms of one tensor; see `PendingSum.add`."""
        for terms, missing, tensor in zip(self._terms.values(), self._missing, tensors, strict=True):
            check_term(index, tensor, awaited=index in missing)
            if tensor is not None:
                terms[index] = tensor.detach().reshape(-1)
                if self._results[index] is None:
                    self._results[index], self._flat_results[index] = tensor, terms[index]
                missing.discard(index)
        # This must come last, because the thread reads the terms as soon as they count as complete.
        if self._readiness is not None:
            self._readiness.count(index)

    def finish(self) -> Tensors:
        """Return the sums; see `PendingSum.finish`."""
        check_complete(set().union(*self._missing))
        self._wait_for_all()
        with torch.no_grad():
            for index, result in enumerate(self._results):
                # The flat view of a tensor with gaps is a copy, which holds the sum.
                if result is not None and result.data_ptr() != self._flat_results[index].data_ptr():
                    result.copy_(self._flat_results[index].view(result.shape))
        return self._results

    def abandon(self) -> None:
        """Add zeros for all missing tensors; see `PendingSum.abandon`."""
        for index in set().union(*self._missing):
            zeros = torch.zeros_like(self._like[index])
            # Every node gets a clone, because the terms are summed in place.
            self.add(index, [zeros.clone() if index in missing else None for missing in self._missing])
        self._wait_for_all()

    def cancel(self) -> None:
        """Stop the thread after the buckets that are in progress."""
        if self._readiness is not None:
            self._readiness.cancel()

    def _wait_for_all(self) -> None:
        """Complete all buckets, in the background thread if there is one."""
        if self._thread is None:
            self._run()
            return
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run_in_background(self) -> None:
        """Run the sum in its thread, and keep an error for the thread that waits for the sum."""
        before = torch.get_num_threads()
        # The caller is computing on the other cores.
        torch.set_num_threads(1)
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            self._error = error
        finally:
            # Threads that start later would inherit the number.
            torch.set_num_threads(before)

    @torch.no_grad()
    def _run(self) -> None:
        """Run the steps of all transfers in order, with several buckets in progress in either direction."""
        # This cannot deadlock: all ranks start the buckets in the same order, and a message that has been sent can be
        # received without further calls of its sender. So the earliest bucket in progress always continues.
        transfers = self._transfers
        sent = reduced = received = 0
        while received < len(transfers):
            may_send = sent < len(transfers) and sent < reduced + MAX_IN_FLIGHT
            # The loop waits for tensors only if no bucket is in progress: otherwise it completes those first.
            if may_send and self._is_ready(sent, wait=sent == received):
                transfers[sent].send_terms()
                sent += 1
            elif reduced < sent and reduced < received + MAX_IN_FLIGHT:
                transfers[reduced].reduce()
                reduced += 1
            else:
                transfers[received].receive_sums()
                received += 1

    def _is_ready(self, bucket: int, *, wait: bool) -> bool:
        """Return whether all tensors of a bucket are available, after waiting for them if `wait` is true."""
        if self._readiness is None:
            return True
        if wait:
            self._readiness.wait(bucket)
        return self._readiness.is_ready(bucket)


class BucketReadiness:
    """Counts the tensors that are available, and which buckets are complete with them.

    Args:
        needs: For each bucket, the tensors that it waits for.

    >>> readiness = BucketReadiness([{2, 1}, {1, 0}, set()])
    >>> readiness.count(2)
    >>> readiness.count(1)
    >>> [readiness.is_ready(bucket) for bucket in range(3)]
    [True, False, True]
    """

    def __init__(self, needs: Sequence[Collection[int]]) -> None:
        self._cancelled = False
        self._ready = [threading.Event() for _ in needs]
        self._num_missing = [len(each) for each in needs]
        self._waiting: defaultdict[int, list[int]] = defaultdict(list)
        for bucket, each in enumerate(needs):
            if not each:
                self._ready[bucket].set()
            for index in each:
                self._waiting[index].append(bucket)

    def count(self, index: int) -> None:
        """Count a tensor as available. Only one thread may call this, because it takes no lock."""
        for bucket in self._waiting[index]:
            self._num_missing[bucket] -= 1
            if self._num_missing[bucket] == 0:
                self._ready[bucket].set()

    def is_ready(self, bucket: int) -> bool:
        """Return whether all tensors that a bucket needs are available."""
        return self._ready[bucket].is_set() and not self._cancelled

    def wait(self, bucket: int) -> None:
        """Wait until all tensors that a bucket needs are available.

        Raises:
            OrderError: If no further tensors will become available.
        """
        self._ready[bucket].wait()
        if self._cancelled:
            raise OrderError("All announced terms must be added before Python ends.")

    def cancel(self) -> None:
        """Wake all threads that wait, because no further tensors will become available."""
        # This must come before the events: a thread that wakes up must see it.
        self._cancelled = True
        for each in self._ready:
            each.set()


def cancel_at_exit(sums: weakref.WeakSet[OrderedSum]) -> None:
    """Stop the threads of unfinished sums when Python ends.

    An error between the start and the end of a sum may leave a thread that waits for tensors that will never come,
    and Python would wait for that thread.

    Args:
        sums: The sums that have a thread.
    """
    # Python joins its threads before `atexit` functions run, and calls these before that.
    threading._register_atexit(_cancel_all, weakref.ref(sums))  # type: ignore[attr-defined]


def _cancel_all(reference: weakref.ref[weakref.WeakSet[OrderedSum]]) -> None:
    for each in list(reference() or ()):
        each.cancel()
