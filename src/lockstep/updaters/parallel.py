"""One update over several devices: the contract of lockstep."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.data import Iterator, collate
from lockstep.errors import NonFiniteError, OrderError, StateError
from lockstep.precision import LossScale, parse_loss_scale, parse_precision
from lockstep.replicas import ReplicaGroup
from lockstep.replicas.buffers import BufferRule
from lockstep.replicas.devices import Devices
from lockstep.replicas.settings import Computing, ThreadSettings
from lockstep.state import check_keys
from lockstep.updaters.batches import Converter
from lockstep.updaters.commit import Committer
from lockstep.updaters.engine import Attempt, GradientEngine
from lockstep.updaters.handover import hand_over
from lockstep.updaters.interrupts import HeldInterrupts
from lockstep.updaters.loss import LossFunction, model_is_loss
from lockstep.updaters.result import UpdateResult
from lockstep.updaters.updater import Updater

LOG = logging.getLogger("lockstep")

OnOverflow = Literal["retry", "next", "skip"]
OnExhausted = Literal["skip", "raise"]


class ParallelUpdater(Updater):
    """Train one model on several devices; the result does not depend on which and how many.

    One update: take the next batch (or `accumulate` of them), cut it into shards, run one forward and one
    backward per shard on whatever device it was assigned to, sum the gradients in one fixed tree, divide
    once by the summed weight, check, and let the optimizer step. Until the step begins nothing has
    changed: after an exception or Ctrl-C the next call goes on with the same batch.

    Args:
        iterator: Gives the batches.
        optimizer: Any `torch.optim.Optimizer` over parameters of `model`.
        model: Moved to the first device. Never run itself: replicas are copies that share its memory.
        devices: ``"auto"`` for every GPU, else every core; or names, repeats allowed.
        num_shards: Shards a batch, at least 1; part of what the result means. None for one a device, sized by
            its workload: then the bits depend on the number of devices.
        workloads: Relative speeds of the devices, by which shards are assigned; equal ones by default.
        loss_fn: Called as ``loss_fn(replica, *batch)``, a dict batch by keyword; returns a mean loss or a
            `Loss`. By default the model itself returns the loss.
        converter: Called as ``converter(samples, device)`` for the samples of one shard.
        seed: Of the random streams, each keyed by (seed, update, shard).
        accumulate: Batches to an update, at least 1; fewer where the iterator ends.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``: what autocast computes in.
        loss_scale: A number or a `LossScale`; None for 1.
        on_overflow: What follows a gradient that is not finite, once the loss scale has stepped down:
            ``"retry"`` the same batch in the same random streams, draw the ``"next"``, or ``"skip"`` it.
        max_tries: How often one update may try, at least 1.
        on_exhausted: ``"skip"`` the batch or ``"raise"`` when no try is left, or no scale to lower.
        buffers: ``"mean"`` over shards by their samples, or ``"first"`` for the first shard's.
        scheduler: Stepped after every applied update.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: An argument is out of range, or the optimizer holds parameters of another model.

    Determinism: weights, buffers and optimizer state depend on the model, the data, `num_shards`, `seed`, the
    other arguments except `devices` and `workloads`, the torch build and the processor's type. Where
    `num_shards` is None they also depend on the number of devices and their workloads.

    References: Chainer 7.8.1, ``ParallelUpdater``, for the face. The arithmetic is ours.
    """

    def __init__(
        self,
        iterator: Iterator,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        devices: Devices = "auto",
        num_shards: int | None = None,
        workloads: Sequence[float] | None = None,
        loss_fn: LossFunction | None = None,
        converter: Converter = collate,
        seed: int = 0,
        accumulate: int = 1,
        precision: str = "fp32",
        loss_scale: LossScale | float | None = None,
        on_overflow: OnOverflow = "retry",
        max_tries: int = 20,
        on_exhausted: OnExhausted = "skip",
        buffers: BufferRule = "mean",
        scheduler: LRScheduler | None = None,
    ) -> None:
        _check_counts(num_shards=num_shards, accumulate=accumulate, max_tries=max_tries)
        if not isinstance(seed, int):
            raise TypeError(f"`seed` must be an integer, got {seed!r}.")
        _check_choice("on_overflow", on_overflow, ("retry", "next", "skip"))
        _check_choice("on_exhausted", on_exhausted, ("skip", "raise"))
        _check_choice("buffers", buffers, ("mean", "first"))
        _check_parts(iterator, optimizer, model)
        self._loss_scale = parse_loss_scale(loss_scale)
        group = ReplicaGroup(model, devices, workloads=workloads)
        self._engine = GradientEngine(
            group,
            loss_fn=loss_fn or model_is_loss,
            converter=converter,
            num_shards=num_shards,
            seed=seed,
            precision=parse_precision(precision),
            buffers=buffers,
        )
        self._iterator = iterator
        self._optimizer = optimizer
        self._model = model.to(group.devices[0])
        self._scheduler = scheduler
        self._accumulate = accumulate
        self._on_overflow = on_overflow
        self._max_tries = max_tries
        self._on_exhausted = on_exhausted
        self._committer = Committer(optimizer)
        self._iteration = 0
        self._applied_updates = 0
        self._computed: _Tried | None = None
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
        """
        with HeldInterrupts(self._engine.group.stop) as interrupts, self._computing() as settings:
            behind, tried = self._try(interrupts, settings)
            interrupts.commit()
            hand_over(self._engine.parameters, tried.attempt.gradients, frozen=self._engine.frozen)
            result = self._commit(tried, settings)
            self._iterator.advance(behind)
            return result

    def compute_gradients(self, batch: Any) -> UpdateResult:
        """Do the first half of an update on a batch of one's own: put its gradient into ``parameter.grad``.

        Args:
            batch: `Samples`, or a tensor or nest of tensors with the samples along the first dimension.

        Returns:
            What was measured; ``applied`` is False, and `nonfinite` names a parameter if the gradient is
            not finite.

        Raises:
            ReplicaError: User code raised in a shard.
        """
        with HeldInterrupts(self._engine.group.stop) as interrupts, self._computing() as settings:
            attempt = self._attempt([batch], self._loss_scale, settings)
            while interrupts.check():
                attempt = self._attempt([batch], self._loss_scale, settings)
            hand_over(self._engine.parameters, attempt.gradients, frozen=self._engine.frozen)
        self._computed = _Tried(attempt, self._loss_scale, 1, attempt.nonfinite)
        return self._computed.result(applied=False)

    def apply_gradients(self) -> UpdateResult:
        """Do the second half: step with what is in ``parameter.grad``, take over the buffers, count.

        Where the gradient was not finite, the loss scale steps down instead.

        Raises:
            OrderError: No gradient has been computed since the last call.
        """
        if self._computed is None:
            raise OrderError("`apply_gradients` must follow `compute_gradients`, once for each call.")
        tried, self._computed = self._computed, None
        with HeldInterrupts(self._engine.group.stop) as interrupts, self._computing() as settings:
            interrupts.commit()
            return self._commit(tried, settings)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where the replicas are, one entry each: what ``"auto"`` came to."""
        return tuple(self._engine.group.devices)

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

    def get_iterator(self, name: str = "main") -> Iterator:
        """Give the iterator of this name.

        Raises:
            KeyError: There is none of this name.
        """
        if name != "main":
            raise KeyError(f"`name` must be 'main', got {name!r}.")
        return self._iterator

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        """Give all optimizers by name."""
        return {"main": self._optimizer}

    def get_all_models(self) -> dict[str, nn.Module]:
        """Give all models by name."""
        return {"main": self._model}

    def finalize(self) -> None:
        """End the replicas' threads and the iterator's workers; another update would begin them anew."""
        self._engine.release()
        self._iterator.finalize()

    def state_dict(self) -> dict[str, Any]:
        """Give everything the next update depends on, as of the last one that was done."""
        return {
            "num_shards": self._engine.shards_a_batch,
            "seed": self._engine.seed,
            "iteration": self._iteration,
            "applied_updates": self._applied_updates,
            "loss_scale": self._loss_scale.state_dict(),
            "iterator": self._iterator.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "model": self._model.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, on any devices; the next update uses the loaded weights everywhere.

        Raises:
            StateError: Keys are missing or unknown, or it is the state of another number of shards or seed.
        """
        self._check_state(state)
        loss_scale = self._loss_scale.restored(state["loss_scale"])
        self._iterator.load_state_dict(state["iterator"])
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self._loss_scale = loss_scale
        self._iteration = state["iteration"]
        self._applied_updates = state["applied_updates"]
        self._computed = None

    def _check_state(self, state: Mapping[str, Any]) -> None:
        check_keys(state, self.state_dict(), of="a ParallelUpdater")
        if state["num_shards"] != self._engine.shards_a_batch:
            raise StateError(
                f"`state` must be of {self._engine.shards_a_batch} shards, got {state['num_shards']}. Shards "
                f"are part of a run's meaning: give `num_shards={state['num_shards']}`, or start afresh."
            )
        if state["seed"] != self._engine.seed:
            raise StateError(f"`state` must be of seed {self._engine.seed}, got {state['seed']}.")
        if (state["scheduler"] is None) != (self._scheduler is None):
            raise StateError("`state` must hold a scheduler exactly if the updater has one.")

    def _computing(self) -> Computing:
        """Put the calling thread into the state in which all places compute."""
        return Computing(ThreadSettings.capture(self._engine.group.device_types, training=True))

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

    def _attempt(self, batches: Sequence[Any], scale: LossScale, settings: ThreadSettings) -> Attempt:
        return self._engine.attempt(
            batches,
            # Fewer batches than usual, at the end, leave positions unused; none is ever used twice.
            first_stream=self._iteration * self._accumulate * self._engine.shards_a_batch,
            loss_scale=scale.factor,
            settings=settings,
        )

    def _try(self, interrupts: HeldInterrupts, settings: ThreadSettings) -> tuple[int, _Tried]:
        """Try batches, at ever lower loss scales, until a gradient is finite or no try is left.

        Returns:
            How many batches the iterator is to move past, and the last try.
        """
        scale, nonfinite, tries, passed = self._loss_scale, None, 0, 0
        batches = self._next_batches(passed)
        if not batches:
            raise StopIteration
        while True:
            attempt = self._attempt(batches, scale, settings)
            if interrupts.check():
                continue
            tries += 1
            nonfinite = attempt.nonfinite or nonfinite
            tried = _Tried(attempt, scale, tries, nonfinite)
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

    def _give_up(self, tried: _Tried) -> None:
        if self._on_exhausted == "raise":
            raise NonFiniteError(
                f"The gradient of {tried.nonfinite!r} is not finite after {tried.tries} tries, the last with "
                f"a loss scale of {tried.scale.factor}. The weights are those of the update before.",
                parameter=str(tried.nonfinite),
                tries=tried.tries,
            )

    def _commit(self, tried: _Tried, settings: ThreadSettings) -> UpdateResult:
        """Move the weights if there is a finite gradient to move them by; count in any case."""
        attempt = tried.attempt
        applied = attempt.nonfinite is None and bool(attempt.reports)
        if applied:
            places = len(self._engine.group.devices) if self._engine.side_by_side else 1
            run = partial(self._engine.group.run, settings=settings)
            self._committer.apply(attempt, self._engine.slots, places=places, run=run)
            if self._scheduler is not None:
                self._scheduler.step()
            self._applied_updates += 1
        if attempt.reports:
            self._loss_scale = tried.scale.after(finite=attempt.nonfinite is None)
        self._iteration += 1
        return tried.result(applied=applied)


@dataclass(frozen=True, slots=True)
class _Tried:
    """The last try at an update.

    Attributes:
        attempt: What it came to.
        scale: The loss scale it was made with.
        tries: How many there were.
        nonfinite: The first non-finite parameter of the last bad try, this one or an earlier.
    """

    attempt: Attempt
    scale: LossScale
    tries: int
    nonfinite: str | None

    def result(self, *, applied: bool) -> UpdateResult:
        """Say it to the user."""
        return UpdateResult(
            applied=applied,
            tries=self.tries,
            loss_scale=self.scale.factor,
            nonfinite=self.nonfinite,
            reports=self.attempt.reports,
        )


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if not isinstance(count, int | None):
            raise TypeError(f"`{name}` must be an integer, got {count!r}.")
        if count is not None and count < 1:
            raise ValueError(f"`{name}` must be at least 1, got {count}.")


def _check_choice(name: str, choice: str, choices: Sequence[str]) -> None:
    if choice not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {choice!r}.")


def _check_parts(iterator: object, optimizer: object, model: object) -> None:
    """Refuse what cannot be trained with, before a device or a thread is touched."""
    if not isinstance(iterator, Iterator):
        raise TypeError(f"`iterator` must be a lockstep Iterator, got a {type(iterator).__name__}.")
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"`optimizer` must be a torch.optim.Optimizer, got a {type(optimizer).__name__}.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module, got a {type(model).__name__}.")
    own = {id(parameter) for parameter in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if id(parameter) not in own:
                raise ValueError(
                    f"`optimizer` must hold parameters of `model` only, got one of shape "
                    f"{tuple(parameter.shape)} in group {index} that is not."
                )
