"""Let the user say what an update does, by any number of computations; do all of it or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep.errors import OrderError
from lockstep.precision import ScaleThen, sent
from lockstep.replicas.settings import ThreadSettings
from lockstep.streams import DefaultStream, stream_seed
from lockstep.updaters.applying import Applier
from lockstep.updaters.engine import GradientEngine
from lockstep.updaters.interrupts import HeldInterrupts
from lockstep.updaters.lanes import STEP, lane
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.meeting import Meeting
from lockstep.updaters.names import MAIN, Names, look_up
from lockstep.updaters.result import UpdateResult
from lockstep.updaters.savepoint import Savepoint
from lockstep.updaters.training import Training
from lockstep.updaters.tries import AnyTry, Computation
from lockstep.updaters.trying import Trier


@dataclass(slots=True)
class Step:
    """One update that a step function makes.

    Attributes:
        interrupts: Those held during it.
        settings: What the calling thread computes under.
        savepoint: What to go back to.
        drawn: How many batches were taken of each iterator.
        computed: The gradients that no optimizer has stepped by, by the optimizers they are for.
        computations: How many gradients were computed.
        results: What each of them measured, with the optimizers it was for.
        moved: What the optimizers stepped by.
    """

    interrupts: HeldInterrupts
    settings: ThreadSettings
    savepoint: Savepoint
    drawn: Counter[str]
    computed: dict[Names, AnyTry] = field(default_factory=dict)
    computations: int = 0
    results: list[tuple[Names, UpdateResult]] = field(default_factory=list)
    moved: list[AnyTry] = field(default_factory=list)

    @property
    def unless(self) -> torch.Tensor | None:
        """Above 0 if every step was left out after all: 0-d, on a device; None where the host knows."""
        flags = [each.flag for each in self.moved]
        known = [flag for flag in flags if flag is not None]
        if not known or len(known) < len(flags):
            return None
        return torch.stack([sent(flag, known[0].device) for flag in known]).amin()

    def result(self, scale: ScaleThen) -> UpdateResult:
        """Put together what the computations measured: all of them, and each optimizer's.

        Args:
            scale: The loss scale before.
        """
        found = [result for _, result in self.results]
        labels = dict.fromkeys("+".join(names) for names, _ in self.results)
        parts = {
            label: _merged([result for names, result in self.results if "+".join(names) == label], scale)
            for label in labels
        }
        merged = _merged(found, scale)
        moved, unless = bool(self.moved), self.unless
        return UpdateResult(
            applied=lambda: moved and (unless is None or not bool(unless)),
            tries=merged.tries,
            loss_scale=lambda: merged.loss_scale,
            nonfinite=lambda: merged.nonfinite,
            reports=merged.reports,
            parts=parts if len(parts) > 1 else {},
        )


class OwnSteps:
    """Makes updates of the computations that a step function asks for.

    Args:
        engine: Computes gradients.
        training: What an update changes.
        trier: Makes the tries.
        applier: Moves the weights.
        meeting: Where ranks agree that the update is complete.
    """

    def __init__(
        self,
        engine: GradientEngine,
        training: Training,
        trier: Trier,
        applier: Applier,
        meeting: Meeting,
    ) -> None:
        self._meeting = meeting
        self._engine = engine
        self._training = training
        self._trier = trier
        self._applier = applier
        self._step: Step | None = None

    @property
    def under_way(self) -> bool:
        """Whether a step function is being run."""
        return self._step is not None

    def update(
        self, core: Callable[[Any], object], interrupts: HeldInterrupts, settings: ThreadSettings
    ) -> UpdateResult:
        """Make one update.

        Args:
            core: Called with the batch; what it asks for is the update.
            interrupts: Those held during it.
            settings: What the calling thread computes under.

        Raises:
            BaseException: What `core` raised; everything is as it was before.
        """
        training, engine = self._training, self._engine
        with self._meeting.telling():
            batch = training.iterator.peek()
        scale = training.scale.now
        self._step = step = Step(interrupts, settings, training.save(), Counter({MAIN: 1}))
        try:
            with DefaultStream(engine.group.devices[0]) as stream, self._meeting.telling():
                stream.seed(stream_seed(engine.recipe.seed, lane(STEP) + self._trier.first_stream()))
                core(batch)
                self._meeting.agree(self._trier.position(computation="end"), interrupts)
            self._applier.count_or_undo(bool(step.moved), step.drawn, step.unless)
        except BaseException:
            interrupts.hold()
            step.savepoint.restore()
            training.scale.now = scale
            raise
        finally:
            self._step = None
        return step.result(scale)

    def compute(
        self,
        batch: Any,
        loss_fn: LossFunction,
        names: Names,
        wanted: frozenset[int] | None,
        *,
        unread: bool,
    ) -> UpdateResult:
        """Compute a gradient, at ever lower loss scales where that is asked for.

        Args:
            batch: Any.
            loss_fn: Of what.
            names: The optimizers it is for.
            wanted: Their parameters, by ``id``; None for all.
            unread: Whether to leave it on the device whether the gradient is finite.
        """
        step = self._running()
        computation = Computation(loss_fn, wanted, step.computations)
        tried = (self._trier.try_batch_unread if unread else self._trier.try_batch)(
            batch, step.interrupts, step.settings, computation, savepoint=step.savepoint
        )
        step.computations += 1
        self._applier.hand_over(tried.attempt, wanted)
        step.computed[names] = tried
        result = tried.result(applied=False)
        step.results.append((names, result))
        return result

    def apply(self, names: Names) -> UpdateResult:
        """Step by the gradient that was computed; what user code raises takes the whole update back.

        Raises:
            OrderError: There is none for these optimizers.
        """
        step = self._running()
        check_computed(names, step.computed)
        step.interrupts.check()
        tried = self._applier.step(names, step.computed.pop(names), step.settings)
        if tried.movable:
            step.moved.append(tried)
        return tried.result(applied=tried.movable)

    def next_batch(self, name: str) -> Any:
        """Take a further batch; its iterator moves past it when the update is complete.

        Raises:
            OrderError: No step function is being run.
            StopIteration: The iterator has ended.
            KeyError: There is no iterator of this name.
        """
        step = self._running()
        batch = look_up(name, self._training.iterators).peek(step.drawn[name])
        step.drawn[name] += 1
        return batch

    def _running(self) -> Step:
        if self._step is None:
            raise OrderError("`next_batch` must be called by a step function; elsewhere use the iterator.")
        return self._step


def check_computed(names: Names, computed: Mapping[Names, AnyTry]) -> None:
    """Refuse to step by a gradient that nobody computed.

    Raises:
        OrderError: There is none for these optimizers.
    """
    if names not in computed:
        raise OrderError(
            "`apply_gradients` must follow `compute_gradients`, once for each call and for the same "
            "optimizer."
        )


def _merged(results: Sequence[UpdateResult], scale: ScaleThen) -> UpdateResult:
    """Take several computations as one: reports of all, the last loss scale, the most tries."""

    def last_bad() -> str | None:
        bad = [result.nonfinite for result in results if result.nonfinite is not None]
        return bad[-1] if bad else None

    return UpdateResult(
        applied=False,
        tries=max((result.tries for result in results), default=0),
        loss_scale=lambda: results[-1].loss_scale if results else scale.value.factor,
        nonfinite=last_bad,
        reports=[report for result in results for report in result.reports],
    )
