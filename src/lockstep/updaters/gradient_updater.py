"""Make updates by gradients: the usual ones, and those of the user's own steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lockstep.communicators import Communicator
from lockstep.errors import OrderError
from lockstep.replicas.settings import ALONE, Computing, ThreadSettings
from lockstep.updaters.applying import Applier
from lockstep.updaters.engine import GradientEngine
from lockstep.updaters.followers import Followers
from lockstep.updaters.interrupts import HeldInterrupts
from lockstep.updaters.loss import LossFunction, model_is_loss
from lockstep.updaters.meeting import Meeting
from lockstep.updaters.names import MAIN, Names
from lockstep.updaters.networks import Arrangement
from lockstep.updaters.own_steps import OwnSteps, check_computed
from lockstep.updaters.recipe import Recipe
from lockstep.updaters.result import NonFiniteShard, UpdateResult
from lockstep.updaters.saving import load_state, state_of
from lockstep.updaters.training import Training
from lockstep.updaters.training_updater import TrainingUpdater
from lockstep.updaters.tries import AnyTry, Computation, Tried
from lockstep.updaters.trying import Trier
from lockstep.updaters.waiting import Waiting


class GradientUpdater(TrainingUpdater):
    """Tries a batch, moves the weights and counts, or has the user say in which order.

    Args:
        training: What is trained.
        recipe: What an update is.
        arranged: The networks as the user gave them, and as loss functions get them.
        engine: Computes gradients.
        meeting: Where the other ranks are met.
        communicator: Joins the processes of the run.
    """

    def __init__(
        self,
        training: Training,
        recipe: Recipe,
        *,
        arranged: Arrangement,
        engine: GradientEngine,
        meeting: Meeting,
        communicator: Communicator,
    ) -> None:
        super().__init__(training)
        self._recipe = recipe
        self._engine = engine
        self._meeting = meeting
        self._communicator = communicator
        self._takes_steps = self._has_own_steps(recipe)
        self._followers = Followers(training.group.model, arranged.followers)
        self._adapt_loss = arranged.loss_fn
        self._has_loss = recipe.loss_fn is not None or not arranged.several
        self._usual = Computation(
            model_is_loss if recipe.loss_fn is None else arranged.loss_fn(recipe.loss_fn)
        )
        self._trier = Trier(engine, training, recipe, meeting)
        self._applier = Applier(engine, training, auto_new_epoch=recipe.auto_new_epoch)
        self._waiting = Waiting(recipe.on_overflow, communicator, training, engine, self._applier)
        self._steps = OwnSteps(engine, training, self._trier, self._applier, meeting)
        self._computed: dict[Names, Tried] = {}

    @classmethod
    def _has_own_steps(cls, recipe: Recipe) -> bool:
        """Tell whether the user says what an update does, by a function or a method."""
        return recipe.step_fn is not None or cls.update_core is not GradientUpdater.update_core

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
        if self._recipe.step_fn is not None:
            return self._recipe.step_fn(self, batch)
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

    @property
    def communicator(self) -> Communicator:
        """What joins the processes of the run."""
        return self._communicator

    @property
    def flat_gradients(self) -> torch.Tensor | None:
        """The last gradient of all parameters as one tensor, if that was asked for; None before the first."""
        flat = self._engine.layout.flat
        return None if flat is None else flat.tensor

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
        return state_of(self._training, num_shards=engine.shards_a_batch, seed=self._recipe.seed)

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
        load_state(self._training, state, num_shards=engine.shards_a_batch, seed=self._recipe.seed)
        self._trier.look_for_shapes()
        self._followers.follow()
        self._meeting.state_loaded()
        self._computed = {}

    def _computing(self) -> Computing:
        """Put the calling thread into the state in which all places compute."""
        group = self._training.group
        carried = ThreadSettings.capture(group.device_types, training=True) if group.carries else ALONE
        return Computing(carried)
