"""One update over several devices: the contract of lockstep."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.data import Iterator, collate
from lockstep.data.source import Source
from lockstep.errors import NonFiniteError, OrderError, StateError
from lockstep.optim import HookedOptimizer
from lockstep.precision import LossScale, MasterWeights, parse_loss_scale, parse_precision
from lockstep.replicas import ReplicaGroup
from lockstep.replicas.buffers import BufferRule, combine
from lockstep.replicas.devices import Devices
from lockstep.replicas.settings import ALONE, Computing, ThreadSettings
from lockstep.state import check_keys
from lockstep.streams import DefaultStream, stream_seed
from lockstep.updaters import lazy
from lockstep.updaters.arguments import (
    check_choice,
    check_counts,
    check_flat,
    check_seed,
    check_sharding,
    check_step,
)
from lockstep.updaters.balance import PlaceTimes
from lockstep.updaters.batches import Converter, call_arguments
from lockstep.updaters.commit import Committer
from lockstep.updaters.engine import Attempt, GradientEngine
from lockstep.updaters.epochs import Epochs
from lockstep.updaters.handover import hand_over
from lockstep.updaters.interrupts import HeldInterrupts
from lockstep.updaters.lanes import STEP, computation_lane, lane
from lockstep.updaters.late import raised
from lockstep.updaters.loss import LossFunction, model_is_loss
from lockstep.updaters.names import MAIN, by_name, iterators_by_name, look_up, named_schedulers
from lockstep.updaters.networks import arrange, check_ownership
from lockstep.updaters.result import NonFiniteShard, UpdateResult
from lockstep.updaters.savepoint import Savepoint, copied
from lockstep.updaters.tries import Computation, Names, Step, Tried
from lockstep.updaters.updater import Updater

LOG = logging.getLogger("lockstep")

OnOverflow = Literal["retry", "next", "skip"]
OnExhausted = Literal["skip", "raise"]
Schedulers = LRScheduler | Sequence[LRScheduler] | Mapping[str, LRScheduler]
StepFunction = Callable[["ParallelUpdater", Any], object]


class ParallelUpdater(Updater):
    """Train a model, or several, on several devices; the result does not depend on which and how many.

    One update: take the next batch (or `accumulate` of them), cut it into shards, run one forward and one
    backward per shard on whatever device it was assigned to, sum the gradients in one fixed tree, divide
    once by the summed weight, check, and let the optimizers step. Until the step begins nothing has
    changed: after an exception or Ctrl-C the next call goes on with the same batch. What comes while the
    weights move waits for the end of the update.

    A `step_fn`, or a subclass that overrides `update_core`, says otherwise what an update does, by any number
    of `compute_gradients` and `apply_gradients`, say for two networks in turn. Where it fails or is
    interrupted, everything is put back to the update before, and the next call begins with the same batch.

    Args:
        iterator: Gives the batches; or any iterable of batches of tensors, such as a DataLoader, a list or a
            generator function, as `lockstep.data.IterableBatches` takes them; or several by name, of which
            "main" gives those an update begins with and counts the epochs.
        optimizer: Any `torch.optim.Optimizer` over parameters of the models, or several by name that share
            none. The usual update steps all of them by the gradient of one loss.
        model: Moved to the first device. Never run itself: replicas are copies that share its memory. Or
            several networks by name, each replicated on all devices.
        models: Another word for `model`. With exactly the names of `devices`, they are taken as replicas of
            one model: they must be alike, the main one has the weights, the others are left as they are.
        devices: ``"auto"`` for every GPU, else every core; or names, repeats allowed; or places by name, of
            which "main" (else the first) is the main one.
        num_shards: Shards a batch, at least 1; part of what the result means. None for one a device, sized by
            its workload: then the bits depend on the number of devices.
        workloads: Relative speeds of the devices, by which shards are assigned; equal ones by default.
            ``"auto"`` measures them over the first updates, for a fixed `num_shards` only.
        loss_fn: Called as ``loss_fn(replica, *batch)``, a dict batch by keyword; returns a mean loss or a
            `Loss`. For several networks it gets a dict of their replicas. By default the model itself
            returns the loss.
        step_fn: Called as ``step_fn(updater, batch)``.
        converter: Called as ``converter(samples, device)`` for the samples of one shard.
        seed: Of the random streams, each keyed by (seed, update, shard).
        accumulate: Batches to an update, at least 1; fewer where the iterator ends.
        split: ``"contiguous"`` shards, or ``"strided"``: shard i of n has the samples i, i + n, i + 2n …
        reduction: ``"mean"`` over all shards by their weights, or the ``"sum"`` of the gradients of the
            shards' mean losses, as Chainer had it.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``: what autocast computes in. ``"bf16-true"`` or
            ``"fp16-true"`` for a model that is held in that format: gradients are summed in float32, and
            optimizers move float32 masters; see `master_weights`. Data stays in its own format.
        loss_scale: A number or a `LossScale`; None for 1. One for all optimizers.
        on_overflow: What follows a gradient that is not finite, once the loss scale has stepped down:
            ``"retry"`` the same batch in the same random streams, draw the ``"next"``, or ``"skip"`` it.
        max_tries: How often one update may try, at least 1.
        on_exhausted: ``"skip"`` the batch or ``"raise"`` when no try is left, or no scale to lower.
        buffers: ``"mean"`` over shards by their samples, or ``"first"`` for the first shard's.
        scheduler: Stepped whenever its optimizer has moved weights; one or several.
        epoch_scheduler: Stepped when the main iterator starts an epoch; one or several.
        auto_new_epoch: Whether optimizers that count epochs are told when the main iterator starts one.
        flat_gradients: Whether the gradients lie end to end in one tensor, `flat_gradients`, of which every
            ``parameter.grad`` is a view; costs a copy. For one optimizer whose parameters have one dtype.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: An argument is out of range, or parts do not belong together.

    Determinism: weights, buffers and optimizer state depend on the model, the data, `num_shards`, `seed`, the
    other arguments except `devices` and `workloads`, the torch build and the processor's type. Where
    `num_shards` is None they also depend on the number of devices and their workloads.

    References: Chainer 7.8.1, ``ParallelUpdater``, for the face. The arithmetic is ours.
    """

    def __init__(
        self,
        iterator: Iterator | Source | Mapping[str, Iterator | Source],
        optimizer: Optimizer | Mapping[str, Optimizer],
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        *,
        models: nn.Module | Mapping[str, nn.Module] | None = None,
        devices: Devices | Mapping[str, str | torch.device] = "auto",
        num_shards: int | None = None,
        workloads: Sequence[float] | Mapping[str, float] | Literal["auto"] | None = None,
        loss_fn: LossFunction | None = None,
        step_fn: StepFunction | None = None,
        converter: Converter = collate,
        seed: int = 0,
        accumulate: int = 1,
        split: Literal["contiguous", "strided"] = "contiguous",
        reduction: Literal["mean", "sum"] = "mean",
        precision: str = "fp32",
        loss_scale: LossScale | float | None = None,
        on_overflow: OnOverflow = "retry",
        max_tries: int = 20,
        on_exhausted: OnExhausted = "skip",
        buffers: BufferRule = "mean",
        scheduler: Schedulers | None = None,
        epoch_scheduler: Schedulers | None = None,
        auto_new_epoch: bool = True,
        flat_gradients: bool = False,
    ) -> None:
        check_counts(num_shards=num_shards, accumulate=accumulate, max_tries=max_tries)
        check_seed(seed)
        check_choice("reduction", reduction, ("mean", "sum"))
        check_choice("on_overflow", on_overflow, ("retry", "next", "skip"))
        check_choice("on_exhausted", on_exhausted, ("skip", "raise"))
        check_choice("buffers", buffers, ("mean", "first"))
        self._iterators = iterators_by_name(iterator)
        self._optimizers: dict[str, Optimizer] = by_name(
            "optimizer", optimizer, Optimizer, "a torch.optim.Optimizer"
        )
        arranged = arrange(model, models, devices, workloads)
        check_ownership(self._optimizers, arranged.networks)
        self._models = arranged.networks
        self._loss_scale = parse_loss_scale(loss_scale)
        policy = parse_precision(precision)
        policy.check_model(arranged.module)
        self._schedulers = named_schedulers("scheduler", scheduler, self._optimizers)
        self._epoch_schedulers = named_schedulers("epoch_scheduler", epoch_scheduler, self._optimizers)
        self._takes_steps = step_fn is not None or type(self).update_core is not ParallelUpdater.update_core
        if self._takes_steps:
            check_step(accumulate=accumulate, on_overflow=on_overflow)
        elif loss_fn is None and arranged.several:
            raise ValueError("`loss_fn` must be given for several networks, got None.")
        if flat_gradients:
            check_flat(self._optimizers, takes_steps=self._takes_steps)
        fixed = check_sharding(num_shards=num_shards, split=split, workloads=arranged.workloads)
        group = ReplicaGroup(arranged.module, arranged.devices, workloads=fixed)
        self._engine = GradientEngine(
            group,
            converter=converter,
            num_shards=num_shards,
            seed=seed,
            precision=policy,
            buffers=buffers,
            mean=reduction == "mean",
            strided=split == "strided",
            flat=flat_gradients,
            timing=PlaceTimes(group.devices) if arranged.workloads == "auto" else None,
        )
        self._iterator = self._iterators[MAIN]
        group.model.to(group.devices[0])
        self._adapt_loss = arranged.loss_fn
        self._has_loss = loss_fn is not None or not arranged.several
        self._usual = Computation(model_is_loss if loss_fn is None else arranged.loss_fn(loss_fn))
        self._step_fn = step_fn
        self._accumulate = accumulate
        self._on_overflow = on_overflow
        self._max_tries = max_tries
        self._on_exhausted = on_exhausted
        self._names: Names = tuple(self._optimizers)
        self._masters = (
            {name: _masters_for(each) for name, each in self._optimizers.items()} if policy.held_dtype else {}
        )
        self._committers = {
            name: Committer(each, self._masters.get(name)) for name, each in self._optimizers.items()
        }
        self._epochs = Epochs(self._optimizers if auto_new_epoch else {}, self._epoch_schedulers)
        self._uninitialised = lazy.is_uninitialised(group.model)
        self._iteration = 0
        self._applied_updates = 0
        self._computed: dict[Names, Tried] = {}
        self._step: Step | None = None
        if num_shards is None and len(group.devices) > 1:
            LOG.info(
                "num_shards is not given: %d shards, one a device; other devices give other bits.",
                len(group.devices),
            )

    def update(self) -> UpdateResult:
        """Do one update with the iterator's next batch.

        Returns:
            What it did; ``applied`` is False where the batch was given up.

        Raises:
            StopIteration: The iterator has ended.
            NonFiniteError: The gradient stayed non-finite and `on_exhausted` is ``"raise"``.
            ReplicaError: User code raised in a shard.
            OrderError: A step function called it.
        """
        if self._step is not None:
            raise OrderError("`update` must not be called by a step function.")
        with HeldInterrupts(self._engine.group.stop) as interrupts, self._computing() as settings:
            if self._takes_steps:
                return self._update_by_steps(interrupts, settings)
            behind, tried = self._try(interrupts, settings)
            interrupts.commit()
            self._hand_over(tried.attempt, None)
            return self._commit(self._names, tried, settings, drawn={MAIN: behind})

    def update_core(self, batch: Any) -> object:
        """Say what an update does, in a subclass; by default what `step_fn` says, else the usual.

        Args:
            batch: The main iterator's next one.

        Returns:
            Whatever; nobody looks at it.
        """
        if self._step_fn is not None:
            return self._step_fn(self, batch)
        self.compute_gradients(batch)
        return self.apply_gradients()

    def compute_gradients(
        self, batch: Any, *, loss_fn: LossFunction | None = None, optimizer: str | None = None
    ) -> UpdateResult:
        """Do the first half of an update on a batch of one's own: put its gradient into ``parameter.grad``.

        Args:
            batch: `Samples`, or a tensor or nest of tensors with the samples along the first dimension.
            loss_fn: In the place of the updater's.
            optimizer: The name of the optimizer whose parameters get a gradient; no other's is touched. None
                for all parameters.

        Returns:
            What was measured; ``applied`` is False, and `nonfinite` names a parameter if the gradient is
            not finite. In a step function, `on_overflow` has been followed by then.

        Raises:
            ReplicaError: User code raised in a shard.
            NonFiniteError: In a step function, as `update`.
            KeyError: There is no optimizer of this name.
            ValueError: There is no loss function.
        """
        names = self._names_of(optimizer)
        if loss_fn is None and not self._has_loss:
            raise ValueError("`loss_fn` must be given here or to the updater, got None.")
        loss = self._usual.loss_fn if loss_fn is None else self._adapt_loss(loss_fn)
        wanted = None if optimizer is None else _parameters_of(self._optimizers[optimizer])
        if self._step is not None:
            computation = Computation(loss, wanted, self._step.computations)
            return self._compute_in_step(self._step, batch, computation, names)
        known = self._computed.get(names)
        computation = Computation(loss, wanted, len(self._computed) if known is None else known.ordinal)
        with HeldInterrupts(self._engine.group.stop) as interrupts, self._computing() as settings:
            scale = self._loss_scale
            attempt = self._attempt([batch], scale, settings, computation)
            while interrupts.check():
                attempt = self._attempt([batch], scale, settings, computation)
            self._hand_over(attempt, wanted)
        self._computed[names] = Tried(attempt, scale, scale, 1, attempt.nonfinite, computation.ordinal)
        return self._computed[names].result(applied=False)

    def apply_gradients(self, optimizer: str | None = None) -> UpdateResult:
        """Do the second half: step with what is in ``parameter.grad``, take over the buffers, count.

        Where the gradient was not finite, the loss scale steps down instead. In a step function nothing is
        counted here, but once at the end of the update.

        Args:
            optimizer: As it was given to `compute_gradients`.

        Raises:
            OrderError: No gradient has been computed since the last call.
            KeyError: There is no optimizer of this name.
        """
        names = self._names_of(optimizer)
        if names not in self._computed:
            raise OrderError(
                "`apply_gradients` must follow `compute_gradients`, once for each call and for the same "
                "optimizer."
            )
        if self._step is not None:
            return self._apply_in_step(self._step, names)
        tried = self._computed.pop(names)
        with HeldInterrupts(self._engine.group.stop) as interrupts, self._computing() as settings:
            interrupts.commit()
            return self._commit(names, tried, settings, drawn={})

    def next_batch(self, name: str = MAIN) -> Any:
        """Take a further batch, in a step function; its iterator moves past it when the update is complete.

        Args:
            name: Of the iterator.

        Raises:
            OrderError: No step function is being run.
            StopIteration: The iterator has ended.
            KeyError: There is no iterator of this name.
        """
        if self._step is None:
            raise OrderError("`next_batch` must be called by a step function; elsewhere use the iterator.")
        batch = look_up(name, self._iterators).peek(self._step.drawn[name])
        self._step.drawn[name] += 1
        return batch

    def find_nonfinite(self) -> list[NonFiniteShard]:
        """Run the pending batch once more at today's loss scale, and list the shards with bad gradients.

        After a `NonFiniteError` the pending batch is the one it was about. Nothing changes; the random
        streams are those the next update will use. An empty list says that each shard by itself is finite.

        Raises:
            StopIteration: The iterator has ended.
            OrderError: The updater takes steps of the user's own.
            ReplicaError: User code raised in a shard.
        """
        if self._takes_steps:
            raise OrderError("`find_nonfinite` must be called of an updater that takes no steps of its own.")
        batches = self._next_batches(0)
        if not batches:
            raise StopIteration
        with HeldInterrupts(self._engine.group.stop), self._computing() as settings:
            return self._engine.find_nonfinite(
                batches,
                loss_fn=self._usual.loss_fn,
                first_stream=self._first_stream(),
                loss_scale=self._loss_scale.factor,
                settings=settings,
            )

    def master_weights(self, model: str = MAIN) -> dict[str, torch.Tensor]:
        """Give the float32 masters by the names of their parameters; none without a true half precision.

        Args:
            model: The name of the model.

        Raises:
            KeyError: There is no model of this name.
        """
        network = look_up(model, self._models)
        return {name: value for each in self._masters.values() for name, value in each.named(network).items()}

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the replicas are, one entry each: what ``"auto"`` came to."""
        return tuple(self._engine.group.devices)

    @property
    def flat_gradients(self) -> torch.Tensor | None:
        """The last gradient of all parameters as one tensor, if that was asked for; None before the first."""
        flat = self._engine.flat
        return None if flat is None else flat.tensor

    @property
    def iteration(self) -> int:
        """How many updates are done: batches, or groups of accumulated ones, applied or given up."""
        return self._iteration

    @property
    def applied_updates(self) -> int:
        """How many of them moved the weights."""
        return self._applied_updates

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next try."""
        return self._loss_scale

    @property
    def epoch(self) -> int:
        """How many epochs the iterator has finished."""
        return self._iterator.epoch

    @property
    def epoch_detail(self) -> float:
        """How many epochs the iterator has gone through, with the fraction of the one it is in."""
        return self._iterator.epoch_detail

    @property
    def previous_epoch_detail(self) -> float:
        """`epoch_detail` before the last update; 0 before the first."""
        return self._iterator.previous_epoch_detail or 0.0

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last update finished an epoch."""
        return self._iterator.is_new_epoch

    def get_iterator(self, name: str = MAIN) -> Iterator:
        """Give the iterator of this name.

        Raises:
            KeyError: There is none of this name; the message lists those there are.
        """
        return look_up(name, self._iterators)

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        """Give all optimizers by name."""
        return dict(self._optimizers)

    def get_all_models(self) -> dict[str, nn.Module]:
        """Give all models by name."""
        return dict(self._models)

    def finalize(self) -> None:
        """End the replicas' threads and the iterators' workers; another update would begin them anew."""
        self._engine.release()
        for iterator in self._iterators.values():
            iterator.finalize()

    def state_dict(self) -> dict[str, Any]:
        """Give everything the next update depends on, as of the last one that was done.

        A parameter that has no shape yet is None in it.
        """
        return {
            "num_shards": self._engine.shards_a_batch,
            "seed": self._engine.seed,
            "iteration": self._iteration,
            "applied_updates": self._applied_updates,
            "loss_scale": self._loss_scale.state_dict(),
            "iterators": {name: each.state_dict() for name, each in self._iterators.items()},
            "optimizers": {name: each.state_dict() for name, each in self._steppables().items()},
            "models": {name: lazy.state_of(each) for name, each in self._models.items()},
            "schedulers": {name: each.state_dict() for name, each in self._schedulers.items()},
            "epoch_schedulers": {name: each.state_dict() for name, each in self._epoch_schedulers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, on any devices; the next update uses the loaded weights everywhere.

        Raises:
            StateError: Keys are missing or unknown, or it is the state of another number of shards or seed.
            OrderError: A step function is being run.

        Whatever a part raises, nothing has been changed.
        """
        if self._step is not None:
            raise OrderError("`load_state_dict` must not be called by a step function.")
        self._check_state(state)
        loss_scale = self._loss_scale.restored(state["loss_scale"])
        iterators = {name: each.state_dict() for name, each in self._iterators.items()}
        savepoint = self._save()
        try:
            self._load_parts(state)
        except BaseException:
            savepoint.restore()
            for name, before in iterators.items():
                self._iterators[name].load_state_dict(before)
            raise
        self._uninitialised = lazy.is_uninitialised(self._engine.group.model)
        self._loss_scale = loss_scale
        self._iteration = state["iteration"]
        self._applied_updates = state["applied_updates"]
        self._computed = {}

    def _load_parts(self, state: Mapping[str, Any]) -> None:
        for name, iterator in self._iterators.items():
            iterator.load_state_dict(state["iterators"][name])
        for name, model in self._models.items():
            lazy.load_state(model, state["models"][name])
        for name, optimizer in self._steppables().items():
            # PyTorch's optimizers take over the tensors they are given, and would change the saved state.
            optimizer.load_state_dict(copied(state["optimizers"][name]))
        for name, scheduler in self._schedulers.items():
            scheduler.load_state_dict(state["schedulers"][name])
        for name, scheduler in self._epoch_schedulers.items():
            scheduler.load_state_dict(state["epoch_schedulers"][name])

    def _steppables(self) -> dict[str, Optimizer | MasterWeights]:
        """Give what holds the state of each optimizer: itself, or the masters of one that knows of none."""
        return {
            name: each if isinstance(each, HookedOptimizer) else self._masters.get(name, each)
            for name, each in self._optimizers.items()
        }

    def _check_state(self, state: Mapping[str, Any]) -> None:
        own = self.state_dict()
        check_keys(state, own, of="a ParallelUpdater")
        for part in ("iterators", "optimizers", "models", "schedulers", "epoch_schedulers"):
            check_keys(state[part], own[part], of=f"the {part} of a ParallelUpdater")
        if state["num_shards"] != self._engine.shards_a_batch:
            raise StateError(
                f"`state` must be of {self._engine.shards_a_batch} shards, got {state['num_shards']}. Shards "
                f"are part of a run's meaning: give `num_shards={state['num_shards']}`, or start afresh."
            )
        if state["seed"] != self._engine.seed:
            raise StateError(f"`state` must be of seed {self._engine.seed}, got {state['seed']}.")
        for model, saved in state["models"].items():
            for name, value in saved.items():
                if value is None and own["models"][model].get(name) is not None:
                    raise StateError(
                        f"`state` must hold values for {name!r} of model {model!r}, got none: it was saved "
                        "before the first update gave the parameter a shape. Load it into a fresh model."
                    )

    def _names_of(self, optimizer: str | None) -> Names:
        """Name the optimizers that a gradient is for."""
        if optimizer is None:
            return self._names
        look_up(optimizer, self._optimizers)
        return (optimizer,)

    def _computing(self) -> Computing:
        """Put the calling thread into the state in which all places compute."""
        group = self._engine.group
        alone = len(group.devices) == 1
        return Computing(ALONE if alone else ThreadSettings.capture(group.device_types, training=True))

    def _save(self) -> Savepoint:
        """Copy what steps may change."""
        schedulers = [*self._schedulers.values(), *self._epoch_schedulers.values()]
        held = [self._masters.get(name) or _own_masters(each) for name, each in self._optimizers.items()]
        masters = [each for each in held if each is not None]
        return Savepoint(self._engine.group.model, self._optimizers.values(), schedulers, masters)

    # Computing -------------------------------------------------------------------------------

    def _next_batches(self, passed: int) -> list[Any]:
        """Look at the batches of one try without moving the iterator; fewer where it ends, or none.

        Args:
            passed: How many batches were given up in this update already.
        """
        batches: list[Any] = []
        with suppress(StopIteration):
            for ahead in range(passed, passed + self._accumulate):
                batches.append(self._iterator.peek(ahead))  # noqa: PERF401 - what came before the end is kept
        return batches

    def _first_stream(self) -> int:
        """Give the position of this update's first stream within a lane."""
        # Fewer batches than usual, at the end, leave positions unused; none is ever used twice.
        return self._iteration * self._accumulate * self._engine.shards_a_batch

    def _attempt(
        self,
        batches: Sequence[Any],
        scale: LossScale,
        settings: ThreadSettings,
        computation: Computation,
    ) -> Attempt:
        """Compute a gradient, changing nothing but parameters that have no shape yet."""
        if self._uninitialised:
            self._initialise(batches[0], computation.loss_fn)
        first, ordinal = self._first_stream(), computation.ordinal
        return self._engine.attempt(
            batches,
            loss_fn=computation.loss_fn,
            first_stream=first + computation_lane(ordinal) if ordinal else first,
            loss_scale=scale.factor,
            settings=settings,
            wanted=computation.wanted,
        )

    def _initialise(self, batch: Any, loss_fn: LossFunction) -> None:
        """Give shapes and values to parameters that lack them."""
        group = self._engine.group
        args, kwargs = call_arguments(self._engine.first_shard(batch))
        lazy.initialise(
            group.model,
            lambda: loss_fn(group.model, *args, **kwargs),
            device=group.devices[0],
            seed=self._engine.seed,
        )
        self._uninitialised = lazy.is_uninitialised(group.model)
        if self._step is not None:
            self._step.savepoint.include(group.model)

    def _try(self, interrupts: HeldInterrupts, settings: ThreadSettings) -> tuple[int, Tried]:
        """Try batches, at ever lower loss scales, until a gradient is finite or no try is left.

        Returns:
            How many batches the iterator is to move past, and the last try.
        """
        given = scale = self._loss_scale
        nonfinite, tries, passed = None, 0, 0
        batches = self._next_batches(passed)
        if not batches:
            raise StopIteration
        while True:
            attempt = self._attempt(batches, scale, settings, self._usual)
            if interrupts.check():
                continue
            tries += 1
            nonfinite = attempt.nonfinite or nonfinite
            tried = Tried(attempt, scale, given, tries, nonfinite)
            behind = passed + len(batches)
            if attempt.nonfinite is None or self._on_overflow == "skip":
                return behind, tried
            lower = scale.after(finite=False)
            following = self._next_batches(behind) if self._on_overflow == "next" else batches
            if tries == self._max_tries or lower.factor >= scale.factor or not following:
                self._give_up(tried)
                return behind, tried
            if self._on_overflow == "next":
                passed, batches = behind, following
            scale = lower

    def _give_up(self, tried: Tried) -> None:
        if self._on_exhausted == "raise":
            raise NonFiniteError(
                f"The gradient of {tried.nonfinite!r} is not finite after {tried.tries} tries, the last with "
                f"a loss scale of {tried.scale.factor}. The weights are those of the update before.",
                parameter=str(tried.nonfinite),
                tries=tried.tries,
            )

    def _hand_over(self, attempt: Attempt, wanted: frozenset[int] | None) -> None:
        """Put a gradient where the optimizers it is for look for it."""
        for masters in self._masters.values():
            masters.refresh()
        parameters, gradients = self._engine.parameters, attempt.gradients
        if wanted is not None:
            chosen = [index for index, parameter in enumerate(parameters) if id(parameter) in wanted]
            parameters = [parameters[index] for index in chosen]
            gradients = [gradients[index] for index in chosen]
        hand_over(parameters, gradients, frozen=self._engine.frozen, receiver=self._receiver)

    def _receiver(self, parameter: nn.Parameter) -> nn.Parameter:
        """Say whose ``grad`` optimizers read in the place of a parameter's."""
        for masters in self._masters.values():
            parameter = masters.receiver(parameter)
        return parameter

    # Applying --------------------------------------------------------------------------------

    def _commit(
        self, names: Names, tried: Tried, settings: ThreadSettings, *, drawn: Mapping[str, int]
    ) -> UpdateResult:
        """Move the weights if there is a finite gradient to move them by; count in any case.

        With one optimizer there is no going back once it has stepped, and no need to: what fails afterwards
        is raised when the update is complete. Several go back to where they were.
        """
        if len(names) > 1:
            return self._commit_several(names, tried, settings, drawn)
        late = self._apply(names, tried, settings) if tried.movable else []
        late += self._count(tried.movable, drawn)
        self._loss_scale = tried.next_scale(self._loss_scale)
        if late:
            raise late[0]
        return tried.result(applied=tried.movable)

    def _commit_several(
        self, names: Names, tried: Tried, settings: ThreadSettings, drawn: Mapping[str, int]
    ) -> UpdateResult:
        """Move the weights of several optimizers: of all, or after an exception of none."""
        savepoint = self._save()
        try:
            _raise_first(self._apply(names, tried, settings) if tried.movable else [])
            self._count_or_undo(tried.movable, drawn)
        except BaseException:
            savepoint.restore()
            raise
        self._loss_scale = tried.next_scale(self._loss_scale)
        return tried.result(applied=tried.movable)

    def _apply(self, names: Names, tried: Tried, settings: ThreadSettings) -> list[BaseException]:
        """Step, then make the new buffers state.

        Returns:
            What was raised by user code once weights had moved; it is over all the same.

        Raises:
            BaseException: What was raised before the first weight moved, or in the middle.
        """
        places = len(self._engine.group.devices) if self._engine.side_by_side else 1
        run = partial(self._engine.group.run, settings=settings)
        late: list[BaseException] = []
        for name in names:
            error = self._committers[name].step(places=places, run=run)
            if error is not None:
                late.append(error)
        if self._engine.slots:
            combine(tried.attempt.buffers, self._engine.slots, weight=tried.attempt.samples)
        for scheduler in self._schedulers.values():
            if any(scheduler.optimizer is self._optimizers[name] for name in names):
                late += raised(scheduler.step)
        return late

    def _count(self, applied: bool, drawn: Mapping[str, int]) -> list[BaseException]:
        """Count the update, move past its batches, begin the epochs that follow them.

        Returns:
            What user code raised on the way; the rest was done all the same.
        """
        self._iteration += 1
        self._applied_updates += applied
        before = self._iterator.epoch
        late: list[BaseException] = []
        for name, batches in drawn.items():
            late += raised(partial(self._iterators[name].advance, batches))
        return late + self._epochs.begin(self._iterator.epoch - before)

    def _count_or_undo(self, applied: bool, drawn: Mapping[str, int]) -> None:
        """Count the update, or raise what user code raised and count nothing."""
        before = {name: self._iterators[name].state_dict() for name in drawn}
        counters = self._iteration, self._applied_updates
        try:
            _raise_first(self._count(applied, drawn))
        except BaseException:
            self._iteration, self._applied_updates = counters
            for name, state in before.items():
                self._iterators[name].load_state_dict(state)
            raise

    # Steps of the user's own -----------------------------------------------------------------

    def _update_by_steps(self, interrupts: HeldInterrupts, settings: ThreadSettings) -> UpdateResult:
        """Let the user say what an update does; do all of it or nothing."""
        batch = self._iterator.peek()
        loss_scale = self._loss_scale
        step = Step(interrupts, settings, self._save(), Counter({MAIN: 1}))
        self._step, self._computed = step, {}
        try:
            with DefaultStream(self._engine.group.devices[0]) as stream:
                stream.seed(stream_seed(self._engine.seed, lane(STEP) + self._first_stream()))
                self.update_core(batch)
            interrupts.commit()
            self._count_or_undo(step.applied, step.drawn)
        except BaseException:
            interrupts.hold()
            step.savepoint.restore()
            self._loss_scale = loss_scale
            raise
        finally:
            self._step, self._computed = None, {}
        return step.result(self._loss_scale)

    def _compute_in_step(
        self, step: Step, batch: Any, computation: Computation, names: Names
    ) -> UpdateResult:
        """Compute a gradient, at ever lower loss scales where that is asked for."""
        given = scale = self._loss_scale
        nonfinite, tries = None, 0
        while True:
            step.interrupts.check()
            attempt = self._attempt([batch], scale, step.settings, computation)
            if step.interrupts.check():
                continue
            tries += 1
            nonfinite = attempt.nonfinite or nonfinite
            tried = Tried(attempt, scale, given, tries, nonfinite, computation.ordinal)
            lower = scale.after(finite=False)
            if attempt.nonfinite is None or self._on_overflow == "skip":
                break
            if tries == self._max_tries or lower.factor >= scale.factor:
                self._give_up(tried)
                break
            scale = lower
        step.computations += 1
        self._hand_over(attempt, computation.wanted)
        self._computed[names] = tried
        result = tried.result(applied=False)
        step.results.append((names, result))
        return result

    def _apply_in_step(self, step: Step, names: Names) -> UpdateResult:
        """Step, and raise at once what user code raises: the whole update goes back."""
        step.interrupts.check()
        tried = self._computed.pop(names)
        if tried.movable:
            _raise_first(self._apply(names, tried, step.settings))
            step.applied = True
        self._loss_scale = tried.next_scale(self._loss_scale)
        return tried.result(applied=tried.movable)


def _masters_for(optimizer: Optimizer) -> MasterWeights:
    """Give an optimizer masters, its own where it can have some."""
    if isinstance(optimizer, HookedOptimizer):
        optimizer.use_fp32_update()
    own = _own_masters(optimizer)
    return MasterWeights(optimizer) if own is None else own


def _own_masters(optimizer: Optimizer) -> MasterWeights | None:
    return optimizer.masters if isinstance(optimizer, HookedOptimizer) else None


def _parameters_of(optimizer: Optimizer) -> frozenset[int]:
    """Name an optimizer's parameters by ``id``."""
    return frozenset(id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def _raise_first(errors: Sequence[BaseException]) -> None:
    """Raise the first of some exceptions, if there is one."""
    for error in errors:
        raise error
