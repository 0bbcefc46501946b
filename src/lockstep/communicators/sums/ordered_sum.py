"""The ordered sum over ranks, computed bucket by bucket as `planning` has planned it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch

from lockstep.communicators.communicator import PendingSum
from lockstep.communicators.sums.bucket import BeforeAdding, BucketTransfer, FlatTensors, SumContext
from lockstep.communicators.sums.planning import SumPlan
from lockstep.communicators.sums.wire import EXACT, WireFormat
from lockstep.communicators.transport.channel import Channel
from lockstep.errors import OrderError
from lockstep.tree import Tensors

MAX_IN_FLIGHT: Final = 2
"""The number of buckets that may be on their way to their owners at once, and as many on their way back."""


class OrderedSum(PendingSum):
    """A sum over all ranks that is computed bucket by bucket; see `PendingSum`.

    Buckets that the transport adds are sent by `add` once they are complete. The others need a thread that adds.

    Args:
        channel: The connection to the other ranks.
        plan: The plan of what is sent, and of which rank sums it.
        like: Tensors that have the shapes, dtypes and devices of the result.
        wire: The format of messages; small sums are sent back exactly.
        background: Whether a thread sends each bucket as soon as it is complete, while the caller continues. If
            not, `finish` does the work that is left.
        stream: The stream of an accelerator, beside that of the caller, on which the thread works; None on CPUs. The
            plan must let owners add.
        before_adding: Is called with each segment that this rank adds, and its terms; None where nothing is to be done.
    """

    def __init__(
        self,
        channel: Channel,
        plan: SumPlan,
        like: Sequence[torch.Tensor],
        *,
        wire: WireFormat,
        background: bool = False,
        stream: torch.Stream | None = None,
        before_adding: BeforeAdding | None = None,
    ) -> None:
        self._channel = channel
        self._stream = stream
        self._like = like
        self._plan = plan
        self._results: Tensors = [None] * len(like)
        self._flat_results: FlatTensors = {}
        own = [node for node, rank in enumerate(plan.ranks) if rank == channel.rank]
        self._terms: dict[int, FlatTensors] = {node: {} for node in own}
        self._missing = [set(plan.present[node]) for node in own]
        # A tensor that only other ranks have needs new memory; all other sums replace a term of this rank.
        for index in set().union(*plan.present) - set().union(*self._missing):
            result = torch.empty_like(like[index])
            self._results[index], self._flat_results[index] = result, channel.reachable(result.reshape(-1))
        back = format_back(plan, wire)
        context = SumContext(channel, plan.ranks, self._terms, self._flat_results, wire, back, before_adding)
        self._transfers = [BucketTransfer(context, bucket) for bucket in plan.buckets]
        self._given: dict[int, tuple[Sequence[torch.Tensor | None], torch.Event | None]] = {}
        """Terms that no bucket has needed yet, each with the event after which they can be read."""
        self._sent = 0
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if stream is not None:
            # Memory that was allocated above may still be in use by what the caller's stream was given before.
            stream.wait_stream(torch.accelerator.current_stream(stream.device))
        if background and not plan.commutes:
            # A daemon: after an error it may wait for tensors that will never come, and Python would wait for it.
            self._thread = threading.Thread(target=self._run_in_background, name="lockstep reduction", daemon=True)
            self._thread.start()

    def add(self, index: int, tensors: Sequence[torch.Tensor | None]) -> None:
        """Add this rank's terms of one tensor; see `PendingSum.add`."""
        for missing, tensor in zip(self._missing, tensors, strict=True):
            if (tensor is not None) != (index in missing):
                what = "is missing" if tensor is None else "was not announced, or was added before"
                raise OrderError(f"`add` must get every announced term once, but a term of tensor {index} {what}.")
            if tensor is not None and tensor.is_sparse:
                raise OrderError(f"`add` must get dense tensors, but a term of tensor {index} is sparse.")
        stream = self._stream
        event = None if stream is None else torch.accelerator.current_stream(stream.device).record_event()
        self._given[index] = tensors, event
        # This must come last, because the thread reads the terms as soon as they count as complete.
        with self._changed:
            for missing in self._missing:
                missing.discard(index)
            self._changed.notify()
        # In the order of buckets and in this thread, because every rank must make the same calls in the same order.
        while self._plan.commutes and self._sent < len(self._transfers) and self._is_complete(self._sent):
            self._send_next()

    def _take(self, index: int) -> None:
        """Copy the terms of one tensor to where they can be sent from, if they are elsewhere."""
        tensors, event = self._given.pop(index)
        if self._stream is not None and event is not None:
            self._stream.wait_event(event)
        for terms, tensor in zip(self._terms.values(), tensors, strict=True):
            if tensor is not None:
                terms[index] = self._channel.reachable(tensor.detach().reshape(-1))
                if self._results[index] is None:
                    self._results[index], self._flat_results[index] = tensor.detach(), terms[index]

    def finish(self) -> Tensors:
        """Wait for the sums; see `PendingSum.finish`."""
        missing = set().union(*self._missing)
        if missing:
            rule = "All announced terms must be added before `finish`"
            raise OrderError(f"{rule}, but those of tensor {min(missing)} were not.")
        self._wait_for_all()
        with torch.no_grad():
            for index in [*self._given]:
                # Empty tensors are in no bucket.
                self._take(index)
            for index, result in enumerate(self._results):
                if self._stream is not None and result is not None:
                    # Its memory may belong to another stream, which would use it again too early.
                    result.record_stream(torch.accelerator.current_stream(result.device))
                # That of a tensor with gaps, or on a device that the group does not reach, is a copy and holds the sum.
                if result is not None and result.data_ptr() != self._flat_results[index].data_ptr():
                    result.copy_(self._flat_results[index].view(result.shape))
        return self._results

    def abandon(self) -> None:
        """Add zeros for all missing tensors; see `PendingSum.abandon`."""
        for index in sorted(set().union(*self._missing), reverse=True):
            zeros = torch.zeros_like(self._like[index], memory_format=torch.contiguous_format)
            # Every node gets a clone, because the terms are summed in place.
            self.add(index, [zeros.clone() if index in missing else None for missing in self._missing])
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Complete all buckets, in the background thread if there is one."""
        if self._thread is None:
            self._run()
            return
        self._thread.join()
        if self._stream is not None:
            # Also after an error: what is freed next may still be read there.
            torch.accelerator.current_stream(self._stream.device).wait_stream(self._stream)
        if self._error is not None:
            raise self._error

    def _run_in_background(self) -> None:
        """Run the sum in its thread, and keep an error for the thread that waits for the sum."""
        before = torch.get_num_threads()
        # The caller is computing on the other cores.
        torch.set_num_threads(1)
        if self._stream is not None:
            # Of this thread, which ends with the sum. A `with` statement would keep its state in the stream itself.
            torch.accelerator.set_stream(self._stream)
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
        transfers, in_order = self._transfers, self._channel.posts_must_match
        reduced = received = 0
        while received < len(transfers):
            may_send = self._sent < len(transfers) and self._sent < reduced + MAX_IN_FLIGHT
            # The loop waits for tensors only if no bucket is in progress: otherwise it completes those first. Where
            # posts must match, it always waits, so that their order is the same on ranks of any speed.
            if may_send and self._is_ready(self._sent, wait=in_order or self._sent == received):
                self._send_next()
            elif reduced < self._sent and reduced < received + MAX_IN_FLIGHT:
                transfers[reduced].reduce()
                reduced += 1
            else:
                transfers[received].receive_sums()
                received += 1

    @torch.no_grad()
    def _send_next(self) -> None:
        for index in self._plan.buckets[self._sent].tensors:
            if index in self._given:
                self._take(index)
        self._transfers[self._sent].send_terms()
        self._sent += 1

    def _is_ready(self, bucket: int, *, wait: bool) -> bool:
        """Return whether all tensors of a bucket are available, after waiting for them if `wait` is true."""
        with self._changed:
            if wait:
                self._changed.wait_for(partial(self._is_complete, bucket))
            return self._is_complete(bucket)

    def _is_complete(self, bucket: int) -> bool:
        """Return whether this rank has been given all that it has of the tensors of a bucket."""
        return all(map(self._plan.buckets[bucket].tensors.isdisjoint, self._missing))


def format_back(plan: SumPlan, wire: WireFormat) -> WireFormat:
    """Return the format in which sums are sent back: they are rounded once more only where that saves time.

    Args:
        plan: The plan of the sum.
        wire: The format of terms.
    """
    return EXACT if plan.is_small else wire
