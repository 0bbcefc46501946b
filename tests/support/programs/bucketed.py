"""Train on several ranks and devices, with gradients that are sent during backward as docs/many-gpus.md proposes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lockstep as ls
from lockstep import plan
from lockstep.tree import PartialSum, ShardSum
from tests.support.bucketed_sum import BucketedSum, Share
from tests.support.emulated import Record, observed
from tests.support.workloads import Workload

NUM_SAMPLES = 13


@dataclass(frozen=True)
class Run:
    """What is trained, and how it is cut.

    Attributes:
        work: The model and its samples.
        devices: The devices of each rank.
        num_shards: The number of shards of each batch.
        bucket_bytes: The least length of a bucket in bytes.
        updates: The number of updates.
    """

    work: Workload
    devices: Sequence[str]
    num_shards: int
    bucket_bytes: int
    updates: int = 3

    def shares(self, size: int) -> list[Share]:
        """Assign runs of neighboring shards to all devices of all ranks."""
        count = len(self.devices)
        runs = plan.assign(self.num_shards, [1.0] * (size * count))
        return [Share(tuple(runs[rank * count : (rank + 1) * count])) for rank in range(size)]


def train(
    communicator: ls.ProcessCommunicator, run: Run, kind: type[BucketedSum] = BucketedSum
) -> tuple[str, Record, list[int]]:
    """Train; return the digest, what the devices observed, and how many buckets were sent during each backward."""
    group = dist.group.WORLD
    assert group is not None
    places = [torch.device(each) for each in run.devices]
    shares = run.shares(communicator.size)
    model = run.work.model().to(places[0])
    parameters = list(model.parameters())
    replicas = [model, *(copy.deepcopy(model).to(place) for place in places[1:])]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)
    cuts = plan.cut(NUM_SAMPLES, run.num_shards)
    sent = []
    with observed() as record:
        for _ in range(run.updates):
            sums = kind(group, shares, places, parameters, bucket_bytes=run.bucket_bytes, divisor=1.0)
            own = zip(replicas, shares[communicator.rank].devices, strict=True)
            _on_threads(
                [
                    Replica(sums, device, replica, shards, cuts, run.work).compute
                    for device, (replica, shards) in enumerate(own)
                ]
            )
            sent.append(sums.sent_in_backward)
            for parameter, gradient in zip(parameters, sums.finish(), strict=True):
                parameter.grad = gradient
            optimizer.step()
            for replica in replicas[1:]:
                replica.load_state_dict(model.state_dict())
        found = ls.digest(model, optimizer)
    return found, record, sent


@dataclass(frozen=True)
class Replica:
    """The shards of one device."""

    sums: BucketedSum
    device: int
    model: nn.Module
    shards: range
    cuts: Sequence[range]
    work: Workload

    def compute(self) -> None:
        """Compute the gradients of the shards, those of the last shard with hooks that send them."""
        torch.set_num_threads(1)
        parameters = list(self.model.parameters())
        earlier = ShardSum(self.shards.start)
        inputs, target = (each.to(parameters[0].device) for each in self.work.data(NUM_SAMPLES)[:])
        for shard in self.shards:
            rows = slice(self.cuts[shard].start, self.cuts[shard].stop)
            self.model.zero_grad()
            handles = []
            if shard == self.shards[-1]:
                handles = [
                    each.register_post_accumulate_grad_hook(partial(self._send, earlier.partials, index))
                    for index, each in enumerate(parameters)
                ]
            loss = nn.functional.cross_entropy(self.model(inputs[rows]), target[rows])
            loss.backward(torch.full_like(loss, len(self.cuts[shard]) / NUM_SAMPLES))
            for handle in handles:
                handle.remove()
            if shard != self.shards[-1]:
                earlier.push(shard, [each.grad for each in parameters])

    def _send(self, earlier: Sequence[PartialSum], index: int, parameter: torch.Tensor) -> None:
        """Add the gradient of the last shard to those of the earlier ones, and hand over the partial sums."""
        mine = ShardSum(self.shards.start)
        for each in earlier:
            mine.push(each.shard, [each.tensors[index]])
        mine.push(self.shards[-1], [parameter.grad])
        self.sums.add(self.device, index, mine.partials)


def _on_threads(calls: Sequence[Callable[[], Any]]) -> None:
    """Run each call in a thread of its own, and raise the first error."""
    errors: list[BaseException] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
