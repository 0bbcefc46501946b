"""Compute the gradient of a batch over all places: shards, tree, division, finiteness check."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from lockstep.plan import Shard
from lockstep.precision import first_nonfinite
from lockstep.replicas import ReplicaGroup
from lockstep.replicas.settings import ThreadSettings
from lockstep.replicas.strays import refuse_stray_gradients
from lockstep.tree import Tensors
from lockstep.updaters.attempt import Attempt, WholeBatch
from lockstep.updaters.balance import PlaceTimes, Work
from lockstep.updaters.batches import batch_size, shard_arrays
from lockstep.updaters.layout import Layout
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.meeting import Position
from lockstep.updaters.over_ranks import RankReduction
from lockstep.updaters.places import Places
from lockstep.updaters.recipe import Recipe
from lockstep.updaters.reduction import finished
from lockstep.updaters.result import NonFiniteShard, ShardReport
from lockstep.updaters.schedule import Everywhere, Part
from lockstep.updaters.shards import Instructions
from lockstep.updaters.verdict import judge

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
        self._ranks = ranks
        self._places = Places(group, recipe, phase=phase, timing=timing)
        self._policy = recipe.policy
        self.reads_weights = False
        """Whether weights of the last losses were tensors, which the host waited for."""

    @property
    def layout(self) -> Layout:
        """The model as of the last attempt."""
        return self._places.layout

    @property
    def why_it_waits(self) -> str | None:
        """Why the last attempt read something though nobody asked for a verdict; None if it did not."""
        if self.reads_weights:
            return "the weight of a Loss is a tensor, which tells whether its shard takes part"
        places = self.layout.places
        unpackable = places[0].buffers.unpackable if places else None
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
        self._places.follow()
        layout = self.layout
        part = self.part(sizes)
        if self._ranks is not None:
            self._ranks.begin()
        work = self._work(batches, part)
        # The power of two is the same for all shards, so it cancels exactly; it keeps factors below 1.
        lift = None if part.num_shards == 1 else 2.0 ** -(sum(sizes) - 1).bit_length()
        mean = self.recipe.reduction == "mean"
        instructions = Instructions(loss_fn, self._policy, lift, loss_scale, mean, look, unread)
        for parameter in layout.parameters:
            if look is None and (wanted is None or id(parameter) in wanted):
                parameter.grad = None  # the last gradient's memory is what this one will be written to
        where = {**position, "batch sizes": sizes}
        if self._ranks is not None and len(work) == 1:
            held = self._policy.held_dtype is not None
            instructions.delivery = self._ranks.deliver(where, part, layout.like, held)
        sums = self._places.compute(
            work, instructions, first_stream=first_stream, settings=settings, wanted=wanted
        )
        if look is None:
            refuse_stray_gradients(layout.named, wanted)
        self.reads_weights = instructions.reads_weights
        again = interrupted()
        if self._ranks is None:
            return None if again else self._checked(*self._places.add_up(sums, instructions, settings))
        whole = self._ranks.reduce(
            sums,
            part,
            position=where,
            again=again,
            workloads=self.group.workloads,
            like=layout.like,
            slots=layout.slots,
        )
        if whole is None:
            return None
        whole.gradients, finite = finished(whole.gradients, instructions.finish(whole.reports))
        return self._checked(whole, [finite])

    def _work(self, batches: Sequence[Any], part: Part) -> Work:
        """Bring the arrays of each shard to the device of its place."""
        converter = self.recipe.converter
        return [
            [(shard, shard_arrays(batches[shard.batch], shard, device, converter)) for shard in run]
            for run, device in zip(part.runs, self.group.devices, strict=True)
        ]

    def _checked(self, whole: WholeBatch, finite: Sequence[bool | None]) -> Attempt:
        """Make an attempt of the whole gradient and of what was told of its slices."""
        if whole.reports and all(gradient is None for gradient in whole.gradients):
            raise ValueError(
                "`loss_fn` must compute its loss with the model that it is given, a replica of yours; got a "
                "loss that gives no parameter a gradient."
            )
        flat = self.layout.flat
        gradients = whole.gradients if flat is None else flat.store(whole.gradients)
        return Attempt(
            gradients=gradients,
            verdict=judge(self.layout.named, gradients, finite),
            buffers=whole.buffers,
            samples=whole.samples,
            reports=whole.reports,
        )

    def find_nonfinite(self, batches: Sequence[Any], **options: Any) -> list[NonFiniteShard]:
        """List the shards whose gradients are not finite, and change nothing.

        Args:
            batches: As `attempt`.
            **options: Those of `attempt`, but `look`.
        """
        found: list[NonFiniteShard] = []

        def look(shard: Shard, gradients: Tensors, report: ShardReport) -> None:
            name = first_nonfinite(dict(zip(self.layout.named, gradients, strict=True)))
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

    def release(self) -> None:
        """End the replicas' threads and give torch back its random kernels, until the next attempt."""
        self._places.release()
