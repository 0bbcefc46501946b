"""The stages of an update that change nothing: from the iterator's batches to a checked gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import Any, Final

from lockstep.communicators import Watch, refusing_collectives
from lockstep.nest import call_arguments
from lockstep.plan import Shard
from lockstep.precision import parameters_of
from lockstep.replicas import (
    NoMeans,
    ShardStreams,
    TreeSum,
    check_no_accumulate_hooks,
    check_no_leaked_gradients,
    check_no_trained_buffers,
    finish_whole,
    has_compiled,
    refusing_writes,
    warn_of_means,
)
from lockstep.streams import DEFAULT_GENERATOR_LOCK, computation_substream
from lockstep.tree import PartialSum, ShardSum
from lockstep.updaters.attempt.attempt import Attempt, GradientRequest, check_finite
from lockstep.updaters.attempt.audit import ATTRIBUTES, TENSORS, Audit, Auditor, Exchange, names_of_seals
from lockstep.updaters.attempt.context import UpdateContext
from lockstep.updaters.compute.clock import Clock, MeasuredSpeeds, workloads_of
from lockstep.updaters.compute.prepared_model import PreparedModel
from lockstep.updaters.compute.shard_gradients import NO_CONTEXT, DeviceGradientTask, GradientContext
from lockstep.updaters.compute.shares import RankShare, share_of
from lockstep.updaters.detectors import code_of, read_states, states, tensors_of_own
from lockstep.updaters.loss import is_summed
from lockstep.updaters.ranks.rank_reduction import RankReduction
from lockstep.updaters.setup.batches import Conversion, batch_size, changes, check_whole, may_draw, read_batches
from lockstep.updaters.setup.names import MAIN
from lockstep.updaters.setup.recipe import Recipe, batches_per_update, most_batches
from lockstep.updaters.state import lazy
from lockstep.updaters.state.carried import CarriedAttempt
from lockstep.updaters.state.training import TrainingState
from lockstep.updaters.step.checks import (
    CONSUME,
    GRADIENT_OF,
    PRESENT,
    USED_SEED,
    USED_VERSION,
    VERSION_OF,
    check_first_shards,
    check_no_unused_gradients,
    check_reached,
    options_of,
    warn_of_no_means,
    warn_of_repeated_streams,
)
from lockstep.updaters.step.next_batches import NextBatches
from lockstep.updaters.step.originals import noting_reads
from lockstep.updaters.step.parts import compare_parts
from lockstep.updaters.step.recomputation import Recomputation, one_at_a_time

ACCUMULATE_HOOKS_OF: Final = attrgetter("_post_accumulate_grad_hooks")
CHECKED_UPDATES: Final = 3
"""The number of updates that are checked after an updater was built or a state was loaded."""
AUDITED_AGAIN: Final = 8
"""The number of updates after which another one is audited, as after 16, 32, 64, ...: what a program does wrong may
begin later, such as in a second phase of its loss."""
WHY_NOT_TO_SEND: Final = (
    "They are called for each shard of a batch, of which each rank has its own number. Remove the call, and compute a "
    "loss over the whole batch by a BatchLoss."
)
"""Why shards send nothing themselves."""


class GradientEngine:
    """Computes gradients of batches on several replicas, with the same bits on any devices.

    The methods `take` to `check` are the stages of an update, and fill in an `Attempt`. They change nothing of the
    training state, except that parameters without a shape get one.

    Args:
        training: The training state.
        recipe: The recipe of the update.
        auditor: Chooses the shards that are computed twice.
        watch: Where this process records what it is doing.
        measure_speeds: Whether the speeds of devices are measured, to assign shards by them.
        ranks: The reduction over ranks; None for a single process.

    Attributes:
        ranks: The reduction over ranks; None for a single process.
        watch: Where this process records what it is doing.
        clock: Measures times while something wants to know them, and is the watch then.
        auditor: Chooses the shards that are computed twice.
        ahead: Copies the batches of the next update to accelerators; None where batches are not copied ahead.
        conversion: Creates the tensors of shards.
    """

    def __init__(
        self,
        training: TrainingState,
        recipe: Recipe,
        auditor: Auditor,
        *,
        watch: Watch,
        measure_speeds: bool = False,
        ranks: RankReduction | None = None,
    ) -> None:
        self.training = training
        self.recipe = recipe
        self.replicas = training.replicas
        self.watch = watch
        self._plain_watch = watch
        self.clock = Clock(watch, self.replicas.devices)
        self.ahead: NextBatches | None = None
        self.conversion = Conversion(recipe.converter, recipe.batch_dim, recipe.seed)
        self.ranks, self._rank = ranks, 0 if ranks is None else ranks.rank
        self._speeds = MeasuredSpeeds(self.clock, len(self.replicas.devices)) if measure_speeds else None
        self._precision = recipe.precision_policy
        self.streams = ShardStreams(self.replicas.devices, lock=DEFAULT_GENERATOR_LOCK)
        self.prepared = PreparedModel(TreeSum(self.replicas, []))
        """The model as prepared for the last attempt; empty before the first."""
        self._is_stale = True
        self._weighted = False
        self._merges = True
        self.used_at: dict[int, int] = {}
        """The version of each parameter after the last update, by its ``id``."""
        self._announced_batches = self.batches_per_update
        self._most_batches = most_batches(recipe.accumulate)
        self.auditor = auditor
        self.restart_checks()

    def restart_checks(self) -> None:
        """Check again for parameters without a shape, and watch again for what shards should not do."""
        self._start = self._audited = self.training.iteration
        self._checked_until = self._start + CHECKED_UPDATES
        self._audited_again = self._start + AUDITED_AGAIN
        self._watches_means = True
        self.auditor.restart(self._start)
        self._uninitialised = lazy.is_uninitialised(self.replicas.model)
        self._loss_fns: list[Any] = []

    @property
    def is_first(self) -> bool:
        """Whether the next update is one of the first, in which there are more checks."""
        return self.training.iteration < self._checked_until

    def take(self, attempt: Attempt) -> None:
        """Read the iterator's next batches without advancing it, unless the attempt has given batches.

        Raises:
            StopIteration: If the iterator has ended.
        """
        # Not the clock where nothing is measured, because phases are set several times per shard.
        self.watch = self.clock if self.clock.num_users else self._plain_watch
        attempt.batches = attempt.given_batches or self.next_batches(attempt.skipped_batches)
        if not attempt.batches:
            raise StopIteration

    def next_batches(self, skip: int) -> list[Any]:
        """Return the batches of one attempt; fewer than `accumulate`, or none, where the iterator ends."""
        self.watch.phase = "data loading"
        iterator = self.training.iterators[MAIN]
        number = self.batches_per_update
        if number != self._announced_batches and self.ranks is not None:
            # Workers have loaded samples of batches that are at another position in their update now.
            self._announced_batches = number
            iterator.load_only(self.own_samples)
        return read_batches(iterator, range(skip, skip + number))

    def plan(self, attempt: Attempt, context: UpdateContext) -> None:
        """Cut the batches into shards, and copy the tensors of each to the device that computes it.

        Raises:
            ValueError: If a batch is empty or its tensors differ in length, or if the model cannot be trained.
        """
        request, recipe, update = attempt.request, self.recipe, self.training.iteration
        self.training.ensure_training_mode()
        # Over ranks, all adopt the speeds of all in the same exchange.
        if self._speeds is not None and self._speeds.found is not None and self.ranks is None:
            (self.replicas.workloads,), self._speeds = workloads_of([self._speeds.found]), None
        if update == self._audited_again:
            self._audited, self._audited_again = update, 2 * update - self._start
            self.auditor.audit_again(update)
        attempt.summed = is_summed(request.loss_fn)
        attempt.sizes = list(map(batch_size, attempt.batches, repeat(recipe.batch_dim)))
        if self._uninitialised:
            self._initialise(attempt, context)
        self.refresh_prepared()
        attempt.share = share = self.share(attempt.sizes)
        # The clock of this rank starts here, so that the conversion of its samples counts as its work.
        if self.ranks is not None:
            self.ranks.start_attempt(attempt, update)
        # The same position for all gradients of an update: a loop converts a batch once.
        first = self.first_stream() if self.conversion.is_own else 0
        ahead = None if self.ahead is None else self.ahead.take(attempt.batches, share, first)
        audits = attempt.audit is not None or update >= self.auditor.next
        # Copied where a shard may be computed more than once, or is not one piece of its batch.
        again = audits or update < self._checked_until or attempt.given_batches or attempt.scale.fixed_factor is None
        lends = not again and self.recipe.split != "strided"
        attempt.device_shards = ahead or self.conversion.shards(
            attempt.batches, share.shards_by_device, self.replicas.devices, first, lends=lends
        )
        if audits:
            attempt.audit = self._choose_audit(attempt)
        if self.ranks is not None:
            attempt.may_send_early = update + 1 != self._audited_again and not self.auditor.is_followed(update)
        scale, audit, former = attempt.scale, attempt.audit, self.training.carried
        carried = None if former is None else CarriedAttempt(former, attempt.sizes)
        attempt.gradient_context = gradients = GradientContext(
            request.loss_fn,
            self._precision,
            None if share.num_shards == 1 else sum(attempt.sizes),
            # With a deferred check the factor of a scale that moves stays on the device.
            scale.factor_on(self.replicas.devices[0])
            if request.deferred and scale.fixed_factor is None
            else scale.fixed_factor or scale.value.factor,
            self.watch,
            recipe.reduction == "mean" and not attempt.summed,
            weighted=self._weighted,
            inspect_shard=request.inspect_shard
            if audit is None
            else partial(self._again().record, audit, share, carried),
            deferred=request.deferred,
            carried=carried,
            shard_loss=request.shard_loss,
            merges=self._merges and self.prepared.has_large,
        )
        if update < self._checked_until:
            gradients.is_first, gradients.at_start, gradients.foreign_leaves = True, update == self._start, []
            self.streams.has_drawn = False if update == 0 and not self.used_at and self._goes_on() else None
            gradients.options, gradients.original_reads = options_of(self.training.optimizers, request.loss_fn), {}
        else:
            self._loss_fns = []  # which may hold batches
        # On accelerators the host would wait in every update.
        reads = update == self._start or audit is not None or not (self.replicas.accelerators or request.deferred)
        if self._watches_means and reads and share.num_shards > 1 and gradients.mean and not request.shard_loss:
            gradients.no_means = NoMeans()
        if audit is not None:
            gradients.inspected = audit.compared

    def _choose_audit(self, attempt: Attempt) -> Audit | None:
        """Choose the shard that is computed twice, or None if the update is not audited."""
        request, update = attempt.request, self.training.iteration
        # The outputs that a `BatchLoss` gathers are computed once more for its gradient.
        if not self.auditor.is_due(update) or request.gathers or request.inspect_shard is not None:
            return None
        everywhere = attempt.share.everywhere
        audit = self.auditor.choose(everywhere, self._rank, update, movable=not may_draw(attempt.batches))
        carried = () if self.training.carried is None else self.training.carried.names
        others = [*(ref.path for ref in self.prepared.buffer_refs), *carried]
        audit.names = names_of_seals(self.prepared.named_parameters, others)
        audit.compares_buffers = update == self._audited and attempt.share.num_shards > 1
        # Where something is compiled, a new copy would be compiled anew, or no more.
        audit.renews = self.auditor.only_warns and update == self._audited != self._start and not has_compiled()
        # Elsewhere it would need memory of its own for the parameters.
        audit.renews &= len({*self.replicas.devices}) == 1
        if self.is_first:
            models = [self.replicas.model, *self.replicas.replicas]
            audit.steps_by = {f"`{name}`" for name in tensors_of_own(self.training.optimizers.values(), models)}
            audit.states = partial(states, request.loss_fn, models, self.training.optimizers.values())
            audit.began = audit.states()
            others = [each for each in self._loss_fns if code_of(each) is not code_of(request.loss_fn)]
            self._loss_fns = [*others, request.loss_fn]
            audit.others = partial(read_states, others, models)
            audit.others_began = audit.others()
        self._again().choose_neighbours(attempt, audit)
        return audit

    def _again(self) -> Recomputation:
        """Return what computes shards again."""
        what = self.training, self.recipe, self.replicas, self.prepared, self.streams, self.conversion
        return Recomputation(*what, self.first_stream, self._run_shards, self.is_first)

    def _run_shards(  # noqa: PLR0917 - the device comes last, because threads give it
        self,
        prepared: PreparedModel,
        tasks: list[DeviceGradientTask | None],
        context: GradientContext,
        request: GradientRequest,
        shards_of: Callable[[int], list[tuple[Shard, Any]] | None],
        place: int,
    ) -> None:
        """Compute the shards of a device, and add the task with their sums to those of other devices."""
        shards = shards_of(place)
        if shards is None:
            return
        runner = prepared.runners[place]
        first, last = (shards[0][0].index, shards[-1][0]) if shards else (0, None)
        start = runner.buffers.start_shards(first, deferred=request.deferred, compares=context.at_start)
        tasks[place] = task = DeviceGradientTask(context, last, prepared.observers[place], ShardSum(first), start)
        with NO_CONTEXT if request.wanted is None else prepared.only(request.wanted, runner):
            runner.run(shards, task, self.streams)

    def _cut_again(self, attempt: Attempt, place: int) -> list[tuple[Shard, Any]]:
        """Return the shards of a device, which run again, with the tensors that they had first."""
        shards, device = attempt.share.shards_by_device[place], self.replicas.devices[place]
        again = self.conversion.shards(attempt.batches, [shards], [device], self.first_stream())
        (attempt.device_shards[place],) = again
        return attempt.device_shards[place]

    def refresh_prepared(self) -> None:
        """Prepare the model again if it has changed since the last attempt.

        Raises:
            ValueError: If the model cannot be trained any more.
        """
        if self.replicas.refresh() or self._is_stale:
            # Stays set if the model is refused below, so that the next attempt checks it again.
            self._is_stale = True
            check_reached(self.training.optimizers, self.replicas.model)
            self.prepared = PreparedModel.of(self.replicas, self.recipe)
            self._drop_lost_gradients()
            self._is_stale = False
        if any(map(ACCUMULATE_HOOKS_OF, self.prepared.parameters)):
            check_no_accumulate_hooks(self.prepared.named_parameters)
        if self.prepared.buffer_refs:
            check_no_trained_buffers(self.replicas.model, self.prepared.buffer_refs)

    def _drop_lost_gradients(self) -> None:
        """Drop the last gradients of parameters that have left the model, by which optimizers would step again."""
        known = set(map(id, self.replicas.model.parameters()))
        for optimizer in self.training.optimizers.values():
            for parameter in parameters_of(optimizer):
                if id(parameter) not in known:
                    parameter.grad = None

    def _initialise(self, attempt: Attempt, context: UpdateContext) -> None:
        """Initialise parameters without a shape by the first shard of the first batch."""
        replicas, batch = self.replicas, attempt.batches[0]
        shard = self.share([attempt.sizes[0]]).first_shard
        shards = self.conversion.shards([batch], [[shard]], replicas.devices[:1], self.first_stream())
        args, kwargs = call_arguments(shards[0][0][1])
        if self.training.carried is not None:
            kwargs["carried"] = self.training.carried.part(shard.samples, replicas.devices[0])
        lazy.initialise(
            replicas.model,
            lambda: attempt.request.loss_fn(replicas.model, *args, **kwargs),
            device=replicas.devices[0],
            seed=self.recipe.seed,
        )
        self.restart_checks()
        # A failed step function keeps these shapes, so their first values belong to its savepoint.
        if context.savepoint is not None:
            context.savepoint.include(replicas.model)

    def compute(self, attempt: Attempt, context: UpdateContext) -> None:
        """Run forward and backward of all shards of this process, concurrently where there are several threads.

        Raises:
            ReplicaError: If user code raised in a shard, or if a device hung.
            TypeError: If the loss function did not return a loss.
            ValueError: If the loss cannot be used.
        """
        prepared, request, device_shards = self.prepared, attempt.request, attempt.device_shards
        gradients = attempt.gradient_context
        if request.inspect_shard is None:
            self._remove_gradients(request.wanted)
        if self.ranks is not None:
            self.ranks.begin_early_send(attempt, self._position(attempt), prepared.like)
        device_tasks: list[DeviceGradientTask | None] = [None] * len(device_shards)

        def shards_of(place: int) -> list[tuple[Shard, Any]]:
            # Once more, where the first run has drawn from the default generator.
            return device_shards[place] if device_tasks[place] is None else self._cut_again(attempt, place)

        if self._speeds is not None:
            self._speeds.start_computation()
        untimed = partial(self._run_shards, prepared, device_tasks, gradients, request, shards_of)
        compute = self.clock.timed(untimed) if self.clock.num_users else untimed
        if attempt.audit is not None and attempt.audit.neighbours and not self.replicas.watches_all:
            # So that nothing is changed by chance before `side_by_side`. A device that waits would count as hung.
            compute = one_at_a_time(compute)
        # Streams are numbered by update and shard, so it does not matter which thread draws from one first.
        checks = self.training.iteration == self._audited
        # Gradients of an attempt after an overflow may be sent meanwhile.
        alone = checks and self.ranks is not None and gradients.early_send is None
        with refusing_writes(self.replicas) if checks else NO_CONTEXT:
            with (
                refusing_collectives("`loss_fn` and the model", WHY_NOT_TO_SEND) if alone else NO_CONTEXT,
                noting_reads(self.replicas.model, gradients.original_reads) if gradients.is_first else NO_CONTEXT,
            ):
                self.streams.run(
                    partial(self.replicas.run, compute, settings=context.settings),
                    seed=self.recipe.seed,
                    first=self.first_stream(request.computation),
                    parallel=self.replicas.wants_threads(device_shards),
                )
            if attempt.audit is not None and not self.replicas.stopping:
                attempt.audit.run(partial(self._again().elsewhere, attempt, attempt.audit, context))
                self._again().side_by_side(attempt, attempt.audit, context)
                compare_parts(self._again(), attempt, attempt.audit, context)
        if attempt.audit is not None:
            warn_of_means(attempt.audit.left)
        attempt.device_tasks = device_tasks  # type: ignore[assignment]  # every device has put its task there
        if self._speeds is not None:
            self._speeds.end_computation(device_shards)
        # Here, because the devices have been given their work, and the host has not waited for it yet.
        if self.ahead is not None and not attempt.given_batches and request.inspect_shard is None:
            self.watch.phase = "data loading"
            first = self.first_stream(ahead=1) if self.conversion.is_own else 0
            self.ahead.copy(attempt.consumed_batches, self.batches_per_update, first)

    def _goes_on(self) -> bool:
        """Return whether an updater with the same seed has left the weights, from which this one begins anew."""
        found = [each for each in self.prepared.parameters if each.grad is not None]
        return any(vars(each.grad).get(USED_SEED) == (self.recipe.seed, each._version) for each in found)

    def _check_first(self, attempt: Attempt) -> None:
        """Check what the shards of one of the first updates have used, changed and drawn, before they are summed."""
        check_first_shards(attempt, self.prepared, self.replicas.model, self.training.optimizers)
        if self.streams.has_drawn:
            warn_of_repeated_streams(self.recipe.seed)
        self.streams.has_drawn = None

    def _remove_gradients(self, wanted: Collection[int] | None) -> None:
        """Free the memory of the last gradients for new ones, and let `reduce` detect gradients of the original."""
        parameters = self.prepared.parameters
        gradients = list(filter(PRESENT, map(GRADIENT_OF, parameters)))
        if list(map(getattr, gradients, repeat(USED_VERSION), repeat(None))) != list(map(VERSION_OF, gradients)):
            named, optimizers = self.prepared.named_parameters, self.training.optimizers.values()
            check_no_unused_gradients(named, wanted, self.used_at, optimizers)
        if wanted is not None:
            parameters = [each for each in parameters if id(each) in wanted]
        CONSUME(map(setattr, parameters, repeat("grad"), repeat(None)))

    def reduce(self, attempt: Attempt, context: UpdateContext) -> None:
        """Sum over the devices of all processes in the tree's order, and divide once by the total weight.

        If a shard was left out after an interrupt whose handler returned, here or on another rank, the attempt is not
        complete and must be repeated.

        Raises:
            ValueError: If the loss is not computed with the replica that `loss_fn` receives.
            KeyboardInterrupt: If Ctrl-C was pressed.
            PeerError: If another rank failed.
        """
        prepared, request, normalizer = self.prepared, attempt.request, attempt.gradient_context.normalizer
        if request.inspect_shard is None and any(map(PRESENT, map(GRADIENT_OF, prepared.parameters))):
            check_no_leaked_gradients(prepared.named_parameters, request.wanted)
        if attempt.gradient_context.is_first:
            self._check_first(attempt)
        if (no_means := attempt.gradient_context.no_means) is not None and no_means.found:
            self._watches_means = False
            warn_of_no_means(no_means.found)
        # Over ranks the last point at which an interrupt is delivered: after the exchange all ranks commit together.
        left_out = context.interrupts.check()
        if self.ranks is None and attempt.audit is not None:
            left_out |= self._is_refuted(attempt, context)
        left_out |= attempt.gradient_context.merges and self._is_spoiled(attempt)
        self.watch.phase = "reduce"
        if self.ranks is not None:
            self.ranks.reduce(
                attempt,
                position=self._position(attempt),
                repeat=left_out,
                speeds=None if self._speeds is None else self._speeds.found,
                buffer_refs=prepared.buffer_refs,
                refuted=partial(self._is_refuted, attempt, context),
                damaged=partial(self.auditor.must_repeat_sum, (self.training.iteration, request.computation)),
            )
            if attempt.complete:
                attempt.slices_are_finite = [finish_whole(attempt.gradients, normalizer(attempt.reports))]
            return
        attempt.complete = not left_out
        if left_out:
            return
        if attempt.gradient_context.carried is not None:
            attempt.carried = attempt.gradient_context.carried.merged()
        partials: list[PartialSum] = []
        attempt.reports, attempt.buffer_sums, attempt.buffer_weight = [], [], 0
        for task in attempt.device_tasks:
            partials += task.gradients.partials
            attempt.reports += task.reports
            attempt.buffer_sums.append(task.buffer_sum)
            attempt.buffer_weight += task.buffer_weight
        attempt.gradients, attempt.slices_are_finite = prepared.tree_sum.reduce(
            # All shards had weight 0.
            partials or [PartialSum(0, [None] * len(prepared.parameters))],
            normalizer(attempt.reports),
            context.settings,
        )

    def _is_spoiled(self, attempt: Attempt) -> bool:
        """Return whether gradients were added in another order; those of later attempts are not added that early."""
        spoiled = any(task.spoiled for task in attempt.device_tasks)
        self._merges = self._merges and not spoiled
        return spoiled

    def _is_refuted(
        self,
        attempt: Attempt,
        context: UpdateContext,
        reports: Sequence[Sequence[str | None]] = (),
        exchange: Exchange | None = None,
    ) -> bool:
        """Return whether an audit has found a wrong result, and the attempt is to be made once more.

        If more may decide from now on, on any rank, the next update is audited as well.
        """
        if attempt.audit is None:
            return False
        compute = partial(self._again().elsewhere, attempt, attempt.audit, context)
        if (finding := attempt.audit.finding(compute, reports, exchange)) is None:
            self.auditor.warn_of_moves(attempt.audit.drawn, attempt.audit.changed)
        holds = "".join(each[-1] or "" for each in reports or [attempt.audit.to_plain()])
        if holds and self.training.iteration + 1 < self._checked_until:
            attempt.may_send_early = False
            if ATTRIBUTES in holds:
                self._audited_again = self.training.iteration + 1
            if TENSORS in holds:
                self.auditor.extend(self._checked_until)
        at = self.training.iteration, attempt.request.computation
        return finding is not None and self.auditor.must_repeat(finding, at, self.replicas.devices)

    def check(self, attempt: Attempt) -> None:
        """Check whether the gradient of a complete attempt is finite, or leave the check on the device.

        Raises:
            ValueError: If no parameter has a gradient.
        """
        if not attempt.complete:
            return
        if attempt.gradient_context.is_first and attempt.share.num_shards > 1:
            check_whole(changes(attempt.batches, attempt.device_shards, self.recipe.batch_dim))
        if attempt.gradient_context.is_mixed:
            # The next updates begin like the repeated attempt, because they are likely to be mixed as well. The result
            # depends on the kinds of the shards of this update only.
            self._weighted, attempt.complete = not self._weighted, False
            return
        named, slices = self.prepared.named_parameters, attempt.slices_are_finite
        attempt.overflow_check = check_finite(named, attempt.gradients, slices, any_shard=bool(attempt.reports))

    def first_stream(self, computation: int = 0, *, ahead: int = 0) -> int:
        """Return the position of the first random stream of an update's gradient, after `computation` earlier ones.

        Args:
            computation: The number of gradients of the update before this one.
            ahead: The number of updates before this one that are not complete.
        """
        # An update with fewer batches, at the end of the data, leaves positions unused; none is ever used twice.
        first = (self.training.iteration + ahead) * self._most_batches * self.shards_per_batch
        return first + computation_substream(computation) if computation else first

    def _position(self, attempt: Attempt) -> dict[str, Any]:
        """Return where this rank is, for comparison with the other ranks."""
        return {
            "update": self.training.iteration,
            "computation": attempt.request.purpose,
            "loss scale": attempt.gradient_context.loss_scale_factor,
            "batch sizes": attempt.sizes,
        }

    @property
    def batches_per_update(self) -> int:
        """The number of batches of the next update, unless the iterator ends before."""
        given = self.recipe.accumulate
        return given if isinstance(given, int) else batches_per_update(given, self.training.iterators[MAIN].epoch)

    @property
    def shards_per_batch(self) -> int:
        """The number of shards that a batch is cut into."""
        return self.recipe.num_shards or self.num_devices

    @property
    def num_devices(self) -> int:
        """The number of devices of all ranks."""
        return len(self.replicas.devices) if self.ranks is None else sum(map(len, self.ranks.workloads))

    def share(self, sizes: Sequence[int], num_shards: int | None = None) -> RankShare:
        """Return the shards of batches of these sizes that this process computes; by default as many as in updates."""
        # Over ranks, the workloads that were last exchanged: measured ones must not be used before all ranks know them.
        workloads = (tuple(self.replicas.workloads),) if self.ranks is None else self.ranks.workloads
        strided = self.recipe.split == "strided"
        return share_of(workloads, self._rank, tuple(sizes), num_shards or self.recipe.num_shards, strided)

    def own_samples(self, ahead: int, size: int) -> list[range]:
        """Return the samples of a batch that this process computes, if all batches of the update have this size.

        Args:
            ahead: The number of batches before this one, counted from the first of an update.
            size: The number of samples in the batch.
        """
        accumulate = self.batches_per_update
        runs = self.share([size] * accumulate).shards_by_device
        return [shard.samples for run in runs for shard in run if shard.batch == ahead % accumulate]

    def release(self) -> None:
        """Stop the threads of replicas and restore PyTorch's random kernels, until the next attempt."""
        self.replicas.release()
        self.streams.release()
        if self.ahead is not None:
            self.ahead.forget()
