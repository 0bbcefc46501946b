"""Compute shards on all places of this process at once, and add up what they made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

from torch import nn

from lockstep.plan import Shard
from lockstep.replicas import ReplicaGroup
from lockstep.replicas.settings import ThreadSettings
from lockstep.replicas.shard_streams import ShardStreams, Streams
from lockstep.replicas.trained_buffers import refuse_trained_buffers
from lockstep.streams import ONE_BORROWER, stream_seed
from lockstep.tree import PartialSum, Tensors
from lockstep.updaters.attempt import WholeBatch
from lockstep.updaters.balance import PlaceTimes, Work
from lockstep.updaters.handover import refuse_accumulate_hooks
from lockstep.updaters.layout import Layout
from lockstep.updaters.recipe import Recipe
from lockstep.updaters.reduction import Finish, can_be_cut, gather, reduce_slice, reduce_whole, roots
from lockstep.updaters.shards import Instructions, PlaceSums


class Places:
    """The places of this process.

    Args:
        group: Their replicas.
        recipe: What is computed.
        phase: Told what is being done.
        timing: Told how long places work, if workloads are to be measured.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        recipe: Recipe,
        *,
        phase: Callable[[str], None],
        timing: PlaceTimes | None,
    ) -> None:
        self._group = group
        self._recipe = recipe
        self._phase = phase
        self._timing = timing
        self._streams = ShardStreams(group.devices, turn=ONE_BORROWER)
        self._on_several_devices = len(set(group.devices)) > 1
        self._is_stale = True
        self.layout = Layout()
        """The model as it was when it was last followed."""

    def follow(self) -> None:
        """Follow the model where it has changed since the last time.

        Raises:
            ValueError: It is now one that cannot be trained.
        """
        if self._group.refresh() or self._is_stale:
            self._is_stale = True  # should what follows refuse the model, the next attempt has to look again
            self.layout = Layout.of(self._group, self._recipe, self._phase)
            self._is_stale = False
        refuse_accumulate_hooks(self.layout.named)
        refuse_trained_buffers(self._group.model, self.layout.slots)

    def compute(
        self,
        work: Work,
        instructions: Instructions,
        *,
        first_stream: int,
        settings: ThreadSettings,
        wanted: frozenset[int] | None,
    ) -> list[PlaceSums]:
        """Compute all shards, at once where threads can have random streams of their own.

        Args:
            work: The shards.
            instructions: What they are computed by.
            first_stream: The position of the first shard's random stream in the run's.
            settings: What the calling thread computes under.
            wanted: The parameters that shall have a gradient, by ``id``; None for all that ask for one.

        Returns:
            What each place made.

        Raises:
            ReplicaError: User code raised in a shard, or a device hung.
            TypeError: The loss function returned no loss.
            ValueError: The loss cannot be used.
        """
        idle = self.layout.others(wanted)

        def seed_of(shard: Shard) -> int:
            return stream_seed(self._recipe.seed, first_stream + shard.index)

        def run(streams: Streams, *, at_once: bool) -> list[PlaceSums]:
            return self._run(work, instructions, idle, streams, settings, at_once=at_once)

        return self._streams.compute(run, seed_of, in_threads=self._group.wants_threads(work))

    def _run(
        self,
        work: Work,
        instructions: Instructions,
        idle: Sequence[int],
        streams: Streams,
        settings: ThreadSettings,
        *,
        at_once: bool,
    ) -> list[PlaceSums]:
        """Run every place's shards."""
        sums: list[PlaceSums | None] = [None] * len(work)
        group, places = self._group, self.layout.places

        def compute(place: int) -> None:
            stream = streams(group.devices[place])
            with _resting([places[place].parameters[index] for index in idle]) if idle else nullcontext():
                sums[place] = places[place].run(
                    work[place], instructions, stream, partial(group.stops_before, place)
                )

        timing = self._timing
        if timing is None:
            group.run(compute, settings=settings, at_once=at_once)
        else:
            group.run(timing.timed(compute, work), settings=settings, at_once=at_once)
            group.workloads = timing.workloads(group.workloads)
        return [place_sums for place_sums in sums if place_sums is not None]

    def add_up(
        self, sums: Sequence[PlaceSums], instructions: Instructions, settings: ThreadSettings
    ) -> tuple[WholeBatch, list[bool | None]]:
        """Add up what all places made, and divide once by the summed weight and the loss scale.

        Returns:
            The whole, and for each slice of its gradients whether it is finite; None where nobody looked.
        """
        reports = [report for place in sums for report in place.reports]
        partials = [partial for place in sums for partial in place.gradients.partials]
        if self._on_several_devices:
            partials = gather(partials, self._group.devices[0])
        nothing = PartialSum(0, [None] * len(self.layout.parameters))
        gradients, finite = self._sum(partials or [nothing], instructions.finish(reports), settings)
        buffers, samples = [place.buffers for place in sums], sum([place.samples for place in sums])
        return WholeBatch(gradients, buffers, samples, reports), finite

    def _sum(
        self, partials: Sequence[PartialSum], finish: Finish[bool | None], settings: ThreadSettings
    ) -> tuple[Tensors, list[bool | None]]:
        """Sum and finish, in slices side by side where that pays."""
        layout = self.layout
        if not (layout.side_by_side and can_be_cut(partials)):
            gradients, told = reduce_whole(partials, finish)
            return gradients, [told]
        finite: list[bool | None] = []

        def reduce(place: int) -> None:
            finite.append(reduce_slice(partials, layout.slices[place], finish))

        self._group.run(reduce, settings=settings)
        return roots(partials, len(layout.parameters)), finite

    def release(self) -> None:
        """End the replicas' threads and give torch back its random kernels, until the next computation."""
        self._group.release()
        self._streams.release()


@contextmanager
def _resting(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let a replica's parameters ask for no gradient for a while, so that backward leaves them out."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
