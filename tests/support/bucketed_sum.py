"""The design of docs/many-gpus.md as a program: gradients are sent bucket by bucket on a side stream during backward.

Each bucket takes one all-to-all, by which every rank gets its slice of all terms, additions in the order of the tree,
and one all-gather of the sums. Calls are made in the order of buckets on every rank, as NCCL requires. A backend that
cannot send memory of the devices, as gloo, sends pinned host memory instead, for which the host has to wait.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.tree import PartialSum, ShardSum, merge_order


@dataclass(frozen=True)
class Share:
    """The shards of one rank: a run of neighboring shards per device."""

    devices: tuple[range, ...]

    @property
    def first(self) -> int:
        return min(shards.start for shards in self.devices if shards)

    @property
    def stop(self) -> int:
        return max(shards.stop for shards in self.devices if shards)

    def nodes(self) -> list[int]:
        """Return the first shard of each partial sum that the rank sends."""
        devices = []
        for shards in self.devices:
            sums = ShardSum(shards.start)
            for shard in shards:
                sums.push(shard, [])
            devices.append(sums.partials)
        return [partial.shard for partial in self.merge(devices)]

    def merge(self, devices: Sequence[Sequence[PartialSum]]) -> list[PartialSum]:
        """Add the partial sums of the devices as far as no shard of another rank comes between them."""
        merged = ShardSum(self.first)
        for partials in devices:
            for partial in partials:
                merged.push(partial.shard, partial.tensors)
        merged.merge_complete(self.stop)
        return merged.partials


class BucketedSum:
    """A sum over all shards, to which backward adds gradients from the last parameter to the first.

    Args:
        group: The process group.
        shares: The shards of each rank, in ascending order.
        devices: The devices of this rank. The sums are on the first.
        like: Tensors with the shapes and the dtype of the gradients.
        bucket_bytes: The least length of a bucket in bytes, except the last.
        divisor: The number by which the sums are divided.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        shares: Sequence[Share],
        devices: Sequence[torch.device],
        like: Sequence[torch.Tensor],
        *,
        bucket_bytes: int,
        divisor: float,
    ) -> None:
        self._group, self._shares, self._devices, self._like = group, shares, devices, like
        self._divisor = divisor
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._nodes = [share.nodes() for share in shares]
        self._buckets = cut_into_buckets(like, bucket_bytes)
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self._missing = Counter({number: len(bucket) * len(devices) for number, bucket in enumerate(self._buckets)})
        self._partials: list[dict[int, list[PartialSum]]] = [{} for _ in devices]
        self._ready: list[torch.Event | None] = [None for _ in devices]
        self._side = [torch.Stream(device) for device in devices]
        self._next = 0
        self._results: dict[int, torch.Tensor] = {}
        self._alive: list[object] = []
        self._lock = threading.Lock()
        self.sent_in_backward = 0
        """How many buckets were sent while other gradients were still missing."""

    def add(self, device: int, index: int, partials: list[PartialSum]) -> None:
        """Add the partial sums of one parameter on one device; called by hooks of backward.

        Args:
            device: The index of the device.
            index: The index of the parameter.
            partials: Its partial sums over the shards of the device, on the stream of the hook.
        """
        with self._lock:
            self._partials[device][index] = partials
            # A later event of a stream includes what earlier ones stand for.
            self._ready[device] = torch.accelerator.current_stream(self._devices[device]).record_event()
            self._missing[self._bucket_of[index]] -= 1
            while self._next < len(self._buckets) and self._missing[self._next] == 0:
                self._send(self._buckets[self._next])
                self._next += 1
                self.sent_in_backward += self._missing.total() > 0

    def finish(self) -> list[torch.Tensor]:
        """Return the sums, in order of parameters, for the current stream of the first device."""
        assert self._next == len(self._buckets), "some gradients have not been added"
        torch.accelerator.current_stream(self._devices[0]).wait_stream(self._side[0])
        # What other streams still read has stayed allocated until here.
        for device, stream in zip(self._devices, self._side, strict=True):
            torch.accelerator.current_stream(device).wait_stream(stream)
        self._alive.clear()
        return [self._results[index] for index in range(len(self._like))]

    def _send(self, bucket: Sequence[int]) -> None:
        """Sum one bucket over devices and ranks, on the side streams."""
        devices = [self._pack(device, bucket) for device in range(len(self._devices))]
        with torch.no_grad(), self._side[0]:
            partials = self._shares[self._rank].merge(devices)
            total = self._over_ranks([partial.tensors[0] for partial in partials if partial.tensors[0] is not None])
            sizes = [self._like[index].numel() for index in bucket]
            for index, flat in zip(bucket, total[: sum(sizes)].split(sizes), strict=True):
                self._results[index] = flat.view(self._like[index].shape)

    def _pack(self, device: int, bucket: Sequence[int]) -> list[PartialSum]:
        """Copy the partial sums of a bucket into one tensor each, and to the first device."""
        found = [self._partials[device].pop(index) for index in bucket]
        self._alive.append(found)
        packed = []
        with torch.no_grad(), self._side[device]:
            self._await_gradients(device)
            for same in zip(*found, strict=True):
                flat = torch.cat([each.tensors[0].reshape(-1) for each in same if each.tensors[0] is not None])
                self._alive.append(flat)
                packed.append(PartialSum(same[0].shard, [flat]))
        if device > 0:
            with torch.no_grad(), self._side[0]:
                self._side[0].wait_stream(self._side[device])
                for partial in packed:
                    partial.tensors = [each if each is None else each.to(self._devices[0]) for each in partial.tensors]
        return packed

    def _await_gradients(self, device: int) -> None:
        """Let the side stream wait for the backward that computes the gradients."""
        event = self._ready[device]
        assert event is not None
        self._side[device].wait_event(event)

    def _over_ranks(self, nodes: Sequence[torch.Tensor]) -> torch.Tensor:
        """Sum flat tensors over all ranks, and divide; the result is padded to a multiple of the number of ranks."""
        length = -(-nodes[0].numel() // self._size)
        padded = nodes[0].new_zeros(len(nodes), self._size * length)
        for row, node in zip(padded, nodes, strict=True):
            row[: node.numel()].copy_(node)
        # The owner of a slice gets the terms in the order of ranks and nodes, which is that of shards.
        sent = padded.view(len(nodes), self._size, length).transpose(0, 1).contiguous()
        arrived = sent.new_empty(sum(map(len, self._nodes)), length)
        rows = [len(each) for each in self._nodes]
        self._collect(lambda out, given: self._all_to_all(out, given, rows, len(nodes)), arrived, sent.view(-1, length))
        own = self._sum(arrived)
        whole = own.new_empty(self._size, length)
        self._collect(lambda out, given: dist.all_gather([*out], given, group=self._group), whole, own)
        return whole.view(-1)

    def _all_to_all(self, out: torch.Tensor, given: torch.Tensor, rows: list[int], own_rows: int) -> None:
        dist.all_to_all_single(out, given, rows, [own_rows] * self._size, group=self._group)

    def _sum(self, terms: torch.Tensor) -> torch.Tensor:
        """Add the terms of all nodes in the order of the tree, and divide."""
        rows = list(terms)
        for into, other in merge_order([shard for each in self._nodes for shard in each]):
            rows[into].add_(rows[other])
        # In a list, as all divisions: on a GPU `div_` multiplies by the reciprocal, which rounds differently.
        torch._foreach_div_(rows[:1], self._divisor)
        return rows[0]

    def _collect(
        self, call: Callable[[torch.Tensor, torch.Tensor], object], out: torch.Tensor, given: torch.Tensor
    ) -> None:
        """Make a call of torch.distributed on the side stream, by way of host memory where the backend needs that."""
        if given.device.type == "cpu" or dist.get_backend(self._group) != "gloo":
            call(out, given)
            return
        host = given.to("cpu", non_blocking=True)
        self._side[0].synchronize()
        arrived = torch.empty_like(out, device="cpu", pin_memory=True)
        call(arrived, host)
        out.copy_(arrived, non_blocking=True)
        self._alive.append(arrived)


def cut_into_buckets(like: Sequence[torch.Tensor], bucket_bytes: int) -> list[list[int]]:
    """Return the parameters of each bucket, from the last parameter to the first."""
    buckets: list[list[int]] = [[]]
    size = 0
    for index in reversed(range(len(like))):
        if buckets[-1] and size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size += like[index].nbytes
    return buckets
