"""Updates on several devices, with a result that does not depend on them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence, Sized
from inspect import signature
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.arguments import look_up
from lockstep.communicators import Communicator, find_communicator
from lockstep.data import Iterator, Source, collate
from lockstep.elsewhere import GIVEN_ONCE, STANDARD_UPDATER, UPDATER, UPDATER_NAMES, names_ours
from lockstep.errors import EndOfDataError, OrderError
from lockstep.precision import LossScale, warn_of_half
from lockstep.replicas import BatchDim, BufferRules, Devices, Timeout
from lockstep.updaters.attempt.attempt import GradientRequest
from lockstep.updaters.attempt.audit import Auditor, OnFault
from lockstep.updaters.attempt.context import UpdateContext
from lockstep.updaters.compute.clock import Clock
from lockstep.updaters.loss import LossFunction, model_is_loss
from lockstep.updaters.result import NonFiniteShard, SkippedUpdate, UpdateResult
from lockstep.updaters.setup import recipe as recipes
from lockstep.updaters.setup.batches import Converter
from lockstep.updaters.setup.names import MAIN
from lockstep.updaters.setup.recipe import Accumulation, batches_per_update
from lockstep.updaters.state.carried import Carried
from lockstep.updaters.state.checkpoint import live_state_of, load_state, state_of
from lockstep.updaters.state.recipe_fields import RecipeFields, recipe_fields
from lockstep.updaters.step.assembly import Schedulers, assemble
from lockstep.updaters.step.checks import check_run_options, needs_custom_step
from lockstep.updaters.step.custom_step import CustomStep
from lockstep.updaters.step.inference import InferenceRunner
from lockstep.updaters.step.next_batches import CopyAhead
from lockstep.updaters.step.sharing import ShardOptimizer
from lockstep.updaters.updater import Updater


class EndOfIteratorError(EndOfDataError, StopIteration):
    """The iterator has ended, which `update` says in the way of Python's iterators."""


class ParallelUpdater(Updater):
    """Train one or several models on several devices; the result does not depend on which and how many.

    One update takes the next batch (or `accumulate` of them), cuts it into shards, runs one forward and one backward
    for each shard on the device it is assigned to, sums the gradients in one fixed tree, divides once by the summed
    weight, checks the result, and steps the optimizers. Nothing changes before the step: after an exception or Ctrl-C
    the next call uses the same batch again. Ctrl-C during the step takes effect at its end.

    A `step_fn`, or a subclass that overrides `update_core`, can define an update instead, with any number of calls of
    `compute_gradients` and `apply_gradients`. If it fails or is interrupted, the state after the previous update is
    restored, and the next call begins with the same batch.

    Args:
        iterator: The source of the batches: a lockstep iterator, any iterable that `lockstep.data.IterableBatches`
            takes, or several by name. The one named "main" provides the first batch of an update and counts the epochs.
        optimizer: Any `torch.optim.Optimizer` over parameters of the models, or several by name that share no
            parameter. Without a step function every update steps all of them by the gradient of one loss.
        model: The model, moved to the first device and never run itself: replicas share its memory; or several by name.
        devices: ``"auto"`` for this rank's share of the machine's GPUs, or else of its cores; a number of devices per
            rank; or a list of device names, which may repeat.
        num_shards: The number of shards per batch, at least 1; the result depends on it. With None each device has one
            shard, sized by its workload, and the bits depend on the number of devices.
        workloads: The relative speeds of the devices, by which shards are assigned; equal by default. ``"auto"``
            measures the speeds of all devices during the first updates; it requires `num_shards`.
        loss_fn: Called as ``loss_fn(replica, *batch)``, or with the entries of a dict batch by keyword, and with a dict
            of replicas for several networks. It returns a mean loss or a `Loss`, as the model does by default. A
            `BatchLoss` compares all samples of the batch.
        step_fn: Called as ``step_fn(updater, batch)``. Gradients and steps it asks the updater for appear in the result
            and are counted by `scheduler`; direct calls such as ``optimizer.step()`` are not.
        converter: Called as ``converter(samples, device)`` for the samples of one shard, in a random stream of it.
        batch_dim: The dimension of a batch of tensors that counts samples, 1 for time-first ones; or a dict by key or
            position, with None for an input or a list that every shard gets whole. Not for samples that the converter
            stacks.
        carried: Values carried from batch to batch, such as the hidden state of an LSTM; see `Carried`.
        seed: The seed of the random streams, which are keyed by (seed, update, shard).
        accumulate: The number of batches of one update, at least 1; fewer where the iterator ends. Or one by epoch, see
            docs/updater.md: a dict such as ``{0: 8, 4: 2}``, or a function of the epoch, from 0, that returns 1..256.
        split: ``"contiguous"`` shards, or ``"strided"``, where shard i of n has the samples i, i + n, i + 2n …
        clip_grad_norm: The largest norm, above 0, of all gradients of an optimizer, or one by its name, to which they
            are scaled down before hooks of the step, as by `torch.nn.utils.clip_grad_norm_`.
        reduction: ``"mean"`` over all shards by weight, or Chainer's ``"sum"`` of the gradients of shards' mean losses.
        precision: ``"fp32"``; ``"bf16"`` or ``"fp16"`` for autocast in that format; ``"bf16-true"`` or ``"fp16-true"``
            for a model held in it, with gradients summed in float32 and float32 `master_weights`. Data stays as it is.
        loss_scale: A number or a `LossScale`, shared by all optimizers. None begins with a copy of that of the
            optimizers (see `loss_scaling`), or else with 1.
        on_overflow: After a gradient that is not finite, at a lower loss scale: ``"retry"`` the batch with the same
            random streams, use the ``"next"`` one, or ``"skip"`` it. A loss may be non-finite: see `find_nonfinite`.
        max_tries: The largest number of attempts per update, at least 1.
        on_exhausted: ``"skip"`` the batch or ``"raise"`` when no attempt is left or there is no scale to lower.
        max_skipped: The number of skipped updates in a row, at least 1, that is a `NonFiniteError`; None for no error.
            The first one is named in a `NonFiniteWarning`. The log reads checks that are still on the device.
        buffers: ``"mean"`` over shards by samples, ``"sum"`` of changes, ``"min"``, ``"max"``, ``"first"``, or a dict.
        scheduler: Schedulers, one or several, that step whenever their optimizer has moved weights.
        auto_new_epoch: Whether to notify optimizers that count epochs when the main iterator starts one.
        timeout: Seconds, above 0, after which a device counts as hung; None for never. ``"auto"`` is half an hour for
            all but the first device.
        communicator: The communicator of the run, whose processes share every batch; found in the environment if None.
        copy_ahead: Whether the next batch is copied to accelerators while they compute; it takes memory. ``"auto"`` for
            batches of worker processes; True if batches depend on nothing that happens between two updates.
        audit_every: How often an update is audited: one shard is computed once more in another place, or later on the
            only device, and both results are compared by their bits before the commit. So are sums over processes.
            None audits the first update and those 8, 16, 32, ... later, and only warns of shards; 0 none; k the first
            and every k-th. It is one more call of the loss function.
        on_fault: What follows where one place is wrong: ``"raise"`` a `FaultError`, or ``"repeat"`` the update once.
        shard_optimizer: Whether each of several processes steps a part of the weights and holds only its optimizer
            state, with the same bits. ``"auto"`` for large models on one machine. See docs/sharding.md.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or if arguments do not belong together.

    Determinism: weights, buffers and optimizer state depend on the model, the data, `num_shards`, `seed`, the other
    arguments except `devices`, `workloads`, `timeout`, `copy_ahead` and `shard_optimizer`, the torch build and the
    processor's type.
    With ``num_shards=None`` they also depend on the number of devices and their workloads.

    References: Chainer 7.8.1, ``ParallelUpdater``, for the interface; not for the arithmetic.
    """

    @names_ours(UPDATER)
    def __init__(
        self,
        iterator: Iterator | Source | Mapping[str, Iterator | Source],
        optimizer: Optimizer | Mapping[str, Optimizer],
        model: nn.Module | Mapping[str, nn.Module],
        *,
        devices: Devices = "auto",
        num_shards: int | None = None,
        workloads: Sequence[float] | Literal["auto"] | None = None,
        loss_fn: LossFunction | None = None,
        step_fn: recipes.StepFunction | None = None,
        converter: Converter = collate,
        batch_dim: BatchDim = 0,
        carried: Carried | None = None,
        seed: int = 0,
        accumulate: Accumulation = 1,
        split: recipes.Split = "contiguous",
        reduction: recipes.Reduction = "mean",
        clip_grad_norm: float | Mapping[str, float] | None = None,
        precision: str = "fp32",
        loss_scale: LossScale | float | None = None,
        on_overflow: recipes.OnOverflow = "retry",
        max_tries: int = 20,
        on_exhausted: recipes.OnExhausted = "skip",
        max_skipped: int | None = 100,
        buffers: BufferRules = "mean",
        scheduler: Schedulers | None = None,
        auto_new_epoch: bool = True,
        timeout: Timeout = "auto",
        communicator: Communicator | None = None,
        copy_ahead: CopyAhead = "auto",
        audit_every: int | None = None,
        on_fault: OnFault = "raise",
        shard_optimizer: ShardOptimizer = "auto",
    ) -> None:
        recipe = recipes.Recipe(
            num_shards=num_shards,
            seed=seed,
            accumulate=accumulate,
            split=split,
            reduction=reduction,
            precision=precision,
            buffers=buffers,
            on_overflow=on_overflow,
            max_tries=max_tries,
            on_exhausted=on_exhausted,
            max_skipped=max_skipped,
            auto_new_epoch=auto_new_epoch,
            loss_fn=loss_fn,
            step_fn=step_fn,
            converter=converter,
            batch_dim=batch_dim,
            clip_grad_norm=clip_grad_norm,
        )
        check_run_options(communicator, copy_ahead)
        overridden = type(self).update_core is not ParallelUpdater.update_core
        self._has_custom_step = step_fn is not None or overridden or needs_custom_step(loss_fn, optimizer)
        joined = find_communicator() if communicator is None else communicator
        # One that is found here is closed with the updater. At the end of the process its watch closes itself.
        if communicator is None:
            weakref.finalize(self, joined.close).atexit = False
        self._parts = parts = assemble(
            recipe,
            iterator=iterator,
            optimizer=optimizer,
            model=model,
            placement=(devices, workloads),
            scheduler=scheduler,
            loss_scale=loss_scale,
            timeout=timeout,
            communicator=joined,
            custom_step=self._has_custom_step,
            carried=carried,
            copy_ahead=copy_ahead,
            auditor=Auditor(audit_every, on_fault, seed),
            shard_optimizer=shard_optimizer,
        )
        self._training, self._engine = parts.engine.training, parts.engine
        warn_of_half(recipe.precision_policy, self._training.optimizers.values())
        default_loss = model_is_loss if loss_fn is None else parts.networks.loss_fn(loss_fn)
        self._default_request = GradientRequest(default_loss)
        self._custom = CustomStep(parts, self._default_request)

    _others = dict.fromkeys(signature(__init__).parameters, GIVEN_ONCE) | UPDATER_NAMES

    def __repr__(self) -> str:
        devices = ", ".join(map(str, self.devices))
        models = ", ".join(f"{name}: {type(each).__name__}" for name, each in self.get_all_models().items())
        return (
            f"{type(self).__name__}({models}; {self.shards_per_batch} shards per batch on {devices}; precision "
            f"{self._engine.recipe.precision}; {self.epoch_detail:g} epochs, {self.iteration} updates done)"
        )

    def update(self) -> UpdateResult:
        """Run one update with the iterator's next batch.

        For a batch of your own, call `compute_gradients(batch)` and `apply_gradients()` instead.

        Returns:
            The result of the update; ``applied`` is False if the batch was skipped.

        Raises:
            EndOfDataError: If the iterator has ended. It is also a `StopIteration`.
            NonFiniteError: If the gradient stayed non-finite and `on_exhausted` is ``"raise"``.
            ReplicaError: If user code raised in a shard, or if a device hung.
            ValueError: If the loss is not computed with the model that `loss_fn` receives.
            OrderError: If a step function calls this method, or if there is a gradient that no optimizer has used.
        """
        if self._custom.state is not None:
            raise OrderError("`update` must not be called by a step function.")
        parts, engine, names = self._parts, self._engine, tuple(self._training.optimizers)
        parts.coordinator.start_update()
        try:
            with UpdateContext(self._training.replicas) as context:
                if self._has_custom_step:
                    return self._custom.update(self.update_core, context)
                attempt = parts.retry.first_attempt(self._default_request, names)
                while not attempt.is_final:
                    with parts.coordinator.reporting_errors():
                        engine.take(attempt)
                        engine.plan(attempt, context)
                        engine.compute(attempt, context)
                        engine.reduce(attempt, context)
                        engine.check(attempt)
                    # After an overflow the next attempt has a lower loss scale.
                    attempt = parts.retry.next_attempt(attempt)
                # Up to here nothing of the training state has changed. After an error or Ctrl-C it is that of the last
                # update, and the batch is still the iterator's next. From here on Ctrl-C is held until the update ends.
                parts.coordinator.hold_interrupts(context.interrupts)
                consumed = {MAIN: attempt.skipped_batches + len(attempt.batches)}
                result = parts.committer.commit(names, attempt, context.settings, consumed=consumed)
                is_first = attempt.gradient_context.is_first
                engine.conversion.keep_changes(attempt.batches, attempt.device_shards, is_first=is_first)
                return result
        except StopIteration as end:
            raise EndOfIteratorError(
                f"An iterator has ended after {self.epoch_detail:g} epochs and {self.iteration} updates. "
                "End the loop here, or pass one that repeats: a BatchIterator with repeat=True, a DataLoader, or a "
                "function that returns a generator."
            ) from end

    def update_core(self, batch: Any) -> object:
        """Run the update of a subclass that overrides this method; by default, call `step_fn`. The result is ignored.

        Args:
            batch: The main iterator's next batch.
        """
        if self._engine.recipe.step_fn is not None:
            return self._engine.recipe.step_fn(self, batch)
        self.compute_gradients(batch)
        return self.apply_gradients()

    @names_ours({"*": "Pass all entries of a batch as one tuple or dict, as in compute_gradients((x, y))."})
    def compute_gradients(
        self,
        batch: Any,
        *,
        loss_fn: LossFunction | None = None,
        optimizer: str | None = None,
        buffers_of: Collection[str] | None = None,
    ) -> UpdateResult:
        """Compute the gradient of a batch, and store it in ``parameter.grad``: the first half of an update.

        In a step function this replaces the buffers, too; elsewhere, `apply_gradients` or the next computation does.

        Args:
            batch: `Samples`, or a tensor or nested tensors with the samples along the first dimension.
            loss_fn: The loss function to use instead of the updater's.
            optimizer: The name of the optimizer whose parameters get a gradient; others keep theirs. None: all.
            buffers_of: The names of the models whose buffers, such as running statistics, it changes; None: all.

        Returns:
            What was measured. ``applied`` is False, and `nonfinite` names a parameter if the gradient is not finite. In
            a step function, `on_overflow` has been followed already.

        Raises:
            ReplicaError: If user code raised in a shard.
            NonFiniteError: If, in a step function, the gradient stayed non-finite and `on_exhausted` is ``"raise"``.
            KeyError: If there is no optimizer or model of this name.
            ValueError: If there is no loss function.
        """
        return self._custom.compute(batch, loss_fn, optimizer, buffers_of)

    def apply_gradients(self, optimizer: str | None = None) -> UpdateResult:
        """Step by the gradient in ``parameter.grad``, and count: the second half of an update.

        If the gradient was not finite, the loss scale decreases instead. A step function counts when it ends.

        Args:
            optimizer: The name that `compute_gradients` was called with.

        Raises:
            OrderError: If no gradient was computed since the last call.
            KeyError: If there is no optimizer of this name.
        """
        return self._custom.apply(optimizer)

    def next_batch(self, name: str = MAIN) -> Any:
        """Return another batch of the iterator of this name; it advances when the update is complete.

        Raises:
            OrderError: If no step function is running.
            KeyError: If no iterator has this name.
        """
        return self._custom.next_batch(name)

    def find_nonfinite(self) -> list[NonFiniteShard]:
        """Compute the pending batch again at the current loss scale, and list the shards with non-finite gradients.

        After a `NonFiniteError` that is the batch that caused it. Nothing changes, and the random streams are those of
        the next update. An empty list means that the gradient of each single shard is finite.

        Raises:
            OrderError: If the updater has a step function.
        """
        if self._has_custom_step:
            raise OrderError("`find_nonfinite` must be called on an updater without a step function.")
        self._parts.coordinator.start_update()
        with UpdateContext(self._training.replicas) as context, self._parts.coordinator.reporting_errors():
            return self._parts.retry.find_nonfinite(self._default_request, context)

    @property
    def iteration(self) -> int:
        """The number of complete updates, applied or not; accumulated batches count as one."""
        return self._training.iteration

    @property
    def applied_updates(self) -> int:
        """The number of updates that moved the weights."""
        return self._training.applied_updates

    @property
    def updates_per_epoch(self) -> int:
        """The number of updates per epoch, rounded up, with the current number of batches per update.

        Raises:
            TypeError: If the main iterator does not know its number of batches.
        """
        iterator = self.get_iterator()
        if not isinstance(iterator, Sized):
            raise TypeError(f"`iterator` must have a length, got a {type(iterator).__name__}.")
        return -(-len(iterator) // batches_per_update(self._engine.recipe.accumulate, iterator.epoch))

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next attempt."""
        return self._training.loss_scale

    def last_skipped(self) -> SkippedUpdate | None:
        """Return the last update that was skipped for its gradient, after reading checks that are on the device."""
        return self._parts.committer.skips.read()

    def get_iterator(self, name: str = MAIN) -> Iterator:
        """Return the iterator of a name; for an unknown one, raise a KeyError that lists the names."""
        return look_up(name, self._training.iterators)

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        """Return all optimizers by name, in a new dict."""
        return dict(self._training.optimizers)

    def get_all_models(self) -> dict[str, nn.Module]:
        """Return all models by name, in a new dict."""
        return dict(self._training.models)

    def get_all_schedulers(self) -> dict[str, torch.optim.lr_scheduler.LRScheduler]:
        """Return the schedulers that step with applied updates in a new dict, by name or by position in a list."""
        return dict(self._training.schedulers)

    @property
    def shares_state(self) -> bool:
        """Whether optimizers are shared out over the processes; see `Updater.shares_state`."""
        return bool(self._training.sharded)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each replica of this process; with ``"auto"``, those that were found."""
        return tuple(self._training.replicas.devices)

    def master_weights(self, model: str = MAIN) -> dict[str, torch.Tensor]:
        """Return the float32 master weights of a model by its parameters' names; empty unless it is held in half."""
        return self._training.master_weights(model)

    @property
    def communicator(self) -> Communicator:
        """The communicator of the run."""
        return self._parts.communicator

    @property
    def shards_per_batch(self) -> int:
        """The number of shards that a batch is cut into, which is `num_shards` or by default that of all devices."""
        return self._engine.shards_per_batch

    @property
    def num_retries(self) -> int:
        """The number of attempts at a batch that were repeated after an overflow, since the updater was created."""
        return self._parts.retry.num_retries

    @property
    def clock(self) -> Clock:
        """Measures how long the phases of updates take and how long devices compute, between its start and stop."""
        return self._engine.clock

    def inference_runner(
        self, *, num_shards: int | None = None, model: nn.Module | None = None, model_name: str = MAIN
    ) -> InferenceRunner:
        """Return what runs a model without gradients on the devices and ranks of the updater, in its precision.

        Args:
            num_shards: The number of shards per batch, at least 1; None for that of updates.
            model: Another model to run instead of one of the updater's.
            model_name: The name of the updater's model to run.
        """
        return InferenceRunner.of_parts(self._parts, num_shards=num_shards, model=model, model_name=model_name)

    @property
    def why_it_waits(self) -> str | None:
        """Why `update` reads something from the device on the host; None if it reads nothing.

        It reads nothing with ``on_overflow="skip"`` in one process, if the optimizers can skip a step by a flag on the
        device, as PyTorch's with ``fused=True`` can (except for the first step of SGD with momentum), if no scheduler
        counts applied updates, if hooks of steps only change gradients, and if weights of losses are no tensors. You
        then wait where you read the result, `last_skipped`, `applied_updates`, `loss_scale` or `state_dict`.
        """
        return next(self._parts.committer.deferral.reasons(tuple(self._training.optimizers)), None)

    def finalize(self) -> None:
        """Stop the replicas' threads and the iterators' workers; another update starts them again."""
        self._engine.release()
        for iterator in self._training.iterators.values():
            iterator.finalize()

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next update depends on; a parameter that has no shape yet is None in it.

        Where optimizers are shared out over processes, all of them must call this (see `shard_optimizer`).
        """
        return state_of(self._training, num_shards=self._engine.shards_per_batch, seed=self._engine.recipe.seed)

    def live_state(self) -> dict[str, Any]:
        """Return what `state_dict` returns, with the tensors being trained; see `Updater.live_state`."""
        return live_state_of(self._training, num_shards=self._engine.shards_per_batch, seed=self._engine.recipe.seed)

    def recipe_fields(self) -> RecipeFields:
        """Return what the result depends on, by name; see `Updater.recipe_fields`."""
        recipe, training = self._engine.recipe, self._training
        return recipe_fields(recipe, training.settings, training.models, num_shards=self._engine.shards_per_batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, on any devices, all or nothing; the next update uses its weights everywhere.

        Args:
            state: What `state_dict` returned.

        Raises:
            StateError: If keys are missing or unknown, or if the state has another number of shards or another seed.
            OrderError: If a step function calls this method.
        """
        if self._custom.state is not None:
            raise OrderError("`load_state_dict` must not be called by a step function.")
        load_state(self._training, state, num_shards=self._engine.shards_per_batch, seed=self._engine.recipe.seed)
        self._engine.restart_checks()
        self._parts.coordinator.state_loaded()
        self._parts.committer.skips.forget()
        self._parts.committer.own_steps.forget()
        self._custom.forget_gradients()


class StandardUpdater(ParallelUpdater):
    """Train on one device, with the same result as a `ParallelUpdater` with the same number of shards.

    Args:
        iterator: The source of the batches, or several by name.
        optimizer: Any `torch.optim.Optimizer` over parameters of the models, or several by name.
        model: The model, which is moved to the device; or several networks by name.
        device: The device to train on.
        **options: The options of `ParallelUpdater`, except `devices` and `workloads`. By default a batch is one shard,
            and the gradient is that of a plain loop on one intra-op thread, bit for bit.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or if arguments do not belong together.
    """

    @names_ours(STANDARD_UPDATER)
    def __init__(
        self,
        iterator: Iterator | Source | Mapping[str, Iterator | Source],
        optimizer: Optimizer | Mapping[str, Optimizer],
        model: nn.Module | Mapping[str, nn.Module],
        *,
        device: str | torch.device = "cpu",
        **options: Any,
    ) -> None:
        refused = [name for name in ("devices", "workloads") if name in options]
        if refused:
            raise TypeError(f"StandardUpdater() has no argument `{refused[0]}`. {STANDARD_UPDATER[refused[0]]}")
        super().__init__(iterator, optimizer, model, devices=[device], **options)
