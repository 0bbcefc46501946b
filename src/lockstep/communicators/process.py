"""The communicator over a process group of torch.distributed, and how a process finds the right communicator."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, Literal

import torch
import torch.distributed as dist
from torch import nn

from lockstep.communicators.communicator import Communicator, Contribution, OnMismatch, PendingSum, SumAudit
from lockstep.communicators.comparison import check_same
from lockstep.communicators.environment import read_environment, timeout_for
from lockstep.communicators.failures.exits import end_with_agent
from lockstep.communicators.failures.watch import Watch, watch_group
from lockstep.communicators.joining import join_run
from lockstep.communicators.local import LocalCommunicator
from lockstep.communicators.sums.audit import audited_sum
from lockstep.communicators.sums.ordered_sum import OrderedSum
from lockstep.communicators.sums.planning import PlanSizes, SumPlan, plan_sum
from lockstep.communicators.sums.small import SmallSum
from lockstep.communicators.sums.sparse import split_sparse, sum_sparse
from lockstep.communicators.sums.wire import EXACT, WireFormat, wire_format
from lockstep.communicators.transport.channel import Channel
from lockstep.communicators.transport.messages import MessageTable, exchange
from lockstep.communicators.transport.packing import TensorSpec, all_reduce, broadcast, gather_owned
from lockstep.tree import PartialSum, Tensors

AUDITED_SIZES: Final = PlanSizes(slice=2**20)
"""The sizes of an audited sum, of which every rank adds one slice."""
EARLY_SLICE_DIVISOR: Final = 4
"""How many times shorter slices are in a sum that is sent during backward, so that the first ones start sooner."""


class ProcessCommunicator(Communicator):
    """The communicator over a process group of torch.distributed.

    Args:
        group: The process group; None for the default group. If the default group is not initialized, it is opened
            with the processes that the environment describes, as set by torchrun, `lockstep run`, srun or
            `launch`. `close` does not destroy the group.
        compression: The format to which ordered sums of float32 and float64 are rounded when they are sent: None
            for no rounding, "bf16", or "fp16" with a scale per message. Sums are computed in the order of the tree
            and in the dtype of the tensors, and all ranks get the same bits; but these bits then depend on how
            shards are distributed over ranks.
        timeout: Seconds that a rank waits for another before it raises, more than 0; None for the number in the
            environment variable ``LOCKSTEP_TIMEOUT``, or 60 if it is not set.
        check_every: The number of updates, at least 1, within which an updater compares all bits of its state between
            the ranks.
        differing_models: Whether models that differ when a run begins are those of rank 0 (``"broadcast"``) or an error
            (``"refuse"``).
        watch: The watch that knows which rank has failed; by default one over the store of the group.

    Raises:
        RuntimeError: If there is no such group and the environment describes no run.
        PeerError: If a rank has not joined in time.
        TypeError: If `check_every` is no integer.
        ValueError: If there is no such compression, or another argument is out of range.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        compression: Literal["bf16", "fp16"] | None = None,
        timeout: float | None = None,
        check_every: int = 100,
        differing_models: OnMismatch = "broadcast",
        watch: Watch | None = None,
    ) -> None:
        super().__init__(check_every=check_every, differing_models=differing_models)
        end_with_agent(os.environ)
        seconds = timeout_for(timeout, os.environ)
        if group is None and not dist.is_initialized():
            watch = join_run(seconds)
        found = dist.distributed_c10d._get_default_group() if group is None else group  # noqa: SLF001 - WORLD may be None
        self.watch = watch_group(found, seconds) if watch is None else watch
        self._channel = Channel(found, seconds, self.watch)
        self.rank, self.size = self._channel.rank, self._channel.size
        # A group of NCCL alone also sends messages by NCCL, whose order with a sum would differ between ranks.
        self.sends_early = self._channel.message_device.type == "cpu"
        self._wire = wire_format(compression)
        self.exact = self._wire is EXACT
        self._sizes = PlanSizes()
        self._connected = set[torch.device]()
        self._body_bytes = 0
        """The size of the bodies in the messages of updates, which all messages have."""
        self._streams: dict[torch.device, torch.Stream] = {}
        """The streams on which sums are computed beside backward. Each keeps memory, so there is one per device."""

    @property
    def bytes_sent(self) -> int:
        """How many bytes this rank has sent so far, without what the transport adds."""
        return self._channel.bytes_sent

    def exchange(self, payload: bytes, table: MessageTable | None = None) -> list[bytes]:
        """Send a message, and a body with it, to every rank; see `Communicator.exchange`."""
        # The transport ends a process that gets longer messages than it expects, as by another call.
        self._body_bytes = self._body_bytes if table is None else table.body_bytes
        return exchange(self._channel, payload, table or MessageTable(self.size, self._body_bytes))

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, ordered: bool = True) -> None:
        """Sum tensors over ranks; see `Communicator.all_reduce`."""
        if not ordered:
            all_reduce(self._channel, tensors)
            return
        # The tensors of rank r count as the partial sum of shard r, which makes rank r the leaf r of the tree.
        everything = (1 << len(tensors)) - 1
        contributions = [Contribution((rank,), (everything,)) for rank in range(self.size)]
        own = PartialSum(self.rank, [tensor.detach() for tensor in tensors])
        self.sum_partials([own], contributions, tensors)

    def sum_partials(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],
        like: Sequence[torch.Tensor],
        *,
        compress: bool = True,
        audit: SumAudit | None = None,
    ) -> Tensors:
        """Sum partial sums over ranks; see `Communicator.sum_partials`."""
        wire = self._wire if compress else EXACT
        dense, sparse = split_sparse(contributions)
        strided = [
            PartialSum(each.shard, [None if index in sparse else one for index, one in enumerate(each.tensors)])
            for each in partials
        ]
        summed = self._sum_dense(strided, dense, like, wire, audit)
        if sparse:
            found = sum_sparse(self._channel, partials, contributions, like, sparse, audit=audit)
            for index, tensor in zip(sparse, found, strict=True):
                summed[index] = tensor
        return summed

    def _sum_dense(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],
        like: Sequence[torch.Tensor],
        wire: WireFormat,
        audit: SumAudit | None,
    ) -> Tensors:
        """Sum partial sums of dense tensors. All ranks choose the same way, by what all of them know."""
        if audit is not None:
            # Never by the transport, which tells nothing of the terms that it adds. Where messages are rounded, in the
            # slices of every update: the numbers of a message are scaled together.
            plan = self._plan(contributions, like, AUDITED_SIZES if wire is EXACT else self._sizes, exact=False)
            return audited_sum(audit, self._channel, plan, partials, like, wire=wire)
        plan = self._plan(contributions, like, self._sizes, exact=wire is EXACT)
        if plan.body_bytes and wire is EXACT:
            small = SmallSum(self.rank, self.size, plan.body_bytes)
            small.pack(partials, contributions[self.rank], like)
            exchange(self._channel, b"", small.table)
            return small.add_up(partials, contributions, like) or []
        ordered_sum = OrderedSum(self._channel, plan, like, wire=wire)
        for index in reversed(range(len(like))):
            ordered_sum.add(index, [partial.tensors[index] for partial in partials])
        return ordered_sum.finish()

    def begin_sum(self, contributions: Sequence[Contribution], like: Sequence[torch.Tensor]) -> PendingSum:
        """Start a sum of tensors that become available one after the other; see `Communicator.begin_sum`."""
        devices = {tensor.device for tensor in like}
        sizes, stream, on_cpu = self._sizes, None, all(device.type == "cpu" for device in devices)
        if on_cpu and self.exact:
            # The numbers of a rounded message are scaled together, so its slices must be those of any other sum.
            sizes = replace(sizes, slice=sizes.slice // EARLY_SLICE_DIVISOR)
        if not on_cpu and len(devices) == 1 and self.sends_early:
            (device,) = devices
            stream = self._streams[device] = self._streams.get(device) or torch.Stream(device)
        # The collectives of a thread and the messages of its caller would be made in another order on each rank.
        plan = self._plan(contributions, like, sizes, exact=self.exact and stream is None)
        background = on_cpu or stream is not None
        return OrderedSum(self._channel, plan, like, wire=self._wire, background=background, stream=stream)

    def _plan(
        self, contributions: Sequence[Contribution], like: Sequence[torch.Tensor], sizes: PlanSizes, *, exact: bool
    ) -> SumPlan:
        """Plan a sum, and connect its devices while all ranks are here. If it is exact, the transport may add."""
        for device in {tensor.device for tensor in like} - self._connected:
            # All ranks are here, which need not be so in the exchanges of the sum.
            self._channel.connect(device)
            self._connected.add(device)
        specs = tuple(TensorSpec(tensor.numel(), tensor.dtype, tensor.device) for tensor in like)
        return plan_sum(tuple(contributions), specs, sizes, exact=exact)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Copy tensors from one rank to all others; see `Communicator.broadcast`."""
        broadcast(self._channel, tensors, source)

    def gather_owned(self, parts: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy to every rank the tensors that each rank owns; see `Communicator.gather_owned`."""
        gather_owned(self._channel, parts)

    def check_same(self, subject: nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> None:
        """Check that all ranks hold the same bits; see `Communicator.check_same`."""
        check_same(self, subject)

    def close(self) -> None:
        """Stop watching the other ranks. The process group stays open."""
        self.watch.close()


def find_communicator(
    *, timeout: float | None = None, check_every: int = 100, differing_models: OnMismatch = "broadcast"
) -> Communicator:
    """Return a communicator with the other processes of this run, or a local one if this process runs alone.

    A process group that is initialized already is used as it is. Otherwise the environment that torchrun,
    `lockstep run` or srun has set describes the other processes, and the default group of torch.distributed is
    opened over gloo, and over NCCL if there are GPUs. It stays open until the process ends.

    Args:
        timeout: Seconds that a rank waits for another before it raises, more than 0; None for the number in the
            environment variable ``LOCKSTEP_TIMEOUT`` (which `lockstep run --timeout` sets), or 60 if it is not set.
        check_every: The number of updates, at least 1, within which an updater compares all bits of its state between
            the ranks.
        differing_models: Whether models that differ when a run begins are those of rank 0 (``"broadcast"``) or an error
            (``"refuse"``).

    Raises:
        TypeError: If `check_every` is no integer.
        ValueError: If an argument is out of range, or the environment is incomplete or contradicts itself.
        PeerError: If a rank has not joined in time.
        OrderError: If the launcher has restarted the ranks with a store that still holds the addresses of dead
            processes; the message names the remedy. Also if the launcher has ended.
    """
    end_with_agent(os.environ)
    seconds = timeout_for(timeout, os.environ)
    if dist.is_available() and dist.is_initialized():
        alone = dist.get_world_size() == 1
    else:
        found = read_environment(os.environ)
        alone = found is None or found.size == 1
    if alone:
        return LocalCommunicator(check_every=check_every, differing_models=differing_models)
    return ProcessCommunicator(timeout=seconds, check_every=check_every, differing_models=differing_models)
