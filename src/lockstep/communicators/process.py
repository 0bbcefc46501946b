"""The communicator over a process group of torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from lockstep.communicators.communicator import Communicator, Contribution
from lockstep.communicators.same import check_same, named_tensors
from lockstep.tree import PartialSum, Tensors, total

SHORT: Final = 4096
"""Bytes. Messages up to this length travel at once, longer ones after all ranks know the longest."""
LENGTH: Final = 8
"""Bytes that say how long a message is."""


class ProcessCommunicator(Communicator):
    """Joins the processes of a torch.distributed process group.

    Args:
        group: The group; None for the default one, which must have been initialised. It stays its owner's.
        timeout: Seconds that a rank waits for another before it raises.

    Raises:
        RuntimeError: There is no such group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout: float = 60.0) -> None:
        self._group = dist.group.WORLD if group is None else group
        if self._group is None:
            raise RuntimeError(
                "`group` must be a process group, but torch.distributed is not initialised. Start the script "
                "with torchrun, or call torch.distributed.init_process_group first."
            )
        self._rank = dist.get_rank(self._group)
        self._size = dist.get_world_size(self._group)
        self._timeout = timedelta(seconds=timeout)
        self._message_device = _message_device(self._group)

    @property
    def rank(self) -> int:
        """This process's index in the group."""
        return self._rank

    @property
    def size(self) -> int:
        """How many processes the group has."""
        return self._size

    def exchange(self, payload: bytes) -> list[bytes]:
        """Send a message to every rank; see `Communicator.exchange`."""
        framed = len(payload).to_bytes(LENGTH, "little") + payload
        heads = self._all_gather_bytes(framed[: LENGTH + SHORT], LENGTH + SHORT)
        lengths = [int.from_bytes(head[:LENGTH], "little") for head in heads]
        messages = heads
        if max(lengths) > SHORT:
            messages = self._all_gather_bytes(framed, LENGTH + max(lengths))
        return [message[LENGTH : LENGTH + length] for message, length in zip(messages, lengths, strict=True)]

    def _all_gather_bytes(self, message: bytes, width: int) -> list[bytes]:
        mine = torch.frombuffer(bytearray(message.ljust(width, b"\0")), dtype=torch.uint8)
        mine = mine.to(self._message_device)
        theirs = [torch.empty_like(mine) for _ in range(self._size)]
        self._wait(dist.all_gather(theirs, mine, group=self._group, async_op=True))
        return [each.cpu().numpy().tobytes() for each in theirs]

    def _wait(self, work: dist.Work | None) -> None:
        if work is not None:
            work.wait(self._timeout)

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, ordered: bool = True) -> None:
        """Add up tensors over ranks; see `Communicator.all_reduce`."""
        if not ordered:
            works = [dist.all_reduce(tensor, group=self._group, async_op=True) for tensor in tensors]
            for work in works:
                self._wait(work)
            return
        everything = (1 << len(tensors)) - 1
        contributions = [Contribution((rank,), (everything,)) for rank in range(self._size)]
        summed = self.sum_partials(
            [PartialSum(self._rank, [tensor.detach().clone() for tensor in tensors])], contributions, tensors
        )
        for tensor, result in zip(tensors, summed, strict=True):
            if result is not None:
                tensor.copy_(result)

    def sum_partials(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],
        like: Sequence[torch.Tensor],
        *,
        divisor: float = 1.0,
    ) -> Tensors:
        """Add up partial sums over ranks; see `Communicator.sum_partials`."""
        mine = iter(partials)
        sums: list[PartialSum] = []
        for rank, contribution in enumerate(contributions):
            for shard, present in zip(contribution.shards, contribution.present, strict=True):
                tensors = (
                    next(mine).tensors
                    if rank == self._rank
                    else [
                        torch.empty_like(tensor) if present >> index & 1 else None
                        for index, tensor in enumerate(like)
                    ]
                )
                self.broadcast([tensor for tensor in tensors if tensor is not None], source=rank)
                sums.append(PartialSum(shard, tensors))
        summed: Tensors = total(sums) if sums else [None] * len(like)
        there = [tensor for tensor in summed if tensor is not None]
        if divisor != 1.0 and there:
            torch._foreach_div_(there, divisor)
        return summed

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Copy tensors from one rank to all others; see `Communicator.broadcast`."""
        flats = [tensor.detach().contiguous() for tensor in tensors]
        works = [dist.broadcast(flat, group=self._group, group_src=source, async_op=True) for flat in flats]
        for work, tensor, flat in zip(works, tensors, flats, strict=True):
            self._wait(work)
            if self._rank != source and flat.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(flat)

    def gather_objects(self, value: Any) -> list[Any]:
        """Give every rank the objects of all; see `Communicator.gather_objects`."""
        gathered: list[Any] = [None] * self._size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def check_same(self, subject: nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> None:
        """Compare bits over ranks; see `Communicator.check_same`."""
        check_same(named_tensors(subject), self.exchange)

    def barrier(self) -> None:
        """Wait until every rank has come this far."""
        self.exchange(b"")

    def close(self) -> None:
        """Do nothing: the group is its owner's."""


def _message_device(group: dist.ProcessGroup) -> torch.device:
    """Give a device whose tensors the group can send: the CPU where it can, else this process's GPU."""
    config = dist.get_backend_config(group)
    on_cpu = "cpu:" in config
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
