"""The communicator over a process group of torch.distributed, and how a process finds its own."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn

from lockstep.communicators.agreement import check_same
from lockstep.communicators.communicator import Communicator, Contribution, PendingSum
from lockstep.communicators.environment import read_environment, timeout_for
from lockstep.communicators.failures import Watch, end_with_agent, watch_group
from lockstep.communicators.joining import join_run
from lockstep.communicators.local import LocalCommunicator
from lockstep.communicators.sums import (
    ARENAS,
    Extent,
    OrderedSum,
    PairSum,
    PlainFormat,
    ScratchBuffer,
    Sizes,
    WireFormat,
    give_up_at_exit,
    is_pair,
    plan_sum,
    split_sparse,
    sum_pair,
    sum_sparse,
    wire_format,
)
from lockstep.communicators.transport import Channel, Table, all_reduce, broadcast, exchange
from lockstep.tree import PartialSum, Tensors

SMALLER: Final = 4
"""Buckets are so many times smaller where they are sent while others are still being computed."""

PLAIN: Final = PlainFormat()


class ProcessCommunicator(Communicator):
    """Joins the processes of a torch.distributed process group.

    Args:
        group: The group; None for the default one. Where that is not initialised, the processes that
            torchrun, `lockstep run`, srun or `launch` tell of are joined first. It stays its owner's.
        compression: Round what travels in ordered sums of float32 and float64: None for every bit, "bf16", or
            "fp16" with a scale in each message. Sums are still made in the tree's order and in the tensors'
            own format, and all ranks get the same bits; but these then depend on how shards are cut over
            ranks.
        timeout: Seconds that a rank waits for another before it raises; None for what ``LOCKSTEP_TIMEOUT``
            says in the environment, else 60.
        watch: Tells which rank has failed; by default one over the group's own store.

    Raises:
        RuntimeError: There is no such group, and the environment tells of none.
        PeerError: A rank did not come in time.
        ValueError: There is no such compression.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        compression: Literal["bf16", "fp16"] | None = None,
        timeout: float | None = None,
        watch: Watch | None = None,
    ) -> None:
        end_with_agent(os.environ)
        seconds = timeout_for(timeout, os.environ)
        if group is None and not dist.is_initialized():
            watch = join_run(seconds)
        found = dist.distributed_c10d._get_default_group() if group is None else group  # noqa: SLF001 - WORLD may be None
        self._channel = Channel(found, seconds, watch_group(found, seconds) if watch is None else watch)
        self._wire = PLAIN if compression is None else wire_format(compression)
        self._sizes = Sizes()
        self._arenas: dict[torch.device, list[ScratchBuffer]] = {}
        self._underway = weakref.WeakSet[OrderedSum]()
        give_up_at_exit(self._underway)

    @property
    def rank(self) -> int:
        """This process's index in the group."""
        return self._channel.rank

    @property
    def size(self) -> int:
        """How many processes the group has."""
        return self._channel.size

    @property
    def watch(self) -> Watch:
        """Tells what the other ranks are doing, and whether one has failed."""
        return self._channel.watch

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded on its way; see `Communicator.exact`."""
        return self._wire is PLAIN

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent so far, without what the transport adds."""
        return self._channel.bytes_sent

    def exchange(self, payload: bytes) -> list[bytes]:
        """Send a message to every rank; see `Communicator.exchange`."""
        return exchange(self._channel, payload)

    def exchange_with(self, payload: bytes, table: Table) -> list[bytes]:
        """Send a message and numbers to every rank; see `Communicator.exchange_with`."""
        return exchange(self._channel, payload, table)

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, ordered: bool = True) -> None:
        """Add up tensors over ranks; see `Communicator.all_reduce`."""
        if not ordered:
            all_reduce(self._channel, tensors)
            return
        everything = (1 << len(tensors)) - 1
        contributions = [Contribution((rank,), (everything,)) for rank in range(self.size)]
        here = PartialSum(self.rank, [tensor.detach() for tensor in tensors])
        self.sum_partials([here], contributions, tensors)

    def sum_partials(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],
        like: Sequence[torch.Tensor],
        *,
        divisor: float = 1.0,
        compress: bool = True,
    ) -> Tensors:
        """Add up partial sums over ranks; see `Communicator.sum_partials`."""
        wire = self._wire if compress else PLAIN
        if wire is PLAIN and is_pair(contributions, like):
            return sum_pair(self._channel, partials[0], divisor)
        dense, sparse = split_sparse(contributions)
        reduction = self._reduction(dense, like, divisor, wire, self._sizes, background=False)
        for index in reversed(range(len(like))):
            tensors = [None if index in sparse else partial.tensors[index] for partial in partials]
            reduction.bring(index, tensors)
        summed = reduction.finish()
        if sparse:
            found = sum_sparse(self._channel, partials, contributions, like, sparse, divisor=divisor)
            for index, tensor in zip(sparse, found, strict=True):
                summed[index] = tensor
        return summed

    def begin_sum(
        self, contributions: Sequence[Contribution], like: Sequence[torch.Tensor], *, divisor: float = 1.0
    ) -> PendingSum:
        """Begin a sum of partial sums that come one tensor after the other; see `Communicator.begin_sum`."""
        if self._wire is PLAIN and is_pair(contributions, like):
            return PairSum(self._channel, contributions[0], like, divisor)
        background = all(tensor.device.type == "cpu" for tensor in like)
        sizes = replace(self._sizes, slice=self._sizes.slice // SMALLER)
        return self._reduction(contributions, like, divisor, self._wire, sizes, background=background)

    def _reduction(
        self,
        contributions: Sequence[Contribution],
        like: Sequence[torch.Tensor],
        divisor: float,
        wire: WireFormat,
        sizes: Sizes,
        *,
        background: bool,
    ) -> OrderedSum:
        """Plan a sum and begin it."""
        extents = tuple(Extent(tensor.numel(), tensor.itemsize, tensor.dtype) for tensor in like)
        reduction = OrderedSum(
            self._channel,
            plan_sum(tuple(contributions), extents, sizes),
            like,
            divisor=divisor,
            wire=wire,
            arenas=self._arenas_on(like[0].device) if like else [],
            background=background,
        )
        if background:
            self._underway.add(reduction)
        return reduction

    def _arenas_on(self, device: torch.device) -> list[ScratchBuffer]:
        """Give the memory for what is on its way; it is kept from sum to sum."""
        if device not in self._arenas:
            self._arenas[device] = [ScratchBuffer(device) for _ in range(ARENAS)]
        return self._arenas[device]

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Copy tensors from one rank to all others; see `Communicator.broadcast`."""
        broadcast(self._channel, tensors, source)

    def gather_objects(self, value: Any) -> list[Any]:
        """Give every rank the objects of all; see `Communicator.gather_objects`."""
        gathered: list[Any] = [None] * self.size
        with self._channel.waiting():
            dist.all_gather_object(gathered, value, group=self._channel.group)
        return gathered

    def check_same(self, subject: nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> None:
        """Compare bits over ranks; see `Communicator.check_same`."""
        check_same(self, subject)

    def barrier(self) -> None:
        """Wait until every rank has come this far."""
        self.exchange(b"")

    def close(self) -> None:
        """Watch the other ranks no longer; the group stays its owner's."""
        self.watch.close()


def find_communicator(*, timeout: float | None = None) -> Communicator:
    """Join the processes of this run; alone, there is nothing to join.

    A process group that is initialised already is taken as it is. Otherwise the environment of torchrun,
    `lockstep run` or srun says who the others are, and the default group of torch.distributed is opened over
    gloo, and NCCL where there are GPUs. It stays open until the process ends.

    Args:
        timeout: Seconds that a rank waits for another, more than 0. None for what ``LOCKSTEP_TIMEOUT`` says
            (`lockstep run --timeout` sets it), else 60.

    Raises:
        ValueError: The environment is incomplete or contradicts itself.
        PeerError: A rank did not come in time.
        OrderError: The launcher has started the ranks again, with a store of addresses that still holds those
            of the dead; the message says what cures it. Or that launcher has ended.
    """
    end_with_agent(os.environ)
    seconds = timeout_for(timeout, os.environ)
    if dist.is_available() and dist.is_initialized():
        alone = dist.get_world_size() == 1
    else:
        found = read_environment(os.environ)
        alone = found is None or found.size == 1
    return LocalCommunicator() if alone else ProcessCommunicator(timeout=seconds)
