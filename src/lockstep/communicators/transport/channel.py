"""Point-to-point transfers between ranks, and waits that end when a rank fails."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist

from lockstep.communicators.failures.failure import is_of_transport
from lockstep.communicators.failures.watch import Watch
from lockstep.errors import OrderError, PeerError

PAIR_SIZE: Final = 2
"""The size of a group in which each rank has only one other rank to send to."""
SPIN_SECONDS: Final = 300e-6
"""Seconds. An exchange takes about as long if all ranks arrive at the same time."""
SPIN_SECONDS_PAIR: Final = 20e-3
"""Seconds, for two ranks. Their message arrives after gradients, which the transport's own threads sum. With more
ranks a thread of this process sums them, and needs the interpreter for it."""

PeerTensor: TypeAlias = "tuple[torch.Tensor, int]"
"""A contiguous tensor, and the rank that it is sent to or received from."""

Works: TypeAlias = "list[tuple[dist.Work | None, int | None]]"
"""Transfers in progress, each with the other rank; the rank is None if one transfer stands for several."""


@dataclass(slots=True)
class PostedWork:
    """Transfers that have been started.

    Attributes:
        incoming: What is being received. On GPUs it includes what is being sent.
        outgoing: What is being sent.
    """

    incoming: Works = field(default_factory=list)
    outgoing: Works = field(default_factory=list)


class Channel:
    """The connection of this rank to the other ranks of one process group.

    Tensors that one rank sends to another under one tag arrive in the order in which they were sent. A group on
    GPUs has no tags: there, all ranks must make their calls in the same order.

    Args:
        group: The process group.
        timeout: Seconds that a rank waits for another before it raises.
        watch: The watch that knows which rank has failed.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, watch: Watch) -> None:
        # torch.distributed owns the group. A communicator that outlives it must not keep its threads running.
        self._group = weakref.ref(group)
        self.watch = watch
        watch.add_group(group)
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.bytes_sent = 0
        """How many bytes this rank has sent so far, without what the transport adds."""
        self.spin_seconds = spin_seconds_for(self.size)
        """For how many seconds to poll for the end of a message before the thread sleeps."""
        self._timeout = timedelta(seconds=timeout)
        backends = dist.get_backend_config(group).split(",")
        self._reached = {
            "cpu",
            *(kind for kind, _, name in (each.partition(":") for each in backends) if name != "gloo"),
        }
        """The types of devices whose memory the group can send. Gloo sends host memory only."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            OrderError: If the group has been destroyed.
        """
        group = self._group()
        if group is None:
            raise OrderError("A communicator must not be used after torch.distributed.destroy_process_group.")
        return group

    @property
    def posts_must_match(self) -> bool:
        """Whether all ranks must post matching transfers at the same point, as NCCL requires."""
        return dist.get_backend(self.group) != "gloo"

    @property
    def message_device(self) -> torch.device:
        """The device for control messages: the CPU if the group can send its tensors, else this process's GPU."""
        if "cpu:" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        kind = min(self._reached - {"cpu"}, default="cuda")
        return torch.device(kind, torch.accelerator.current_device_index())

    def reachable(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that the group can send: the tensor, or a copy in host memory."""
        if tensor.device.type in self._reached:
            return tensor
        # A copy to pinned memory is several times as fast.
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)

    def connect(self, device: torch.device) -> None:
        """Open the connections between devices of all ranks, by a collective call; every rank must make this call.

        NCCL opens them in the first call that uses a device, which all ranks must then be part of. In an exchange
        between pairs of ranks some may have nothing to send.

        Raises:
            PeerError: If a rank has failed, or has not answered in time.
        """
        if device.type in self._reached - {"cpu"}:
            work = dist.all_reduce(torch.zeros(1, device=device), group=self.group, async_op=True)
            self.wait([(work, None)])

    def post(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], into: PostedWork, tag: int) -> None:
        """Start to send and to receive. The tensors must not be used until `wait` has returned.

        Args:
            sends: The tensors to send, which must be `reachable`, as those to receive into.
            receives: The tensors to receive into, per rank in the order in which that rank sends.
            into: The transfers are added to it.
            tag: Separates these transfers from others that are in progress.
        """
        self.bytes_sent += sum(tensor.nbytes for tensor, _ in sends)
        if any(tensor.device.type != "cpu" for tensor, _ in (*receives, *sends)):
            into.incoming += [(work, None) for work in self._post_as_one(sends, receives)]
            return
        rank: int | None = None
        try:
            # Receives are posted first, because gloo sends data only to a rank that has announced its receive.
            for tensor, rank in receives:
                work = dist.irecv(tensor, group=self.group, group_src=rank, tag=tag)
                into.incoming.append((work, rank))
            for tensor, rank in sends:
                work = dist.isend(tensor, group=self.group, group_dst=rank, tag=tag)
                into.outgoing.append((work, rank))
        except RuntimeError as error:
            raise self._peer_error(rank, error) from error

    def _post_as_one(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]) -> list[dist.Work]:
        """Start all transfers by one call of NCCL."""
        # NCCL runs calls one after the other: with separate calls, two ranks that send first would wait for each
        # other forever. Meanwhile torch holds back `all_reduce` and two other collectives that another thread
        # calls on this group; beside a sum only messages are sent, by calls that it does not hold back.
        incoming = [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=rank) for tensor, rank in receives]
        outgoing = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=rank) for tensor, rank in sends]
        return dist.batch_isend_irecv([*incoming, *outgoing])

    def wait(self, works: Works) -> None:
        """Wait until transfers have ended, and remove them from the list.

        Raises:
            PeerError: If a rank has failed, or has not answered in time.
        """
        with self.watch.waiting():
            for work, rank in works:
                try:
                    if work is not None:
                        work.wait(self._timeout)
                except RuntimeError as error:
                    raise self._peer_error(rank, error) from error
        # Nothing may be waited for twice, and each transfer would keep its tensors alive.
        works.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context for a call of torch.distributed that waits by itself.

        Raises:
            PeerError: If a rank has failed, or has not answered in time.
            RuntimeError: The call's own error, if it says nothing about another rank.
        """
        with self.watch.waiting():
            try:
                yield
            except RuntimeError as error:
                if not is_of_transport(error):
                    raise
                raise self._peer_error(None, error) from error

    def _peer_error(self, rank: int | None, error: RuntimeError) -> PeerError:
        """Return the error for a transfer that failed: by the watch if it knows the cause, else by the transport."""
        # The transport names the rank at the other end, which may itself have ended because of a third one.
        found = self.watch.explain()
        if found is not None:
            return found
        who = "A rank" if rank is None else f"Rank {rank}"
        seconds = self._timeout.total_seconds()
        reason = str(error).strip().partition("\n")[0]
        return PeerError(
            f"{who} is gone or has not answered within {seconds:g} s: {reason}. If all ranks are alive, they do not "
            "make the same calls: add extensions such as an Evaluator on every rank, and call no collective of "
            "torch.distributed in a loss function.",
            rank=rank,
        )


@contextmanager
def refusing_collectives(who: str, why: str) -> Iterator[None]:
    """Check that nothing is sent by torch.distributed inside the ``with`` block.

    Args:
        who: What runs there, the beginning of a sentence.
        why: The reason and the cure, a sentence.

    Raises:
        OrderError: If something was sent, at the end of the block.
    """
    before = _numbers_sent()
    yield
    if _numbers_sent() != before:
        raise OrderError(
            f"{who} must call no collective of torch.distributed, such as all_reduce or all_gather, also under "
            f"`if dist.is_initialized():`. {why}"
        )


def _numbers_sent() -> list[int]:
    """Return how often each group of this process has sent or received something."""
    groups: Any = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()  # noqa: SLF001 - no public list
    found = list[int]()
    for each in groups:
        # Backends of others need not count.
        with suppress(RuntimeError):
            found.append(each._get_sequence_number_for_group())  # noqa: SLF001 - as above
    return found


def spin_seconds_for(num_ranks: int) -> float:
    """Return for how many seconds polling for a message is worth a core.

    Args:
        num_ranks: The number of ranks, on this machine or on others.

    Returns:
        0 if this process may use fewer cores than there are ranks, because a rank that polls would then take its
        core from another; also 0 if the system does not tell the number of cores (macOS).

    >>> spin_seconds_for(1_000_000)
    0.0
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        return 0.0
    if cores < num_ranks:
        return 0.0
    return SPIN_SECONDS_PAIR if num_ranks == PAIR_SIZE else SPIN_SECONDS


def spin_wait(work: dist.Work, seconds: float) -> None:
    """Poll for a short time whether a transfer of host memory has ended.

    A thread that sleeps is woken late, and meanwhile its core may go to another rank, with which the thread then
    takes turns of milliseconds.

    Args:
        work: The transfer. It may still be in progress when this returns, and it may have failed.
        seconds: The longest time to poll, in seconds.
    """
    deadline = time.perf_counter() + seconds
    while not work.is_completed() and time.perf_counter() < deadline:
        # The transport's own threads can use this core between two polls.
        os.sched_yield()
