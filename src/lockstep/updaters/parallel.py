"""Updates over several devices, the contract of lockstep."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.communicators import Communicator, find_communicator
from lockstep.data import Iterator, Source, collate
from lockstep.errors import OrderError
from lockstep.integers import check_integer
from lockstep.precision import LossScale
from lockstep.replicas import BufferRule, Devices, Timeout
from lockstep.updaters.attempt import GradientRequest, StepContext
from lockstep.updaters.loss import LossFunction, model_is_loss
from lockstep.updaters.ranks import Differing
from lockstep.updaters.result import NonFiniteShard, UpdateResult
from lockstep.updaters.setup import MAIN, Converter, look_up, recipe as recipes
from lockstep.updaters.state import load_state, state_of
from lockstep.updaters.step import CustomStep, Schedulers, assemble, check_communicator
from lockstep.updaters.updater import Updater


class ParallelUpdater(Updater):
    """Train a model, or several, on several devices; the result does not depend on which and how many.

    One update takes the next batch (or `accumulate` of them), cuts it into shards, runs one forward and one backward
    for each shard on the device it is assigned to, sums the gradients in one fixed tree, divides once by the summed
    weight, checks the result, and lets the optimizers step. Until the step begins nothing has changed: after an
    exception or Ctrl-C the next call goes on with the same batch. Ctrl-C during the step waits for its end.

    A `step_fn`, or a subclass that overrides `update_core`, says what an update does instead, with any number of calls
    of `compute_gradients` and `apply_gradients`. Where it fails or is interrupted, everything is put back to the state
    after the previous update, and the next call begins with the same batch.

    Args:
        iterator: The source of the batches: a lockstep iterator, any iterable of batches of tensors that
            `lockstep.data.IterableBatches` takes (a DataLoader, a list, a generator function), or several by name. The
            one named "main" provides the batch an update begins with and counts the epochs.
        optimizer: Any `torch.optim.Optimizer` over parameters of the models, or several by name that share no
            parameter. Without a step function every update steps all of them by the gradient of one loss.
        model: The model. It is moved to the first device and never run itself: replicas are copies that share its
            memory. You may give several networks by name, each of which is replicated on all devices.
        models: Another name for `model`, for several networks.
        devices: ``"auto"`` for every GPU, or else every core; or a list of device names, which may repeat.
        num_shards: The number of shards a batch is cut into, at least 1. It is part of what the result means. With None
            each device has one shard, sized by its workload, and the bits depend on the number of devices.
        workloads: The relative speeds of the devices, by which shards are assigned; equal by default. ``"auto"``
            measures them over the first updates, and the speeds of processes beside each other; it requires a number of
            shards.
        loss_fn: Called as ``loss_fn(replica, *batch)``, or with the entries of a dict batch by keyword. It returns a
            mean loss or a `Loss`. For several networks it gets a dict of their replicas. By default the model itself
            returns the loss.
        step_fn: Called as ``step_fn(updater, batch)``. Gradients and steps it asks the updater for appear in the result
            and are counted by `scheduler`. Calls such as ``optimizer.step()`` made directly are neither reported nor
            counted.
        converter: Called as ``converter(samples, device)`` for the samples of one shard.
        seed: The seed of the random streams, which are keyed by (seed, update, shard).
        accumulate: The number of batches of one update, at least 1; fewer where the iterator ends.
        split: ``"contiguous"`` shards, or ``"strided"``, where shard i of n has the samples i, i + n, i + 2n …
        reduction: ``"mean"`` over all shards by their weights, or ``"sum"`` of the gradients of the shards' mean
            losses, as Chainer has it.
        precision: ``"fp32"``; ``"bf16"`` or ``"fp16"`` for autocast in that format; ``"bf16-true"`` or ``"fp16-true"``
            for a model that is held in it, where gradients are summed in float32 and optimizers step float32 master
            weights, see `master_weights`. Data stays in its own format.
        loss_scale: A number or a `LossScale`, shared by all optimizers. With None it begins as that of the optimizers
            (see `loss_scaling`), which the updater copies and then adjusts independently, or else as 1.
        on_overflow: What follows a gradient that is not finite, once the loss scale has stepped down: ``"retry"`` the
            same batch in the same random streams, draw the ``"next"`` one, or ``"skip"`` it. A batch whose loss itself
            is not finite stays so at any scale; `find_nonfinite` names its samples.
        max_tries: How many attempts one update may make, at least 1.
        on_exhausted: ``"skip"`` the batch or ``"raise"`` when no attempt is left or there is no scale to lower.
        buffers: ``"mean"`` over shards, weighted by their samples, or ``"first"`` for those of the first shard.
        scheduler: One or several schedulers that step whenever their optimizer has moved weights.
        epoch_scheduler: One or several schedulers that step when the main iterator starts an epoch.
        auto_new_epoch: Whether optimizers that count epochs are told when the main iterator starts one.
        flat_gradients: Whether the gradients lie end to end in one tensor, `flat_gradients`, of which every
            ``parameter.grad`` is a view. This costs a copy, and is for one optimizer whose parameters have one dtype.
        timeout: The number of seconds, above 0, after which a device that is still at work counts as hung; the first
            device then has a thread of its own too. ``"auto"`` is half an hour for the threads of the other devices,
            while the calling thread is not watched. None waits without end. The result does not depend on it.
        communicator: Joins the processes of the run, each with devices of its own, whose shards are parts of one batch.
            By default it is found in the environment; without one, a process is the whole run.
        check_every: The number of updates, at least 1, within which processes compare all bits of their states, a part
            at a time. Everything else that must be equal is compared before the first update.
        differing_models: Whether models that differ over processes when a run begins take the values of rank 0
            (``"broadcast"``) or end the run (``"refuse"``).

    Raises:
        TypeError: An argument is of another kind.
        ValueError: An argument is out of range, or parts do not belong together.

    Determinism: weights, buffers and optimizer state depend on the model, the data, `num_shards`, `seed`, the other
    arguments except `devices`, `workloads` and `timeout`, the torch build and the processor's type. With
    ``num_shards=None`` they also depend on the number of devices and their workloads.

    References: Chainer 7.8.1, ``ParallelUpdater``, for the interface. The arithmetic is ours.
    """

    def __init__(
        self,
        iterator: Iterator | Source | Mapping[str, Iterator | Source],
        optimizer: Optimizer | Mapping[str, Optimizer],
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        *,
        models: nn.Module | Mapping[str, nn.Module] | None = None,
        devices: Devices = "auto",
        num_shards: int | None = None,
        workloads: Sequence[float] | Literal["auto"] | None = None,
        loss_fn: LossFunction | None = None,
        step_fn: recipes.StepFunction | None = None,
        converter: Converter = collate,
        seed: int = 0,
        accumulate: int = 1,
        split: recipes.Split = "contiguous",
        reduction: recipes.Reduction = "mean",
        precision: str = "fp32",
        loss_scale: LossScale | float | None = None,
        on_overflow: recipes.OnOverflow = "retry",
        max_tries: int = 20,
        on_exhausted: recipes.OnExhausted = "skip",
        buffers: BufferRule = "mean",
        scheduler: Schedulers | None = None,
        epoch_scheduler: Schedulers | None = None,
        auto_new_epoch: bool = True,
        flat_gradients: bool = False,
        timeout: Timeout = "auto",
        communicator: Communicator | None = None,
        check_every: int = 100,
        differing_models: Differing = "broadcast",
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
            flat_gradients=flat_gradients,
            auto_new_epoch=auto_new_epoch,
            loss_fn=loss_fn,
            step_fn=step_fn,
            converter=converter,
        )
        check_integer("check_every", check_every, minimum=1)
        recipes.check_choice("differing_models", differing_models, get_args(Differing))
        check_communicator(communicator)
        self._takes_steps = step_fn is not None or type(self).update_core is not ParallelUpdater.update_core
        joined = find_communicator() if communicator is None else communicator
        if communicator is None:
            weakref.finalize(self, joined.close).atexit = False
        self._parts = parts = assemble(
            recipe,
            iterator=iterator,
            optimizer=optimizer,
            networks=(model, models),
            places=(devices, workloads),
            schedulers=(scheduler, epoch_scheduler),
            loss_scale=loss_scale,
            timeout=timeout,
            communicator=joined,
            check_every=check_every,
            differing_models=differing_models,
            takes_steps=self._takes_steps,
        )
        self._training, self._engine = parts.training, parts.engine
        self._usual = GradientRequest(model_is_loss if loss_fn is None else parts.arranged.loss_fn(loss_fn))
        self._custom = CustomStep(parts, self._usual)

    def update(self) -> UpdateResult:
        """Do one update with the iterator's next batch.

        Returns:
            What it did; ``applied`` is False where the batch was given up.

        Raises:
            StopIteration: The iterator has ended.
            NonFiniteError: The gradient stayed non-finite and `on_exhausted` is ``"raise"``.
            ReplicaError: User code raised in a shard, or a device hung.
            ValueError: The loss is not computed with the model that `loss_fn` is given.
            OrderError: A step function called it.
        """
        if self._custom.state is not None:
            raise OrderError("`update` must not be called by a step function.")
        parts, engine, names = self._parts, self._engine, tuple(self._training.optimizers)
        parts.coordinator.begin()
        with StepContext(self._training.group) as context:
            if self._takes_steps:
                result = self._custom.update(self.update_core, context)
            else:
                attempt = parts.retry.first(self._usual, names)
                while not attempt.is_final:
                    with parts.coordinator.telling():
                        engine.take(attempt)
                        engine.plan(attempt, context)
                        engine.compute(attempt, context)
                        engine.reduce(attempt, context)
                        engine.check(attempt)
                    # After an overflow there is another attempt, at a lower loss scale.
                    attempt = parts.retry.after(attempt)
                # Nothing of the training state has changed up to here: an error or Ctrl-C leaves the state of
                # the last update, and the batch is still the iterator's next. From here on Ctrl-C waits.
                parts.coordinator.commit(context.interrupts)
                result = parts.committer.commit(
                    names, attempt, context.settings, drawn={MAIN: attempt.passed + len(attempt.batches)}
                )
        return result

    def update_core(self, batch: Any) -> object:
        """Make one update, in a subclass that overrides this; by default call `step_fn`, if there is one.

        Args:
            batch: The main iterator's next batch.

        Returns:
            Ignored.
        """
        if self._parts.recipe.step_fn is not None:
            return self._parts.recipe.step_fn(self, batch)
        self.compute_gradients(batch)
        return self.apply_gradients()

    def compute_gradients(
        self, batch: Any, *, loss_fn: LossFunction | None = None, optimizer: str | None = None
    ) -> UpdateResult:
        """Do the first half of an update on a batch of your own: put its gradient into ``parameter.grad``.

        Args:
            batch: `Samples`, or a tensor or nest of tensors with the samples along the first dimension.
            loss_fn: The loss function to use instead of the updater's.
            optimizer: The name of the optimizer whose parameters get a gradient; those of others keep theirs. None
                stands for all parameters.

        Returns:
            What was measured; ``applied`` is False, and `nonfinite` names a parameter if the gradient is not finite. In
            a step function, `on_overflow` has been followed by then.

        Raises:
            ReplicaError: User code raised in a shard.
            NonFiniteError: In a step function, as `update`.
            KeyError: There is no optimizer of this name.
            ValueError: There is no loss function.
        """
        return self._custom.compute(batch, loss_fn, optimizer)

    def apply_gradients(self, optimizer: str | None = None) -> UpdateResult:
        """Do the second half: step with what is in ``parameter.grad``, take over the buffers, count.

        Where the gradient was not finite, the loss scale steps down instead. In a step function nothing is counted
        here, but once at the end of the update.

        Args:
            optimizer: The name that `compute_gradients` was given.

        Raises:
            OrderError: No gradient has been computed since the last call.
            KeyError: There is no optimizer of this name.
        """
        return self._custom.apply(optimizer)

    def next_batch(self, name: str = MAIN) -> Any:
        """Return a further batch, in a step function; its iterator moves past it when the update is complete.

        Args:
            name: The name of the iterator.

        Raises:
            OrderError: No step function is being run.
            StopIteration: The iterator has ended.
            KeyError: There is no iterator of this name.
        """
        return self._custom.next_batch(name)

    def find_nonfinite(self) -> list[NonFiniteShard]:
        """Compute the pending batch once more at the current loss scale, and list the shards with bad gradients.

        After a `NonFiniteError` the pending batch is the one it was about. Nothing changes; the random streams are
        those the next update will use. An empty list says that each shard by itself is finite.

        Raises:
            StopIteration: The iterator has ended.
            OrderError: The updater has a step function.
            ReplicaError: User code raised in a shard.
        """
        if self._takes_steps:
            raise OrderError("`find_nonfinite` must be called of an updater that takes no steps of its own.")
        self._parts.coordinator.begin()
        with StepContext(self._training.group) as context, self._parts.coordinator.telling():
            return self._engine.find_nonfinite(self._usual, context)

    @property
    def iteration(self) -> int:
        """How many updates are done: batches, or groups of accumulated ones, applied or given up."""
        return self._training.iteration

    @property
    def applied_updates(self) -> int:
        """How many of them moved the weights."""
        return self._training.applied_updates

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next attempt."""
        return self._training.loss_scale

    def get_iterator(self, name: str = MAIN) -> Iterator:
        """Return the iterator of this name; the KeyError for another lists those there are."""
        return look_up(name, self._training.iterators)

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        """Return all optimizers by name."""
        return dict(self._training.optimizers)

    def get_all_models(self) -> dict[str, nn.Module]:
        """Return all models by name."""
        return dict(self._training.models)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where this process's replicas are, one entry each: what ``"auto"`` came to."""
        return tuple(self._training.group.devices)

    def master_weights(self, model: str = MAIN) -> dict[str, torch.Tensor]:
        """Return the float32 master weights of a model by its parameters' names; none without a true half precision."""
        return self._training.master_weights(model)

    @property
    def communicator(self) -> Communicator:
        """What joins the processes of the run."""
        return self._parts.communicator

    @property
    def flat_gradients(self) -> torch.Tensor | None:
        """The last gradient of all parameters as one tensor, if that was asked for; None before the first."""
        flat = self._engine.layout.flat
        return None if flat is None else flat.tensor

    @property
    def why_it_waits(self) -> str | None:
        """Why `update` reads on the host what is on the device; None where it reads nothing.

        It need not with ``on_overflow="skip"`` in one process, for optimizers that leave a step out by a flag on the
        device, which are torch's with ``fused=True``, with no scheduler that counts applied updates and no hook of a
        step that does more than change gradients. (The first step of a fused SGD with momentum reads the flag all the
        same.) Then what an update came to is decided on the device, and read by whoever looks at its result, at
        `applied_updates`, `loss_scale` or `state_dict`. A step function that looks at nothing is no reason either.
        Tensors as weights of losses are one, from the first on.
        """
        return self._parts.deferral.reason(tuple(self._training.optimizers))

    def finalize(self) -> None:
        """End the replicas' threads and the iterators' workers; another update would begin them anew."""
        self._engine.release()
        for iterator in self._training.iterators.values():
            iterator.finalize()

    def state_dict(self) -> dict[str, Any]:
        """Return everything the next update depends on; a parameter that has no shape yet is None in it."""
        num_shards = self._engine.shards_a_batch
        return state_of(self._training, num_shards=num_shards, seed=self._parts.recipe.seed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, on any devices; the next update uses the loaded weights everywhere.

        Whatever a part raises, nothing has been changed.

        Raises:
            StateError: Keys are missing or unknown, or it is the state of another number of shards or seed.
            OrderError: A step function is being run.
        """
        if self._custom.state is not None:
            raise OrderError("`load_state_dict` must not be called by a step function.")
        num_shards = self._engine.shards_a_batch
        load_state(self._training, state, num_shards=num_shards, seed=self._parts.recipe.seed)
        self._engine.state_loaded()
        self._parts.coordinator.state_loaded()
        self._custom.forget()
