"""Add up what the places of all ranks made, so that every rank holds the gradient of the whole batch."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lockstep.communicators import Communicator, Contribution
from lockstep.replicas.buffer_sums import BufferSum, real
from lockstep.replicas.slots import Slot
from lockstep.replicas.summing import gather
from lockstep.tree import PartialSum, ShardSum, Tensors
from lockstep.updaters.account import Account
from lockstep.updaters.alike import Alikeness
from lockstep.updaters.attempt import Attempt
from lockstep.updaters.meeting import Position, RankMeeting
from lockstep.updaters.overlap import Delivery, Guess, can_overlap
from lockstep.updaters.pace import Pacer
from lockstep.updaters.result import NonFiniteShard
from lockstep.updaters.schedule import Everywhere, Part
from lockstep.updaters.shard_gradients import DeviceGradients

LOG = logging.getLogger("lockstep")


class RankReduction:
    """Adds up over ranks, after the meeting in which they say what there is.

    Args:
        communicator: Joins the ranks.
        meeting: Where they meet.
        workloads: The relative speeds of the places of every rank.
        pacer: Times the ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        meeting: RankMeeting,
        workloads: Sequence[Sequence[float]],
        pacer: Pacer,
    ) -> None:
        self._communicator = communicator
        self.meeting = meeting
        self._pacer = pacer
        self._was_steady = False
        self._key: str | None = None
        self._delivery: Delivery | None = None
        self._take(workloads)

    def _take(self, workloads: Sequence[Sequence[float]]) -> None:
        rank = self._communicator.rank
        speeds = tuple(map(tuple, workloads))
        self.everywhere = Everywhere(speeds[:rank], speeds[rank + 1 :], self._pacer.pace)
        """The places of the other ranks, as of the last meeting."""
        self.workloads = speeds[rank]
        """Those of this rank, as the others know them."""

    def begin(self) -> None:
        """Take note that the shards of a try are about to be computed."""
        self._pacer.begin()

    def _settle(self, accounts: Sequence[Account]) -> bool:
        """Take over what all ranks told of their places, and tell whether they stay as they are."""
        before = self.everywhere, self.workloads
        self._pacer.settle([each.told for each in accounts])
        self._take([each.workloads for each in accounts])
        steady = before == (self.everywhere, self.workloads) and not self._pacer.measuring
        if steady and not self._was_steady and self._communicator.rank == 0:
            LOG.info("Shards on each rank: %s.", " + ".join(str(len(each.reports)) for each in accounts))
        self._was_steady = steady
        return steady

    def deliver(
        self, position: Position, part: Part, like: Sequence[torch.Tensor], held: bool
    ) -> Delivery | None:
        """Begin to send gradients before backward is over, if the last updates tell what there will be.

        Args:
            position: What must be the same on all ranks.
            part: Which shards are this rank's.
            like: Tensors of the shapes, dtypes and devices of the gradients.
            held: Whether gradients change their format once they are made.
        """
        self._key = None if held else json.dumps([position["computation"], position["batch sizes"]])
        self._delivery = None if self._key is None else self.meeting.overlap.deliver(self._key, part, like)
        return self._delivery

    def reduce(
        self,
        attempt: Attempt,
        *,
        position: Position,
        again: bool,
        workloads: Sequence[float],
        like: Sequence[torch.Tensor],
        slots: Sequence[Slot],
    ) -> None:
        """Meet, and sum what the devices of all ranks have computed.

        Args:
            attempt: Gets the sums, not divided yet; it is not complete where a rank has to compute its part
                again.
            position: What must be the same on all ranks.
            again: Whether shards of this rank were left out.
            workloads: Of this rank's devices, from the next attempt on.
            like: Tensors of the shapes, dtypes and devices of the gradients.
            slots: The model's buffers.

        Raises:
            PeerError: A rank failed.
            DisagreementError: A rank is somewhere else.
            PeerInterrupt: A rank was interrupted.
        """
        sums, part = attempt.devices, attempt.share
        delivery, self._delivery = self._delivery, None
        if delivery is None or not delivery.has_begun:
            partials = _merged([each.gradients.partials for each in sums], part, like[0].device)
            contribution = Contribution.of(partials)
        else:
            partials, contribution = [], delivery.announced
        buffers = _OwnBuffers.of(sums, part, slots)
        self._pacer.meet(like[0].device, part.runs, self.workloads)
        account = Account(
            [report for place in sums for report in place.reports],
            sum(place.samples for place in sums),
            contribution,
            Contribution.of(buffers.partials),
            buffers.weights,
            workloads,
            self._pacer.told,
        )
        self._communicator.watch.doing = "reduce"
        self.meeting.riders.board(partials, contribution, like)
        plain = self.meeting.meet(position, account.to_plain(), again=again)
        attempt.complete = plain is not None
        if plain is None:
            self.meeting.part()
            return
        accounts = [Account.from_plain(each) for each in plain]
        steady = self._settle(accounts)
        # Not divided on the way: every rank divides and checks in one pass over the memory.
        contributions = [each.gradients for each in accounts]
        one_place = all(len(each.workloads) == 1 for each in accounts)
        self._pacer.sum()
        attempt.gradients = self._sum(partials, contributions, like, may_guess=one_place, steady=steady)
        if position["computation"] == 0:  # a search, or another network's, takes its own time
            self._pacer.end(like[0].device, [len(each.shards) for each in contributions])
        attempt.buffers = [self._sum_buffers(buffers, accounts, slots)]
        attempt.samples = sum(each.samples for each in accounts)
        attempt.reports = [report for each in accounts for report in each.reports]
        self.meeting.part()

    def _sum(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],
        like: Sequence[torch.Tensor],
        *,
        may_guess: bool,
        steady: bool,
    ) -> Tensors:
        """Add up gradients, if that is not done already, and guess what the next ones will be."""
        overlap = self.meeting.overlap
        gradients = overlap.take()
        if gradients is None:
            gradients = self.meeting.riders.total(partials, contributions, like)
            may_guess &= gradients is None  # what rides with the message comes no later than that
        if gradients is None:
            gradients = self._communicator.sum_partials(partials, contributions, like)
        may_guess &= can_overlap(contributions, like)
        key = self._key if may_guess else None
        overlap.learn(None if key is None else Guess(key, tuple(contributions), like), steady=steady)
        return gradients

    def gather_nonfinite(self, found: Sequence[NonFiniteShard]) -> list[NonFiniteShard]:
        """Give every rank what each found."""
        rows = [[each.shard, each.batch, _ends(each.samples), each.loss, each.parameter] for each in found]
        return [
            NonFiniteShard(shard, batch, range(*samples), loss, parameter)
            for message in self._communicator.exchange(json.dumps(rows).encode())
            for shard, batch, samples, loss, parameter in json.loads(message)
        ]

    def _sum_buffers(self, own: _OwnBuffers, accounts: Sequence[Account], slots: Sequence[Slot]) -> BufferSum:
        """Add up buffers over ranks, and take those that are set once from the first rank that has them."""
        count = len(slots)
        weights = [sum(each) for each in zip(*(account.buffer_weights for account in accounts), strict=True)]
        if not any(mask for account in accounts for mask in account.buffers.present):
            unchanged = PartialSum(0, [None] * count)
            return BufferSum(ShardSum(partials=[unchanged]), weights, [None] * count)
        contributions = _first_only([account.buffers for account in accounts], count)
        _drop(own.partials, contributions[self._communicator.rank])
        like = [buffer for slot in slots if (buffer := slot.get()) is not None]
        summed = self._communicator.sum_partials(
            own.partials, contributions, [*map(real, like), *like], compress=False
        )
        return BufferSum(ShardSum(partials=[PartialSum(0, summed[:count])]), weights, summed[count:])


def join(
    communicator: Communicator,
    workloads: Sequence[float],
    alike: Alikeness,
    *,
    movable: bool,
    by_workloads: bool,
) -> RankReduction | None:
    """Get to know the places of all ranks; every rank calls it.

    Args:
        communicator: Joins them.
        workloads: The relative speeds of this rank's places.
        alike: Compares the ranks when they meet.
        movable: Whether the result is the same wherever shards are computed.
        by_workloads: Whether the user has said how fast this rank's places are.

    Returns:
        What adds up over them; None for a process that is alone.
    """
    if communicator.size == 1:
        return None
    own = [list(workloads), movable and communicator.exact, by_workloads]
    said = [json.loads(each) for each in communicator.exchange(json.dumps(own).encode())]
    speeds, free, told = zip(*said, strict=True)
    pacer = Pacer(movable=all(free), by_workloads=any(told))
    return RankReduction(communicator, RankMeeting(communicator, alike), speeds, pacer)


@dataclass(slots=True)
class _OwnBuffers:
    """What the places of this rank made of the buffers, in one list of partial sums.

    Attributes:
        partials: Of twice as many tensors as there are buffers: sums for means, then those set once.
        weights: For each buffer, the weights of the shards that changed it.
    """

    partials: list[PartialSum]
    weights: list[float]

    @classmethod
    def of(cls, sums: Sequence[DeviceGradients], part: Part, slots: Sequence[Slot]) -> _OwnBuffers:
        if not slots:
            return cls([], [])
        places = [place.buffers.read() for place in sums]
        device = _home(slots)
        partials = _merged([place.means.partials for place in places], part, device)
        firsts = [
            next((place.firsts[index] for place in places if place.firsts[index] is not None), None)
            for index in range(len(slots))
        ]
        for partial in partials:
            partial.tensors += [None] * len(slots)
        if partials:
            partials[0].tensors[len(slots) :] = gather([PartialSum(0, firsts)], device)[0].tensors
        weights = [sum(place.weights[index] for place in places) for index in range(len(slots))]
        return cls(partials, weights)


def _ends(samples: range) -> tuple[int, int, int]:
    return samples.start, samples.stop, samples.step


def _home(slots: Sequence[Slot]) -> torch.device:
    """Give the device of the model's buffers."""
    return next(buffer.device for slot in slots if (buffer := slot.get()) is not None)


def _merged(runs: Sequence[Sequence[PartialSum]], part: Part, device: torch.device) -> list[PartialSum]:
    """Add up the partial sums of this rank's places as far as that needs none of another rank."""
    merged = ShardSum(part.first)
    for run in runs:
        for partial in gather(run, device):
            merged.push(partial.shard, partial.tensors)
    merged.settle(part.stop)
    return merged.partials


def _first_only(contributions: Sequence[Contribution], count: int) -> list[Contribution]:
    """Leave out of the buffers that are set once those that an earlier partial sum has as well."""
    means = (1 << count) - 1
    taken = 0
    left: list[Contribution] = []
    for contribution in contributions:
        present: list[int] = []
        for mask in contribution.present:
            firsts = mask & ~means & ~taken
            taken |= firsts
            present.append(mask & means | firsts)
        left.append(Contribution(contribution.shards, tuple(present)))
    return left


def _drop(partials: Sequence[PartialSum], contribution: Contribution) -> None:
    """Drop the tensors that are not to be brought."""
    for partial, mask in zip(partials, contribution.present, strict=True):
        partial.tensors[:] = [
            tensor if mask >> index & 1 else None for index, tensor in enumerate(partial.tensors)
        ]
