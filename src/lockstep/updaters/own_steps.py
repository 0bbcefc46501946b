"""Let the user say what an update does, by any number of computations; do all of it or nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import OrderError
from lockstep.precision import LossScale
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
from lockstep.updaters.tries import Computation, Tried
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
        applied: Whether any weights moved.
    """

    interrupts: HeldInterrupts
    settings: ThreadSettings
    savepoint: Savepoint
    drawn: Counter[str]
    computed: dict[Names, Tried] = field(default_factory=dict)
    computations: int = 0
    results: list[tuple[Names, UpdateResult]] = field(default_factory=list)
    applied: bool = False

    def result(self, scale: LossScale) -> UpdateResult:
        """Put together what the computations measured: all of them, and each optimizer's."""
        found = [result for _, result in self.results]
        labels = dict.fromkeys("+".join(names) for names, _ in self.results)
        parts = {
            label: _merged([result for names, result in self.results if "+".join(names) == label], scale)
            for label in labels
        }
        merged = _merged(found, scale)
        return UpdateResult(
            applied=self.applied,
            tries=merged.tries,
            loss_scale=merged.loss_scale,
            nonfinite=merged.nonfinite,
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
        loss_scale = training.loss_scale
        self._step = step = Step(interrupts, settings, training.save(), Counter({MAIN: 1}))
        try:
            with DefaultStream(engine.group.devices[0]) as stream, self._meeting.telling():
                stream.seed(stream_seed(engine.seed, lane(STEP) + self._trier.first_stream()))
                core(batch)
                self._meeting.agree(self._trier.position(computation="end"), interrupts)
            self._applier.count_or_undo(step.applied, step.drawn)
        except BaseException:
            interrupts.hold()
            step.savepoint.restore()
            training.scale.value = loss_scale
            raise
        finally:
            self._step = None
        return step.result(training.loss_scale)

    def compute(
        self, batch: Any, loss_fn: LossFunction, names: Names, wanted: frozenset[int] | None
    ) -> UpdateResult:
        """Compute a gradient, at ever lower loss scales where that is asked for."""
        step = self._running()
        computation = Computation(loss_fn, wanted, step.computations)
        tried = self._trier.try_batch(
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
        result = self._applier.step(names, step.computed.pop(names), step.settings)
        step.applied |= result.applied
        return result

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


def check_computed(names: Names, computed: dict[Names, Tried]) -> None:
    """Refuse to step by a gradient that nobody computed.

    Raises:
        OrderError: There is none for these optimizers.
    """
    if names not in computed:
        raise OrderError(
            "`apply_gradients` must follow `compute_gradients`, once for each call and for the same "
            "optimizer."
        )


def _merged(results: Sequence[UpdateResult], scale: LossScale) -> UpdateResult:
    """Take several computations as one: reports of all, the last loss scale, the most tries."""
    bad = [result.nonfinite for result in results if result.nonfinite is not None]
    return UpdateResult(
        applied=False,
        tries=max((result.tries for result in results), default=0),
        loss_scale=results[-1].loss_scale if results else scale.factor,
        nonfinite=bad[-1] if bad else None,
        reports=[report for result in results for report in result.reports],
    )
