"""One update over several devices: the contract of lockstep."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.communicators import Communicator, find_communicator
from lockstep.data import Iterator, collate
from lockstep.data.source import Source
from lockstep.errors import OrderError
from lockstep.integers import check_integer
from lockstep.precision import LossScale, MovingScale
from lockstep.replicas import ReplicaGroup
from lockstep.replicas.buffers import BufferRule
from lockstep.replicas.devices import Devices
from lockstep.replicas.replica_set import Timeout
from lockstep.replicas.settings import ALONE, Computing, ThreadSettings
from lockstep.updaters.alike import Alikeness, Differing
from lockstep.updaters.applying import Applier
from lockstep.updaters.balance import PlaceTimes
from lockstep.updaters.batches import Converter
from lockstep.updaters.description import described
from lockstep.updaters.engine import GradientEngine
from lockstep.updaters.fitting import check_communicator, check_fit, chosen_scale, fixed_workloads
from lockstep.updaters.followers import Followers
from lockstep.updaters.interrupts import HeldInterrupts
from lockstep.updaters.loss import LossFunction, model_is_loss
from lockstep.updaters.meeting import Meeting, NoMeeting
from lockstep.updaters.names import MAIN, Names, by_name, iterators_by_name, look_up, named_schedulers
from lockstep.updaters.networks import arrange
from lockstep.updaters.over_ranks import join
from lockstep.updaters.own_steps import OwnSteps, check_computed
from lockstep.updaters.recipe import OnExhausted, OnOverflow, Recipe, Reduction, Split, check_choice
from lockstep.updaters.result import NonFiniteShard, UpdateResult
from lockstep.updaters.saving import load_state, state_of
from lockstep.updaters.training import Training
from lockstep.updaters.tries import AnyTry, Computation, Tried
from lockstep.updaters.trying import Trier
from lockstep.updaters.updater import Updater
from lockstep.updaters.waiting import Waiting

LOG = logging.getLogger("lockstep")

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
            one model: they must be alike, the main one has the weights, the others are given them after each
            update.
        devices: ``"auto"`` for every GPU, else every core; or names, repeats allowed; or places by name, of
            which "main" (else the first) is the main one.
        num_shards: Shards a batch, at least 1; part of what the result means. None for one a device, sized by
            its workload: then the bits depend on the number of devices.
        workloads: Relative speeds of the devices, by which shards are assigned; equal ones by default.
            ``"auto"`` measures them over the first updates, for a fixed `num_shards` only. Processes whose
            speeds nobody gives are measured by themselves, where `num_shards` is fixed.
        loss_fn: Called as ``loss_fn(replica, *batch)``, a dict batch by keyword; returns a mean loss or a
            `Loss`. For several networks it gets a dict of their replicas. By default the model itself
            returns the loss.
        step_fn: Called as ``step_fn(updater, batch)``. What it does by `compute_gradients` and
            `apply_gradients` is told in the result and counted by `scheduler`; steps that it takes by
            PyTorch's own words are neither.
        converter: Called as ``converter(samples, device)`` for the samples of one shard.
        seed: Of the random streams, each keyed by (seed, update, shard).
        accumulate: Batches to an update, at least 1; fewer where the iterator ends.
        split: ``"contiguous"`` shards, or ``"strided"``: shard i of n has the samples i, i + n, i + 2n …
        reduction: ``"mean"`` over all shards by their weights, or the ``"sum"`` of the gradients of the
            shards' mean losses, as Chainer had it.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``: what autocast computes in. ``"bf16-true"`` or
            ``"fp16-true"`` for a model that is held in that format: gradients are summed in float32, and
            optimizers move float32 masters; see `master_weights`. Data stays in its own format.
        loss_scale: A number or a `LossScale`, one for all optimizers; None for the one they have (see
            `loss_scaling`), from which the updater's goes its own way, or else 1.
        on_overflow: What follows a gradient that is not finite, once the loss scale has stepped down:
            ``"retry"`` the same batch in the same random streams, draw the ``"next"``, or ``"skip"`` it. A
            batch whose loss itself is not finite stays so at any scale: retries then end at the floor or
            at `max_tries`, and `find_nonfinite` names its samples.
        max_tries: How often one update may try, at least 1.
        on_exhausted: ``"skip"`` the batch or ``"raise"`` when no try is left, or no scale to lower.
        buffers: ``"mean"`` over shards by their samples, or ``"first"`` for the first shard's.
        scheduler: Stepped whenever its optimizer has moved weights; one or several.
        epoch_scheduler: Stepped when the main iterator starts an epoch; one or several.
        auto_new_epoch: Whether optimizers that count epochs are told when the main iterator starts one.
        flat_gradients: Whether the gradients lie end to end in one tensor, `flat_gradients`, of which every
            ``parameter.grad`` is a view; costs a copy. For one optimizer whose parameters have one dtype.
        timeout: Seconds, above 0, after which a device that is still at work in an update counts as hung; the
            first one then has a thread of its own too. ``"auto"``: half an hour for the threads of the
            others, while the calling thread is not watched. None for never. It is part of no result.
        communicator: Joins the processes of the run, each with devices of its own, whose shards are parts of
            one batch. Found in the environment unless given; alone, a process is the whole run.
        check_every: Within how many updates processes compare all bits of their states, at least 1; a part
            every few updates. What must be alike otherwise is compared before the first update.
        differing_models: Whether models that differ over processes when a run begins become that of rank 0
            (``"broadcast"``) or end the run (``"refuse"``).

    Raises:
        TypeError: An argument is of another kind.
        ValueError: An argument is out of range, or parts do not belong together.

    Determinism: weights, buffers and optimizer state depend on the model, the data, `num_shards`, `seed`, the
    other arguments except `devices`, `workloads` and `timeout`, the torch build and the processor's type.
    Where `num_shards` is None they also depend on the number of devices and their workloads.

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
        split: Split = "contiguous",
        reduction: Reduction = "mean",
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
        timeout: Timeout = "auto",
        communicator: Communicator | None = None,
        check_every: int = 100,
        differing_models: Differing = "broadcast",
    ) -> None:
        recipe = Recipe(
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
        check_choice("differing_models", differing_models, get_args(Differing))
        check_communicator(communicator)
        optimizers: dict[str, Optimizer] = by_name(
            "optimizer", optimizer, Optimizer, "a torch.optim.Optimizer"
        )
        arranged = arrange(model, models, devices, workloads)
        self._takes_steps = step_fn is not None or type(self).update_core is not ParallelUpdater.update_core
        check_fit(recipe, arranged, optimizers, takes_steps=self._takes_steps)
        fixed = fixed_workloads(recipe, arranged.workloads)
        self._training = training = Training(
            group=ReplicaGroup(arranged.module, arranged.devices, workloads=fixed, timeout=timeout),
            models=arranged.networks,
            optimizers=optimizers,
            iterators=iterators_by_name(iterator),
            schedulers=named_schedulers("scheduler", scheduler, optimizers),
            epoch_schedulers=named_schedulers("epoch_scheduler", epoch_scheduler, optimizers),
            scale=MovingScale(chosen_scale(loss_scale, optimizers)),
        )
        group = training.group
        self._communicator = find_communicator() if communicator is None else communicator
        if communicator is None:
            weakref.finalize(self, self._communicator.close).atexit = False
        alike = Alikeness(
            self._communicator,
            training,
            partial(described, training, recipe),
            every=check_every,
            differing=differing_models,
        )
        ranks = join(
            self._communicator,
            group.workloads,
            alike,
            movable=num_shards is not None,
            by_workloads=arranged.workloads is not None,
        )
        self._meeting: Meeting = NoMeeting() if ranks is None else ranks.meeting
        self._engine = GradientEngine(
            group,
            recipe,
            timing=PlaceTimes(group.devices) if arranged.workloads == "auto" else None,
            phase=self._communicator.watch.phase,
            ranks=ranks,
        )
        group.model.to(group.devices[0])
        if recipe.policy.held_dtype:
            training.make_masters()
        self._followers = Followers(group.model, arranged.followers)
        self._adapt_loss = arranged.loss_fn
        self._has_loss = loss_fn is not None or not arranged.several
        self._usual = Computation(model_is_loss if loss_fn is None else arranged.loss_fn(loss_fn))
        self._step_fn = step_fn
        self._trier = Trier(self._engine, training, recipe, self._meeting)
        self._applier = Applier(self._engine, training, auto_new_epoch=auto_new_epoch)
        self._waiting = Waiting(on_overflow, self._communicator, training, self._engine, self._applier)
        self._steps = OwnSteps(self._engine, training, self._trier, self._applier, self._meeting)
        self._computed: dict[Names, Tried] = {}
        if ranks is not None:
            for each in training.iterators.values():
                each.read_only(self._engine.own_samples)
        if num_shards is None and self._engine.shards_a_batch > 1:
            LOG.info(
                "num_shards is not given: %d shards, one a device; other devices give other bits.",
                self._engine.shards_a_batch,
            )

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
        if self._steps.under_way:
            raise OrderError("`update` must not be called by a step function.")
        self._meeting.begin()
        with HeldInterrupts(self._training.group) as interrupts, self._computing() as settings:
            if self._takes_steps:
                self._computed = {}
                result = self._steps.update(self.update_core, interrupts, settings)
            else:
                behind, tried = self._try(interrupts, settings)
                self._meeting.commit(interrupts)
                self._applier.hand_over(tried.attempt, None)
                names = tuple(self._training.optimizers)
                result = self._applier.commit(names, tried, settings, drawn={MAIN: behind})
            self._followers.follow()
        return result

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
        names = self._training.names_of(optimizer)
        if loss_fn is None and not self._has_loss:
            raise ValueError("`loss_fn` must be given here or to the updater, got None.")
        loss = self._usual.loss_fn if loss_fn is None else self._adapt_loss(loss_fn)
        wanted = None if optimizer is None else self._training.parameters_of(optimizer)
        if self._steps.under_way:
            unread = self._waiting.leaves_unread(names)
            return self._steps.compute(batch, loss, names, wanted, unread=unread)
        known = self._computed.get(names)
        computation = Computation(loss, wanted, len(self._computed) if known is None else known.ordinal)
        self._meeting.begin()
        with HeldInterrupts(self._training.group) as interrupts, self._computing() as settings:
            tried = self._trier.try_once(batch, interrupts, settings, computation)
            self._applier.hand_over(tried.attempt, wanted)
        self._computed[names] = tried
        return tried.result(applied=False)

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
        names = self._training.names_of(optimizer)
        if self._steps.under_way:
            return self._steps.apply(names)
        check_computed(names, self._computed)
        tried = self._computed.pop(names)
        with HeldInterrupts(self._training.group) as interrupts, self._computing() as settings:
            self._meeting.commit(interrupts)
            result = self._applier.commit(names, tried, settings, drawn={})
            self._followers.follow()
        return result

    def _try(self, interrupts: HeldInterrupts, settings: ThreadSettings) -> tuple[int, AnyTry]:
        """Try the iterator's batches, without looking at what came of it where that is possible."""
        if self._waiting.leaves_unread(tuple(self._training.optimizers)):
            return self._trier.try_unread(interrupts, settings, self._usual)
        return self._trier.try_batches(interrupts, settings, self._usual)

    def next_batch(self, name: str = MAIN) -> Any:
        """Take a further batch, in a step function; its iterator moves past it when the update is complete.

        Args:
            name: Of the iterator.

        Raises:
            OrderError: No step function is being run.
            StopIteration: The iterator has ended.
            KeyError: There is no iterator of this name.
        """
        return self._steps.next_batch(name)

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
        self._meeting.begin()
        with HeldInterrupts(self._training.group), self._computing() as settings:
            return self._trier.find_nonfinite(settings, self._usual.loss_fn)

    def master_weights(self, model: str = MAIN) -> dict[str, torch.Tensor]:
        """Give the float32 masters by the names of their parameters; none without a true half precision.

        Args:
            model: The name of the model.

        Raises:
            KeyError: There is no model of this name.
        """
        return self._training.master_weights(model)

    @property
    def communicator(self) -> Communicator:
        """What joins the processes of the run."""
        return self._communicator

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where this process's replicas are, one entry each: what ``"auto"`` came to."""
        return tuple(self._training.group.devices)

    @property
    def flat_gradients(self) -> torch.Tensor | None:
        """The last gradient of all parameters as one tensor, if that was asked for; None before the first."""
        flat = self._engine.layout.flat
        return None if flat is None else flat.tensor

    @property
    def iteration(self) -> int:
        """How many updates are done: batches, or groups of accumulated ones, applied or given up."""
        return self._training.iteration

    @property
    def applied_updates(self) -> int:
        """How many of them moved the weights."""
        return self._training.applied.count

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next try."""
        return self._training.loss_scale

    @property
    def why_it_waits(self) -> str | None:
        """Why `update` reads on the host what is on the device; None where it reads nothing.

        It need not with ``on_overflow="skip"`` in one process, for optimizers that leave a step out by a flag
        on the device, which are torch's with ``fused=True``, with no scheduler that counts applied updates
        and no hook of a step that does more than change gradients. (The first step of a fused SGD with
        momentum reads the flag all the same.) Then what an update came to is decided on the device, and read
        by whoever looks at its result, at `applied_updates`, `loss_scale` or `state_dict`. A step function
        that looks at nothing is no reason either.

        That losses have tensors for weights is known, and said, from the first of them on.
        """
        return self._waiting.why()

    @property
    def epoch(self) -> int:
        """How many epochs the iterator has finished."""
        return self._training.iterator.epoch

    @property
    def epoch_detail(self) -> float:
        """How many epochs the iterator has gone through, with the fraction of the one it is in."""
        return self._training.iterator.epoch_detail

    @property
    def previous_epoch_detail(self) -> float:
        """`epoch_detail` before the last update; 0 before the first."""
        return self._training.iterator.previous_epoch_detail or 0.0

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last update finished an epoch."""
        return self._training.iterator.is_new_epoch

    def get_iterator(self, name: str = MAIN) -> Iterator:
        """Give the iterator of this name.

        Raises:
            KeyError: There is none of this name; the message lists those there are.
        """
        return look_up(name, self._training.iterators)

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        """Give all optimizers by name."""
        return dict(self._training.optimizers)

    def get_all_models(self) -> dict[str, nn.Module]:
        """Give all models by name."""
        return dict(self._training.models)

    def finalize(self) -> None:
        """End the replicas' threads and the iterators' workers; another update would begin them anew."""
        self._engine.release()
        for iterator in self._training.iterators.values():
            iterator.finalize()

    def state_dict(self) -> dict[str, Any]:
        """Give everything the next update depends on, as of the last one that was done.

        A parameter that has no shape yet is None in it.
        """
        engine = self._engine
        return state_of(self._training, num_shards=engine.shards_a_batch, seed=engine.recipe.seed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, on any devices; the next update uses the loaded weights everywhere.

        Raises:
            StateError: Keys are missing or unknown, or it is the state of another number of shards or seed.
            OrderError: A step function is being run.

        Whatever a part raises, nothing has been changed.
        """
        if self._steps.under_way:
            raise OrderError("`load_state_dict` must not be called by a step function.")
        engine = self._engine
        load_state(self._training, state, num_shards=engine.shards_a_batch, seed=engine.recipe.seed)
        self._trier.look_for_shapes()
        self._followers.follow()
        self._meeting.state_loaded()
        self._computed = {}

    def _computing(self) -> Computing:
        """Put the calling thread into the state in which all places compute."""
        group = self._training.group
        carried = ThreadSettings.capture(group.device_types, training=True) if group.carries else ALONE
        return Computing(carried)
