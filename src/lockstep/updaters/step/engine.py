"""The stages of an update that change nothing: from the iterator's batches to a checked gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from lockstep.communicators import Watch
from lockstep.plan import Shard
from lockstep.precision import first_nonfinite
from lockstep.replicas import (
    ShardStreams,
    TreeSum,
    check_no_leaked_gradients,
    finish_whole,
    refuse_accumulate_hook,
    refuse_trained_buffers,
)
from lockstep.streams import ONE_BORROWER, computation_substream
from lockstep.tree import PartialSum, ShardSum, Tensors
from lockstep.updaters.attempt import Attempt, GradientRequest, StepContext, check_finite
from lockstep.updaters.compute import (
    DeviceGradients,
    DeviceTimer,
    GlobalRandomWatch,
    GradientTask,
    ModelLayout,
    RankShare,
    ShardAssignment,
    share_of,
)
from lockstep.updaters.ranks import RankReduction
from lockstep.updaters.result import NonFiniteShard, ShardReport
from lockstep.updaters.setup import MAIN, Recipe, batch_size, call_arguments, shard_arrays
from lockstep.updaters.state import Training, lazy

ALONE: Final = ShardAssignment()
NOTHING: Final[AbstractContextManager[None]] = nullcontext()


class GradientEngine:
    """Compute gradients of batches on a group of replicas, with the same bits on any devices.

    Each method but `share` and those that follow it is one stage of an update, and fills in an `Attempt`.
    Nothing of the training state changes by them, but for parameters that get their shapes.

    Args:
        training: What is trained.
        recipe: What is computed.
        watch: Told what this process is doing.
        timing: Told how long devices work, if workloads are to be measured.
        ranks: Sums over the ranks of the run, if there are others.
    """

    def __init__(
        self,
        training: Training,
        recipe: Recipe,
        *,
        watch: Watch,
        timing: DeviceTimer | None = None,
        ranks: RankReduction | None = None,
    ) -> None:
        self.training = training
        self.recipe = recipe
        self.watch = watch
        self.group = training.group
        self._ranks = ranks
        self._timing = timing
        self._policy = recipe.policy
        self._streams = ShardStreams(self.group.devices, turn=ONE_BORROWER)
        self.layout = ModelLayout(TreeSum(self.group, []))
        """The model as of the last attempt; empty before the first."""
        self._is_stale = True
        self._random = GlobalRandomWatch()
        self.state_loaded()

    def state_loaded(self) -> None:
        """Take note of a new state: parameters may lack their shapes, and the next updates are watched again."""
        self.look_for_shapes()
        self._random.begin(self.training.iteration)

    def look_for_shapes(self) -> None:
        """Look whether parameters lack their shapes, after something else may have given or taken them."""
        self._uninitialised = lazy.is_uninitialised(self.group.model)

    def take(self, attempt: Attempt) -> None:
        """Look at the iterator's next batches without moving it, unless the attempt is at given ones.

        Raises:
            StopIteration: The iterator has ended.
        """
        if attempt.given_batches:
            attempt.batches = attempt.given_batches
            return
        self.watch.doing = "data loading"
        attempt.batches = self._upcoming(attempt.passed)
        if not attempt.batches:
            raise StopIteration

    def has_batches(self, passed: int) -> bool:
        """Tell whether there is a batch after so many that an update gives up."""
        return bool(self._upcoming(passed))

    def _upcoming(self, passed: int) -> list[Any]:
        """Return the batches of one attempt; fewer than usual where the iterator ends, or none."""
        batches: list[Any] = []
        iterator = self.training.iterators[MAIN]
        try:
            for ahead in range(passed, passed + self.recipe.accumulate):
                batches.append(iterator.peek(ahead))  # noqa: PERF401 - what came first is kept
        except StopIteration:
            pass
        return batches

    def plan(self, attempt: Attempt, context: StepContext) -> None:
        """Cut the batches into shards, and bring the arrays of each to the device that computes it.

        Raises:
            ValueError: A batch is empty or uneven, or the model cannot be trained.
        """
        request, recipe = attempt.request, self.recipe
        attempt.sizes = list(map(batch_size, attempt.batches))
        if self._uninitialised:
            self._initialise(attempt, context)
        self._follow()
        attempt.share = share = self.share(attempt.sizes)
        if self._ranks is not None:
            self._ranks.begin(attempt, self.training.iteration)
        attempt.work = [
            [(shard, shard_arrays(attempt.batches[shard.batch], shard, device, recipe.converter)) for shard in run]
            for run, device in zip(share.runs, self.group.devices, strict=True)
        ]
        attempt.task = GradientTask(
            request.loss_fn,
            self._policy,
            # The power of two is the same for all shards, so it cancels exactly; it keeps factors below 1.
            None if share.num_shards == 1 else 2.0 ** -(sum(attempt.sizes) - 1).bit_length(),
            self._factor(attempt),
            self.watch,
            recipe.reduction == "mean",
            request.look,
            request.deferred,
        )

    def _factor(self, attempt: Attempt) -> float | torch.Tensor:
        """Return the factor of the loss scale; nobody on the host reads one that follows flags on the device."""
        scale = attempt.scale
        if scale.fixed_factor is not None:
            return scale.fixed_factor
        return scale.factor_on(self.group.devices[0]) if attempt.request.deferred else scale.value.factor

    def _follow(self) -> None:
        """Follow the model where it has changed since the last time.

        Raises:
            ValueError: It is now one that cannot be trained.
        """
        if self.group.refresh() or self._is_stale:
            self._is_stale = True  # should what follows refuse the model, the next attempt has to look again
            self.layout = ModelLayout.of(self.group, self.recipe)
            self._is_stale = False
        for parameter in self.layout.parameters:
            if parameter._post_accumulate_grad_hooks:
                refuse_accumulate_hook(self.layout.named)
        if self.layout.slots:
            refuse_trained_buffers(self.group.model, self.layout.slots)

    def _initialise(self, attempt: Attempt, context: StepContext) -> None:
        """Give shapes and values to parameters that lack them, by the first shard of the first batch."""
        group, batch = self.group, attempt.batches[0]
        opening = self.share([batch_size(batch)]).opening
        args, kwargs = call_arguments(shard_arrays(batch, opening, group.devices[0], self.recipe.converter))
        lazy.initialise(
            group.model,
            lambda: attempt.request.loss_fn(group.model, *args, **kwargs),
            device=group.devices[0],
            seed=self.recipe.seed,
        )
        self.look_for_shapes()
        if context.savepoint is not None:
            context.savepoint.include(group.model)

    def compute(self, attempt: Attempt, context: StepContext) -> None:
        """Run forward and backward of all shards of this process, at once where there are threads for them.

        Raises:
            ReplicaError: User code raised in a shard, or a device hung.
            TypeError: The loss function returned no loss.
            ValueError: The loss cannot be used.
        """
        layout, request, work = self.layout, attempt.request, attempt.work
        if request.look is None:
            for parameter in layout.parameters:
                if request.wanted is None or id(parameter) in request.wanted:
                    parameter.grad = None  # the last gradient's memory is what this one will be written to
        if self._ranks is not None:
            self._ranks.watch_backward(attempt, self._position(attempt), layout.like)
        idle = [] if request.wanted is None else layout.others(request.wanted)
        devices: list[DeviceGradients | None] = [None] * len(work)

        def on_device(place: int) -> None:
            runner, shards = layout.runners[place], work[place]
            first, last = (shards[0][0].index, shards[-1][0]) if shards else (0, None)
            devices[place] = mine = DeviceGradients(
                attempt.task,
                last,
                layout.observers[place],
                ShardSum(first),
                runner.buffers.begin(first, unread=request.deferred),
            )
            with _without_gradients([runner.parameters[index] for index in idle]) if idle else NOTHING:
                runner.run(shards, mine, self._streams)

        timing = self._timing
        timed = on_device if timing is None else timing.timed(on_device, work)
        states = self._random.states() if self.training.iteration < self._random.end else None
        self._streams.compute(
            partial(self.group.run, timed, settings=context.settings),
            seed=self.recipe.seed,
            first=self.first_stream(request.ordinal),
            in_threads=self.group.wants_threads(work),
        )
        if states is not None:
            self._random.check(states)
        attempt.devices = devices  # type: ignore[assignment]  # every device has put its own there
        if timing is not None:
            self.group.workloads = timing.workloads(self.group.workloads)

    def reduce(self, attempt: Attempt, context: StepContext) -> None:
        """Sum over the devices of all processes in the tree's order, and divide once by the summed weight.

        Where a shard was left out after an interrupt whose handler lets the work go on, here or on another
        rank, the attempt is not complete, and has to be made again.

        Raises:
            ValueError: The loss is not computed with the replica that `loss_fn` is given.
            KeyboardInterrupt: Ctrl-C came.
            PeerError: Another rank failed.
        """
        layout, task, request = self.layout, attempt.task, attempt.request
        if request.look is None:
            for parameter in layout.parameters:
                if parameter.grad is not None:
                    check_no_leaked_gradients(layout.named, request.wanted)
                    break
        left_out = context.interrupts.check()
        if self._ranks is not None:
            self._ranks.reduce(
                attempt,
                position=self._position(attempt),
                again=left_out,
                workloads=self.group.workloads,
                like=layout.like,
                slots=layout.slots,
            )
            if attempt.complete:
                attempt.finite = [finish_whole(attempt.gradients, task.finish(attempt.reports))]
            return
        attempt.complete = not left_out
        if left_out:
            return
        partials: list[PartialSum] = []
        attempt.reports, attempt.buffers, attempt.samples = [], [], 0
        for device in attempt.devices:
            partials += device.gradients.partials
            attempt.reports += device.reports
            attempt.buffers.append(device.buffers)
            attempt.samples += device.samples
        attempt.gradients, attempt.finite = layout.tree_sum.finished(
            partials or [PartialSum(0, [None] * len(layout.parameters))],
            task.finish(attempt.reports),
            context.settings,
        )

    def check(self, attempt: Attempt) -> None:
        """Name the first parameter whose gradient is not finite, or leave the check on the device.

        Of an attempt that is not complete there is nothing to check.

        Raises:
            ValueError: No parameter has a gradient.
        """
        if not attempt.complete:
            return
        layout, gradients = self.layout, attempt.gradients
        for gradient in gradients:
            if gradient is not None:
                break
        else:
            if attempt.reports:
                raise ValueError(
                    "`loss_fn` must compute its loss with the model that it is given, a replica of yours; got "
                    "a loss that gives no parameter a gradient."
                )
        if layout.flat is not None:
            attempt.gradients = gradients = layout.flat.store(gradients)
        attempt.check = check_finite(layout.named, gradients, attempt.finite)

    def first_stream(self, ordinal: int = 0) -> int:
        """Return the position of the stream of this update's first shard in those of the run.

        Args:
            ordinal: How many gradients the update has computed before.
        """
        # Fewer batches than usual, at the end, leave positions unused; none is ever used twice.
        first = self.training.iteration * self.recipe.accumulate * self.shards_a_batch
        return first + computation_substream(ordinal) if ordinal else first

    def _position(self, attempt: Attempt) -> dict[str, Any]:
        """Say where this rank is, for the others to compare."""
        request = attempt.request
        return {
            "update": self.training.iteration,
            "computation": request.ordinal if request.look is None else "search for what is not finite",
            "loss scale": attempt.task.loss_scale,
            "batch sizes": attempt.sizes,
        }

    @property
    def shards_a_batch(self) -> int:
        """How many shards a batch is cut into."""
        if self.recipe.num_shards is not None:
            return self.recipe.num_shards
        return self._assignment.num_places(len(self.group.devices))

    @property
    def _assignment(self) -> ShardAssignment:
        """Assigns shards to the devices of all ranks."""
        return ALONE if self._ranks is None else self._ranks.assignment

    def share(self, sizes: Sequence[int]) -> RankShare:
        """Say which shards of batches of these sizes are computed in this process."""
        mine = self.group.workloads if self._ranks is None else self._ranks.workloads
        assignment = ALONE if self._ranks is None else self._ranks.assignment
        strided = self.recipe.split == "strided"
        return share_of(assignment, tuple(sizes), self.recipe.num_shards, tuple(mine), strided)

    def own_samples(self, ahead: int, size: int) -> list[range]:
        """Say which samples of a batch this process computes, if all batches of an update are that long.

        Args:
            ahead: How many batches come before it, from the first of an update on.
            size: Its number of samples.
        """
        accumulate = self.recipe.accumulate
        batch = ahead % accumulate
        runs = self.share([size] * accumulate).runs
        return [shard.samples for run in runs for shard in run if shard.batch == batch]

    def find_nonfinite(self, request: GradientRequest, context: StepContext) -> list[NonFiniteShard]:
        """Compute the pending batches, and list the shards whose gradients are not finite.

        Raises:
            StopIteration: The iterator has ended.
            ReplicaError: User code raised in a shard.
        """
        found: list[NonFiniteShard] = []

        def look(shard: Shard, gradients: Tensors, report: ShardReport) -> None:
            name = first_nonfinite(dict(zip(self.layout.named, gradients, strict=True)))
            if name is not None:
                loss = report.loss.item()
                found.append(NonFiniteShard(shard.index, shard.batch, shard.samples, loss, name))

        scale = self.training.scale
        attempt = Attempt(GradientRequest(request.loss_fn, look=look), scale, scale)
        self.take(attempt)
        self.plan(attempt, context)
        self.compute(attempt, context)
        self.reduce(attempt, context)
        everywhere = found if self._ranks is None else self._ranks.gather_nonfinite(found)
        return sorted(everywhere, key=lambda each: each.shard)

    def release(self) -> None:
        """End the replicas' threads and give torch back its random kernels, until the next attempt."""
        self.group.release()
        self._streams.release()


@contextmanager
def _without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let a replica's parameters require no gradient for a while, so that backward leaves them out."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
