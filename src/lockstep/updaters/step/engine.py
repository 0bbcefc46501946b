"""The stages of an update that change nothing: from the iterator's batches to a checked gradient."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch

from lockstep.communicators import Watch
from lockstep.plan import Shard
from lockstep.precision import first_nonfinite
from lockstep.replicas import (
    ShardStreams,
    TreeSum,
    check_no_accumulate_hooks,
    check_no_leaked_gradients,
    check_no_trained_buffers,
    finish_whole,
)
from lockstep.streams import DEFAULT_GENERATOR_LOCK, computation_substream
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
    without_gradients,
)
from lockstep.updaters.ranks import RankReduction
from lockstep.updaters.result import NonFiniteShard, ShardReport
from lockstep.updaters.setup import MAIN, Recipe, batch_size, call_arguments, shard_arrays
from lockstep.updaters.state import Training, lazy

LOCAL_ASSIGNMENT: Final = ShardAssignment()
NO_CONTEXT: Final[AbstractContextManager[None]] = nullcontext()


class GradientEngine:
    """Computes gradients of batches on several replicas, with the same bits on any devices.

    The methods `take` to `check` are the stages of an update, and fill in an `Attempt`. They change nothing of the
    training state, except that parameters without a shape get one.

    Args:
        training: The training state.
        recipe: The recipe of the update.
        watch: Where this process records what it is doing.
        device_timer: Times the devices; None if workloads are not to be measured.
        ranks: The reduction over ranks; None for a single process.
    """

    def __init__(
        self,
        training: Training,
        recipe: Recipe,
        *,
        watch: Watch,
        device_timer: DeviceTimer | None = None,
        ranks: RankReduction | None = None,
    ) -> None:
        self.training = training
        self.recipe = recipe
        self.watch = watch
        self.replicas = training.replicas
        self._ranks = ranks
        self._device_timer = device_timer
        self._policy = recipe.policy
        self._streams = ShardStreams(self.replicas.devices, lock=DEFAULT_GENERATOR_LOCK)
        self.layout = ModelLayout(TreeSum(self.replicas, []))
        """The layout of the model as of the last attempt; empty before the first."""
        self._is_stale = True
        self._random_watch = GlobalRandomWatch()
        self.refresh_uninitialised()

    def refresh_uninitialised(self) -> None:
        """Check again whether parameters lack their shapes, after a load may have changed that, and watch draws."""
        self._random_watch.restart(self.training.iteration)
        self._uninitialised = lazy.is_uninitialised(self.replicas.model)

    def take(self, attempt: Attempt) -> None:
        """Read the iterator's next batches without advancing it, unless the attempt has given batches.

        Raises:
            StopIteration: If the iterator has ended.
        """
        if attempt.given_batches:
            attempt.batches = attempt.given_batches
            return
        self.watch.doing = "data loading"
        attempt.batches = self._next_batches(attempt.skipped_batches)
        if not attempt.batches:
            raise StopIteration

    def has_batches(self, skip: int) -> bool:
        """Return whether the iterator has a batch after the next `skip` ones."""
        return bool(self._next_batches(skip))

    def _next_batches(self, skip: int) -> list[Any]:
        """Return the batches of one attempt; fewer than `accumulate`, or none, where the iterator ends."""
        batches: list[Any] = []
        iterator = self.training.iterators[MAIN]
        try:
            for ahead in range(skip, skip + self.recipe.accumulate):
                batches.append(iterator.peek(ahead))  # noqa: PERF401 - what came first is kept
        except StopIteration:
            pass
        return batches

    def plan(self, attempt: Attempt, context: StepContext) -> None:
        """Cut the batches into shards, and copy the arrays of each to the device that computes it.

        Raises:
            ValueError: If a batch is empty or its tensors differ in length, or if the model cannot be trained.
        """
        request, recipe = attempt.request, self.recipe
        for network in self.training.models.values():
            if network.training:
                break
        else:
            self.training.ensure_training_mode()
        attempt.sizes = list(map(batch_size, attempt.batches))
        if self._uninitialised:
            self._initialise(attempt, context)
        self._refresh_layout()
        attempt.share = share = self.share(attempt.sizes)
        # The clock of this rank starts here, so that the conversion of its samples counts as its work.
        if self._ranks is not None:
            self._ranks.start_attempt(attempt, self.training.iteration)
        attempt.device_shards = [
            [(shard, shard_arrays(attempt.batches[shard.batch], shard, device, recipe.converter)) for shard in run]
            for run, device in zip(share.runs, self.replicas.devices, strict=True)
        ]
        attempt.task = GradientTask(
            request.loss_fn,
            self._policy,
            # The same power of two for all shards cancels exactly; it keeps the factors of backward at most 1.
            None if share.num_shards == 1 else 2.0 ** -(sum(attempt.sizes) - 1).bit_length(),
            self._factor(attempt),
            self.watch,
            recipe.reduction == "mean" and not request.summed,
            request.inspect_shard,
            request.deferred,
        )

    def _factor(self, attempt: Attempt) -> float | torch.Tensor:
        """Return the loss scale factor; with a deferred check it stays on the device."""
        scale = attempt.scale
        if scale.fixed_factor is not None:
            return scale.fixed_factor
        return scale.factor_on(self.replicas.devices[0]) if attempt.request.deferred else scale.value.factor

    def _refresh_layout(self) -> None:
        """Update the layout if the model has changed since the last attempt.

        Raises:
            ValueError: If the model cannot be trained any more.
        """
        if self.replicas.refresh() or self._is_stale:
            # Stays set if the model is refused below, so that the next attempt checks it again.
            self._is_stale = True
            self.layout = ModelLayout.of(self.replicas, self.recipe)
            self._is_stale = False
        for parameter in self.layout.parameters:
            if parameter._post_accumulate_grad_hooks:
                check_no_accumulate_hooks(self.layout.named_parameters)
        if self.layout.buffer_refs:
            check_no_trained_buffers(self.replicas.model, self.layout.buffer_refs)

    def _initialise(self, attempt: Attempt, context: StepContext) -> None:
        """Initialise parameters without a shape by the first shard of the first batch."""
        replicas, batch = self.replicas, attempt.batches[0]
        first_shard = self.share([batch_size(batch)]).first_shard
        args, kwargs = call_arguments(shard_arrays(batch, first_shard, replicas.devices[0], self.recipe.converter))
        lazy.initialise(
            replicas.model,
            lambda: attempt.request.loss_fn(replicas.model, *args, **kwargs),
            device=replicas.devices[0],
            seed=self.recipe.seed,
        )
        self.refresh_uninitialised()
        # A failed step function keeps these shapes, so their first values belong to its savepoint.
        if context.savepoint is not None:
            context.savepoint.include(replicas.model)

    def compute(self, attempt: Attempt, context: StepContext) -> None:
        """Run forward and backward of all shards of this process, concurrently where there are several threads.

        Raises:
            ReplicaError: If user code raised in a shard, or if a device hung.
            TypeError: If the loss function did not return a loss.
            ValueError: If the loss cannot be used.
        """
        layout, request, device_shards = self.layout, attempt.request, attempt.device_shards
        if request.inspect_shard is None:
            for parameter in layout.parameters:
                # Frees the memory of the last gradient for this one, and lets `reduce` detect gradients of the
                # original.
                if request.wanted is None or id(parameter) in request.wanted:
                    parameter.grad = None
        if self._ranks is not None:
            self._ranks.begin_early_send(attempt, self._position(attempt), layout.like)
        unwanted = [] if request.wanted is None else layout.unwanted_indices(request.wanted)
        device_gradients: list[DeviceGradients | None] = [None] * len(device_shards)

        def on_device(place: int) -> None:
            runner, shards = layout.runners[place], device_shards[place]
            first, last = (shards[0][0].index, shards[-1][0]) if shards else (0, None)
            device_gradients[place] = own = DeviceGradients(
                attempt.task,
                last,
                layout.observers[place],
                ShardSum(first),
                runner.buffers.start_shards(first, deferred=request.deferred),
            )
            with without_gradients([runner.parameters[index] for index in unwanted]) if unwanted else NO_CONTEXT:
                runner.run(shards, own, self._streams)

        device_timer = self._device_timer
        timed = on_device if device_timer is None else device_timer.timed(on_device, device_shards)
        generators = self._random_watch.states() if self.training.iteration < self._random_watch.end else None
        # Streams are numbered by update and shard, so it does not matter which thread draws from one first.
        self._streams.compute(
            partial(self.replicas.run, timed, settings=context.settings),
            seed=self.recipe.seed,
            first=self.first_stream(request.ordinal),
            in_threads=self.replicas.wants_threads(device_shards),
        )
        if generators is not None:
            self._random_watch.check(generators)
        attempt.device_gradients = device_gradients  # type: ignore[assignment]  # every device has put its own there
        if device_timer is not None:
            self.replicas.workloads = device_timer.next_workloads(self.replicas.workloads)

    def reduce(self, attempt: Attempt, context: StepContext) -> None:
        """Sum over the devices of all processes in the tree's order, and divide once by the total weight.

        If a shard was left out after an interrupt whose handler returned, here or on another rank, the attempt is not
        complete and must be repeated.

        Raises:
            ValueError: If the loss is not computed with the replica that `loss_fn` receives.
            KeyboardInterrupt: If Ctrl-C was pressed.
            PeerError: If another rank failed.
        """
        layout, task, request = self.layout, attempt.task, attempt.request
        if request.inspect_shard is None:
            for parameter in layout.parameters:
                if parameter.grad is not None:
                    check_no_leaked_gradients(layout.named_parameters, request.wanted)
                    break
        # Over ranks the last point at which an interrupt is delivered: after the exchange all ranks commit together.
        left_out = context.interrupts.check()
        if self._ranks is not None:
            self._ranks.reduce(
                attempt,
                position=self._position(attempt),
                repeat=left_out,
                workloads=self.replicas.workloads,
                like=layout.like,
                buffer_refs=layout.buffer_refs,
            )
            if attempt.complete:
                attempt.finite_slices = [finish_whole(attempt.gradients, task.normalizer(attempt.reports))]
            return
        attempt.complete = not left_out
        if left_out:
            return
        partials: list[PartialSum] = []
        attempt.reports, attempt.buffers, attempt.samples = [], [], 0
        for device in attempt.device_gradients:
            partials += device.gradients.partials
            attempt.reports += device.reports
            attempt.buffers.append(device.buffers)
            attempt.samples += device.samples
        attempt.gradients, attempt.finite_slices = layout.tree_sum.finished(
            # All shards had weight 0.
            partials or [PartialSum(0, [None] * len(layout.parameters))],
            task.normalizer(attempt.reports),
            context.settings,
        )

    def check(self, attempt: Attempt) -> None:
        """Check whether the gradient is finite, or leave the check on the device.

        An attempt that is not complete is not checked.

        Raises:
            ValueError: If no parameter has a gradient.
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
                    "`loss_fn` must compute its loss with the model that it is given, a replica of yours, got "
                    "a loss that gives none of its parameters a gradient."
                )
        if layout.flat is not None:
            attempt.gradients = gradients = layout.flat.store(gradients)
        attempt.check = check_finite(layout.named_parameters, gradients, attempt.finite_slices)

    def first_stream(self, ordinal: int = 0) -> int:
        """Return the position of the random stream of this update's first shard among all streams of the run.

        Args:
            ordinal: The number of gradients that the update has computed before.
        """
        # An update with fewer batches, at the end of the data, leaves positions unused; none is ever used twice.
        first = self.training.iteration * self.recipe.accumulate * self.shards_per_batch
        return first + computation_substream(ordinal) if ordinal else first

    def _position(self, attempt: Attempt) -> dict[str, Any]:
        """Return where this rank is, for comparison with the other ranks."""
        request = attempt.request
        return {
            "update": self.training.iteration,
            "computation": request.ordinal if request.inspect_shard is None else "search for what is not finite",
            "loss scale": attempt.task.loss_scale,
            "batch sizes": attempt.sizes,
        }

    @property
    def shards_per_batch(self) -> int:
        """The number of shards that a batch is cut into."""
        if self.recipe.num_shards is not None:
            return self.recipe.num_shards
        return self._assignment.num_devices(len(self.replicas.devices))

    @property
    def _assignment(self) -> ShardAssignment:
        """The assignment of shards to the devices of all ranks."""
        return LOCAL_ASSIGNMENT if self._ranks is None else self._ranks.assignment

    def share(self, sizes: Sequence[int]) -> RankShare:
        """Return the shards of an update with batches of these sizes that this process computes."""
        # Over ranks, the workloads that were last exchanged: measured ones must not be used before all ranks know them.
        own = self.replicas.workloads if self._ranks is None else self._ranks.workloads
        assignment = LOCAL_ASSIGNMENT if self._ranks is None else self._ranks.assignment
        strided = self.recipe.split == "strided"
        return share_of(assignment, tuple(sizes), self.recipe.num_shards, tuple(own), strided)

    def own_samples(self, ahead: int, size: int) -> list[range]:
        """Return the samples of a batch that this process computes, if all batches of the update have this size.

        Args:
            ahead: The number of batches before this one, counted from the first of an update.
            size: The number of samples in the batch.
        """
        accumulate = self.recipe.accumulate
        batch = ahead % accumulate
        runs = self.share([size] * accumulate).runs
        return [shard.samples for run in runs for shard in run if shard.batch == batch]

    def find_nonfinite(self, request: GradientRequest, context: StepContext) -> list[NonFiniteShard]:
        """Compute the pending batches, and list the shards whose gradients are not finite.

        Raises:
            StopIteration: If the iterator has ended.
            ReplicaError: If user code raised in a shard.
        """
        found: list[NonFiniteShard] = []

        def inspect_shard(shard: Shard, gradients: Tensors, report: ShardReport) -> None:
            name = first_nonfinite(dict(zip(self.layout.named_parameters, gradients, strict=True)))
            if name is not None:
                loss = report.loss.item()
                found.append(NonFiniteShard(shard.index, shard.batch, shard.samples, loss, name))

        scale = self.training.scale
        attempt = Attempt(replace(request, inspect_shard=inspect_shard), scale, scale)
        self.take(attempt)
        self.plan(attempt, context)
        self.compute(attempt, context)
        self.reduce(attempt, context)
        everywhere = found if self._ranks is None else self._ranks.gather_nonfinite(found)
        return sorted(everywhere, key=lambda each: each.shard)

    def release(self) -> None:
        """Stop the threads of replicas and restore PyTorch's random kernels, until the next attempt."""
        self.replicas.release()
        self._streams.release()
