"""Compute the gradient of a batch over all places: shards, tree, division, finiteness check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Final

import torch
from torch import nn

from lockstep import plan
from lockstep.metrics import Observers
from lockstep.plan import Piece, Shard
from lockstep.precision import first_nonfinite
from lockstep.replicas import ReplicaGroup
from lockstep.replicas.buffers import ReplicaBuffers
from lockstep.replicas.settings import ThreadSettings
from lockstep.replicas.shard_streams import ShardStreams, Streams
from lockstep.replicas.slots import Slot, buffer_slots
from lockstep.streams import ONE_BORROWER, stream_seed
from lockstep.tree import PartialSum, Tensors
from lockstep.updaters.attempt import Attempt
from lockstep.updaters.balance import PlaceTimes
from lockstep.updaters.batches import batch_size, shard_arrays
from lockstep.updaters.flat import FlatGradients
from lockstep.updaters.handover import refuse_accumulate_hooks, refuse_strays
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.meeting import Position
from lockstep.updaters.over_ranks import RankReduction, WholeBatch
from lockstep.updaters.recipe import Recipe
from lockstep.updaters.reduction import (
    Finish,
    can_be_cut,
    finished,
    gather,
    reduce_slice,
    reduce_whole,
    roots,
)
from lockstep.updaters.result import NonFiniteShard, ShardReport
from lockstep.updaters.schedule import Everywhere, Part
from lockstep.updaters.shards import Instructions, Place, PlaceSums
from lockstep.updaters.verdict import judge

SIDE_BY_SIDE: Final = 400_000
"""Elements. With fewer parameters one thread has added them up before a second has begun."""

ALONE: Final = Everywhere()


class GradientEngine:
    """Compute gradients of batches on a group of replicas, with the same bits on any devices.

    Args:
        group: The replicas.
        recipe: What is computed.
        phase: Told what is being done.
        timing: Told how long places work, if workloads are to be measured.
        ranks: Adds up over the ranks of the run, if there are others.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        recipe: Recipe,
        *,
        phase: Callable[[str], None],
        timing: PlaceTimes | None = None,
        ranks: RankReduction | None = None,
    ) -> None:
        self.group = group
        self.recipe = recipe
        self.phase = phase
        self._policy = recipe.policy
        self._ranks = ranks
        self.flat: FlatGradients | None = None
        """Where the gradients lie end to end, if that was asked for."""
        self._timing = timing
        self._places: list[Place] = []
        self._several_devices = len(set(group.devices)) > 1
        self._named: dict[str, nn.Parameter] = {}
        self.parameters: list[nn.Parameter] = []
        """The model's parameters that ask for a gradient, in the order of `Attempt.gradients`."""
        self.frozen: list[nn.Parameter] = []
        """Those that ask for none."""
        self.slots: list[Slot] = []
        """The model's buffers."""
        self._slices: list[list[Piece]] = []
        self._like: list[torch.Tensor] = []
        self._idle: tuple[int, ...] = ()
        self.side_by_side = False
        """Whether reducing and stepping are worth more than one thread."""
        self.reads_weights = False
        """Whether weights of the last losses were tensors, which the host waited for."""
        self._streams = ShardStreams(group.devices, turn=ONE_BORROWER)

    @property
    def why_it_waits(self) -> str | None:
        """Why the last attempt read something though nobody asked for a verdict; None if it did not."""
        if self.reads_weights:
            return "the weight of a Loss is a tensor, which tells whether its shard takes part"
        unpackable = self._places[0].buffers.unpackable if self._places else None
        return None if unpackable is None else f"the buffer {unpackable!r} is no plain run of numbers"

    @property
    def shards_a_batch(self) -> int:
        """How many shards a batch is cut into."""
        if self.recipe.num_shards is not None:
            return self.recipe.num_shards
        return self._everywhere.num_places(len(self.group.devices))

    @property
    def _everywhere(self) -> Everywhere:
        """The places of the other ranks."""
        return ALONE if self._ranks is None else self._ranks.everywhere

    def part(self, sizes: Sequence[int]) -> Part:
        """Say which shards of batches of these sizes are computed in this process."""
        mine = self.group.workloads if self._ranks is None else self._ranks.workloads
        return self._everywhere.part(
            sizes, self.recipe.num_shards, mine, strided=self.recipe.split == "strided"
        )

    def own_samples(self, ahead: int, size: int) -> list[range]:
        """Say which samples of a batch this process computes, if all batches of an update are that long.

        Args:
            ahead: How many batches come before it, from the first of an update on.
            size: Its number of samples.
        """
        accumulate = self.recipe.accumulate
        batch = ahead % accumulate
        runs = self.part([size] * accumulate).runs
        return [shard.samples for run in runs for shard in run if shard.batch == batch]

    def attempt(
        self,
        batches: Sequence[Any],
        *,
        loss_fn: LossFunction,
        first_stream: int,
        loss_scale: float | torch.Tensor,
        settings: ThreadSettings,
        position: Position,
        interrupted: Callable[[], bool],
        wanted: frozenset[int] | None = None,
        look: Callable[[Shard, Tensors, ShardReport], None] | None = None,
        unread: bool = False,
    ) -> Attempt | None:
        """Compute the gradient of the mean loss over some batches, as one.

        Args:
            batches: Each of samples, or a nest of tensors; at least one.
            loss_fn: Gives the loss of a shard.
            first_stream: The position of the first shard's random stream in the run's.
            loss_scale: The factor of the loss scale.
            settings: What the calling thread computes under.
            position: What must be the same on all ranks.
            interrupted: Asked when the shards are computed whether one may have been left out; may raise.
            wanted: The parameters that shall have a gradient, by ``id``; None for all that ask for one.
            look: Shown every shard that takes part, by the thread that computed it.
            unread: Whether to leave the verdict on the device.

        Returns:
            What came of it; None where a shard was left out, here or on another rank.

        Raises:
            ReplicaError: User code raised in a shard.
            PeerError: Another rank failed.
            TypeError: The loss function returned no loss.
            ValueError: A batch is empty or uneven, or the loss cannot be used.
        """
        sizes = [batch_size(batch) for batch in batches]
        self._prepare()
        part = self.part(sizes)
        if self._ranks is not None:
            self._ranks.begin()
        work = [
            [
                (shard, shard_arrays(batches[shard.batch], shard, device, self.recipe.converter))
                for shard in run
            ]
            for run, device in zip(part.runs, self.group.devices, strict=True)
        ]
        # The power of two is the same for all shards, so it cancels exactly; it keeps factors below 1.
        lift = None if part.num_shards == 1 else 2.0 ** -(sum(sizes) - 1).bit_length()
        mean = self.recipe.reduction == "mean"
        instructions = Instructions(loss_fn, self._policy, lift, loss_scale, mean, look, unread)
        self._idle = () if wanted is None else self._others(wanted)
        for parameter in self.parameters:
            if look is None and (wanted is None or id(parameter) in wanted):
                parameter.grad = None  # the last gradient's memory is what this one will be written to
        where = {**position, "batch sizes": sizes}
        if self._ranks is not None and len(work) == 1:
            instructions.delivery = self._ranks.deliver(
                where, part, self._like, self._policy.held_dtype is not None
            )
        sums = self._compute(work, instructions, first_stream, settings)
        if look is None:
            refuse_strays(self._named, wanted)
        self.reads_weights = instructions.reads_weights
        again = interrupted()
        if self._ranks is None:
            return None if again else self._reduce(sums, instructions, settings)
        found = self._ranks.reduce(
            sums,
            part,
            position=where,
            again=again,
            workloads=self.group.workloads,
            like=self._like,
            slots=self.slots,
        )
        if found is None:
            return None
        found.gradients, finite = finished(found.gradients, instructions.finish(found.reports))
        return self._checked(found, [finite])

    def find_nonfinite(self, batches: Sequence[Any], **options: Any) -> list[NonFiniteShard]:
        """List the shards whose gradients are not finite, and change nothing.

        Args:
            batches: As `attempt`.
            **options: Those of `attempt`, but `look`.
        """
        found: list[NonFiniteShard] = []

        def look(shard: Shard, gradients: Tensors, report: ShardReport) -> None:
            name = first_nonfinite(dict(zip(self._named, gradients, strict=True)))
            if name is not None:
                loss = report.loss.item()
                found.append(NonFiniteShard(shard.index, shard.batch, shard.samples, loss, name))

        self.attempt(batches, **options, look=look)
        everywhere = found if self._ranks is None else self._ranks.gather_nonfinite(found)
        return sorted(everywhere, key=lambda each: each.shard)

    def first_shard(self, batch: Any) -> Any:
        """Give the arrays of a batch's first shard on the main device, wherever that shard is computed."""
        opening = self.part([batch_size(batch)]).opening
        return shard_arrays(batch, opening, self.group.devices[0], self.recipe.converter)

    def _others(self, wanted: frozenset[int]) -> tuple[int, ...]:
        """List the parameters, by index, that are to have no gradient for now."""
        return tuple(index for index, parameter in enumerate(self.parameters) if id(parameter) not in wanted)

    def release(self) -> None:
        """End the replicas' threads and give torch back its random kernels, until the next attempt."""
        self.group.release()
        self._streams.release()

    def _prepare(self) -> None:
        """Follow the model where it has changed since the last time."""
        if self.group.refresh() or not self._places:
            self._rebuild()
        refuse_accumulate_hooks(self._named)

    def _rebuild(self) -> None:
        """Look anew at a model whose replicas have been built anew."""
        model = self.group.model
        self._places = []  # should what follows refuse the model, the next attempt has to look again
        self._named = {
            name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
        }
        if not self._named:
            raise ValueError("`model` must have a parameter that asks for a gradient, got none.")
        self.parameters = list(self._named.values())
        self.frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        self.slots = buffer_slots(model)
        held = self._policy.held_dtype is not None  # then gradients are summed in float32
        self._like = [_in_float32(each) if held else each.detach() for each in self.parameters]
        self._places = [
            Place(
                device,
                replica,
                [parameter for parameter in replica.parameters() if parameter.requires_grad],
                ReplicaBuffers(model, replica, self.recipe.buffers),
                Observers({"": replica}),
                self.phase,
                self.group.at_work,
                place,
            )
            for place, (device, replica) in enumerate(
                zip(self.group.devices, self.group.replicas, strict=True)
            )
        ]
        if self.recipe.flat_gradients:
            self.flat = FlatGradients(self.parameters, self._like[0].dtype)
        sizes = [parameter.numel() for parameter in self.parameters]
        self._slices = plan.slices(sizes, len(self._places))
        on_cpus = len(self._places) > 1 and all(device.type == "cpu" for device in self.group.devices)
        self.side_by_side = on_cpus and sum(sizes) >= SIDE_BY_SIDE

    def _compute(
        self,
        work: list[list[tuple[Shard, Any]]],
        instructions: Instructions,
        first_stream: int,
        settings: ThreadSettings,
    ) -> list[PlaceSums]:
        """Compute all shards, at once where threads can have random streams of their own."""

        def seed_of(shard: Shard) -> int:
            return stream_seed(self.recipe.seed, first_stream + shard.index)

        def run(streams: Streams, *, at_once: bool) -> list[PlaceSums]:
            return self._run(work, instructions, streams, settings, at_once=at_once)

        return self._streams.compute(run, seed_of, in_threads=self.group.wants_threads(work))

    def _run(
        self,
        work: list[list[tuple[Shard, Any]]],
        instructions: Instructions,
        streams: Streams,
        settings: ThreadSettings,
        *,
        at_once: bool,
    ) -> list[PlaceSums]:
        """Run every place's shards."""
        sums: list[PlaceSums | None] = [None] * len(work)
        group, places, idle = self.group, self._places, self._idle

        def compute(place: int) -> None:
            stream = streams(group.devices[place])
            with _resting([places[place].parameters[index] for index in idle]) if idle else nullcontext():
                sums[place] = places[place].run(work[place], instructions, stream, lambda: group.stopping)

        timing = self._timing
        if timing is None:
            group.run(compute, settings=settings, at_once=at_once)
        else:
            group.run(timing.timed(compute, work), settings=settings, at_once=at_once)
            group.workloads = timing.workloads(group.workloads)
        return [place_sums for place_sums in sums if place_sums is not None]

    def _reduce(self, sums: list[PlaceSums], instructions: Instructions, settings: ThreadSettings) -> Attempt:
        """Add up the places, divide once by the summed weight and the loss scale, and check the result."""
        reports = [report for place in sums for report in place.reports]
        partials = [partial for place in sums for partial in place.gradients.partials]
        if self._several_devices:
            partials = gather(partials, self.group.devices[0])
        gradients, finite = self._sum(
            partials or [PartialSum(0, [None] * len(self.parameters))], instructions.finish(reports), settings
        )
        whole = WholeBatch(
            gradients, [place.buffers for place in sums], sum([place.samples for place in sums]), reports
        )
        return self._checked(whole, finite)

    def _checked(self, whole: WholeBatch, finite: Sequence[bool | None]) -> Attempt:
        """Make an attempt of the whole gradient and of what was told of its slices."""
        if whole.reports and all(gradient is None for gradient in whole.gradients):
            raise ValueError(
                "`loss_fn` must compute its loss with the model that it is given, a replica of yours; got a "
                "loss that gives no parameter a gradient."
            )
        gradients = whole.gradients if self.flat is None else self.flat.store(whole.gradients)
        return Attempt(
            gradients=gradients,
            verdict=judge(self._named, gradients, finite),
            buffers=whole.buffers,
            samples=whole.samples,
            reports=whole.reports,
        )

    def _sum(
        self, partials: list[PartialSum], finish: Finish[bool | None], settings: ThreadSettings
    ) -> tuple[Tensors, list[bool | None]]:
        """Sum and finish, in slices side by side where that pays."""
        if not (self.side_by_side and can_be_cut(partials)):
            gradients, told = reduce_whole(partials, finish)
            return gradients, [told]
        finite: list[bool | None] = []

        def reduce(place: int) -> None:
            finite.append(reduce_slice(partials, self._slices[place], finish))

        self.group.run(reduce, settings=settings)
        return roots(partials, len(self.parameters)), finite


def _in_float32(parameter: torch.Tensor) -> torch.Tensor:
    """Give something of a parameter's shape in float32 that takes no memory."""
    return torch.empty((), dtype=torch.float32, device=parameter.device).expand(parameter.shape)


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
