"""Tensors sent from rank to rank, and waits that end."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from lockstep.communicators.failures import Watch
from lockstep.errors import OrderError, PeerError

PAIR: Final = 2
"""Ranks that have only each other to send to."""
LONGEST: Final = 300e-6
"""Seconds. Between ranks that are all there, an exchange takes about as long."""
LONGEST_PAIR: Final = 20e-3
"""Seconds, for two ranks. Their message comes behind gradients that the transport's own threads add up; for
more ranks a thread of this process does, which needs Python for it."""

Parcel: TypeAlias = "tuple[torch.Tensor, int]"
"""A tensor without gaps, and the rank it goes to or comes from."""

Works: TypeAlias = "list[tuple[dist.Work | None, int | None]]"


@dataclass(slots=True)
class Posted:
    """What is under way, with the rank at the other end: None where one piece of work stands for several.

    Attributes:
        incoming: What is received, and on GPUs what is sent.
        outgoing: What is sent.
    """

    incoming: Works = field(default_factory=list)
    outgoing: Works = field(default_factory=list)


class Channel:
    """The ranks of one process group, each within reach of the other.

    What two ranks send each other under one tag arrives in the order it was sent. A group on GPUs knows no
    tags: there, calls must come in the same order on all ranks.

    Args:
        group: The group.
        timeout: Seconds that a rank waits for another before it raises.
        watch: Knows which rank has failed.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float, watch: Watch) -> None:
        # Held by torch.distributed, which is to end it: it must not outlive that in a communicator.
        self._group = weakref.ref(group)
        self.watch = watch
        watch.protect(group)
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.bytes_sent = 0
        """What this rank has sent so far, without what the transport adds."""
        self.looks = looks_for(self.size)
        """Seconds for which to look for the end of a message before sleeping."""
        self._timeout = timedelta(seconds=timeout)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group.

        Raises:
            OrderError: It has been destroyed.
        """
        group = self._group()
        if group is None:
            raise OrderError("A communicator is of no use after torch.distributed.destroy_process_group.")
        return group

    @property
    def is_in_order(self) -> bool:
        """Whether all ranks must post what belongs together at the same time, as NCCL demands."""
        return dist.get_backend(self.group) != "gloo"

    @property
    def message_device(self) -> torch.device:
        """A device whose tensors the group can send: the CPU where it can, else this process's GPU."""
        if "cpu:" in dist.get_backend_config(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def post(self, sends: Sequence[Parcel], receives: Sequence[Parcel], tag: int) -> Posted:
        """Begin to send and to receive; tensors must stay as they are until `wait` has returned.

        Args:
            sends: What goes out.
            receives: What is written to, in the order in which each rank sends.
            tag: Sets these apart from what is under way for other reasons.
        """
        self.bytes_sent += sum(tensor.nbytes for tensor, _ in sends)
        if any(tensor.is_cuda for tensor, _ in (*receives, *sends)):
            return Posted(incoming=[(work, None) for work in self._post_as_one(sends, receives)])
        posted = Posted()
        rank: int | None = None
        try:
            for tensor, rank in receives:
                work = dist.irecv(tensor, group=self.group, group_src=rank, tag=tag)
                posted.incoming.append((work, rank))
            for tensor, rank in sends:
                work = dist.isend(tensor, group=self.group, group_dst=rank, tag=tag)
                posted.outgoing.append((work, rank))
        except RuntimeError as error:
            raise self._lost(rank, error) from error
        return posted

    def _post_as_one(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[dist.Work]:
        """Post what NCCL must know at once, lest two ranks wait for each other."""
        incoming = [dist.P2POp(dist.irecv, tensor, group=self.group, group_peer=rank) for tensor, rank in receives]
        outgoing = [dist.P2POp(dist.isend, tensor, group=self.group, group_peer=rank) for tensor, rank in sends]
        return dist.batch_isend_irecv([*incoming, *outgoing])

    def wait(self, works: Works) -> None:
        """Wait until what is under way has been sent or has arrived, and forget it.

        Raises:
            PeerError: A rank is gone, or has not answered in time.
        """
        with self.watch.waiting():
            for work, rank in works:
                try:
                    if work is not None:
                        work.wait(self._timeout)
                except RuntimeError as error:
                    raise self._lost(rank, error) from error
        works.clear()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Surround a call of torch.distributed that waits by itself.

        Raises:
            PeerError: A rank is gone, or has not answered in time.
        """
        with self.watch.waiting():
            try:
                yield
            except RuntimeError as error:
                raise self._lost(None, error) from error

    def _lost(self, rank: int | None, error: RuntimeError) -> PeerError:
        """Say which rank is lost: as the watch knows it, else in the words of the transport."""
        found = self.watch.explain()
        if found is not None:
            return found
        who = "A rank" if rank is None else f"Rank {rank}"
        seconds = self._timeout.total_seconds()
        reason = str(error).strip().partition("\n")[0]
        return PeerError(f"{who} is gone or has not answered within {seconds:g} s: {reason}", rank=rank)


def looks_for(num_ranks: int) -> float:
    """Return the seconds for which looking is worth a core.

    Args:
        num_ranks: How many there are, on this machine or on any.

    Returns:
        0 where this process may not use a core for each, so that one that looks would take it from another;
        and where the system does not say (macOS).

    >>> looks_for(1_000_000)
    0.0
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        return 0.0
    if cores < num_ranks:
        return 0.0
    return LONGEST_PAIR if num_ranks == PAIR else LONGEST


def spin_wait(work: dist.Work, seconds: float) -> None:
    """Look again and again whether work on the host has ended, for a short time.

    A thread that sleeps is woken late, and its core may go to another rank meanwhile, with which it then
    takes turns of milliseconds. What else can run on the core, such as the transport's own threads, runs
    between two looks.

    Args:
        work: What is under way. It has not always ended when this returns, and may have failed.
        seconds: The longest that this takes.
    """
    until = time.perf_counter() + seconds
    while not work.is_completed() and time.perf_counter() < until:
        os.sched_yield()
