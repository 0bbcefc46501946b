"""Take the optimizer's step: whole, or in parts side by side where every parameter is stepped by itself.

PyTorch runs the hooks of a step inside `step()` only, so a step in parts must run them itself, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import torch
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep.errors import LockstepError
from lockstep.optim import HookedOptimizer
from lockstep.precision import MasterWeights, skipped_if
from lockstep.updaters.step.fused import settle_layout

VERSION: Final = attrgetter("_version")

PER_PARAMETER: Final = frozenset({ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop})
"""Optimizers whose step of one parameter reads nothing of another."""


@dataclass(slots=True)
class StepProgress:
    """How far a step has come.

    Attributes:
        has_begun: Whether its arithmetic has begun.
        is_done: Whether it has moved all weights.
    """

    has_begun: bool = False
    is_done: bool = False


def can_step_in_parts(optimizer: Optimizer) -> bool:
    """Tell whether parts of the parameters may be stepped by themselves, with the same bits.

    So it is for lockstep's own rules and for PyTorch's that work parameter by parameter, the latter by
    their exact class: a subclass may do otherwise.
    """
    return isinstance(optimizer, HookedOptimizer) or type(optimizer) in PER_PARAMETER


def step_whole(optimizer: Optimizer, progress: StepProgress) -> None:
    """Take the step as any loop would.

    PyTorch opens a range for its profiler around each, at a third of the time in which a small model is
    stepped; where nobody profiles and no hook waits, the class's step is all there is to it.

    Args:
        optimizer: What steps.
        progress: Told how far it has come.
    """
    if type(optimizer) in PER_PARAMETER and not _is_watched(optimizer):
        progress.has_begun = True
        _bare_step(optimizer)
        progress.is_done = True
    elif isinstance(optimizer, HookedOptimizer):

        def advance() -> None:
            progress.has_begun = True
            optimizer.advance()
            progress.is_done = True

        optimizer.step(advance=advance)
    else:
        with _marking_hooks(optimizer, progress):
            optimizer.step()


@contextmanager
def _marking_hooks(optimizer: Optimizer, progress: StepProgress) -> Iterator[None]:
    """Take note of a step's arithmetic by hooks: after all that precede it, before all that follow it."""

    def begin(*_: Any) -> None:
        progress.has_begun = True

    def end(*_: Any) -> None:
        progress.is_done = True

    before = optimizer.register_step_pre_hook(begin)
    after = optimizer.register_step_post_hook(end)
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]  # an OrderedDict
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _is_watched(optimizer: Optimizer) -> bool:
    """Tell whether somebody wants to know of the step: hooks, a scheduler, a profiler."""
    return bool(
        "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()  # noqa: SLF001 - no public way
    )


def step_in_parts(
    optimizer: Optimizer,
    parts: Sequence[frozenset[int]],
    run: Callable[[Callable[[int], None]], None],
    progress: StepProgress,
) -> None:
    """Take one step in parts at the same time; hooks and schedulers see one whole step.

    Args:
        optimizer: One that `can_step_in_parts`.
        parts: For each place, the parameters it steps, by ``id``; together all of them.
        run: Runs a function of the place's index on all places at once.
        progress: Told how far the step has come.

    Determinism: the bits of `step_whole`, for parameters are never cut.
    """
    if isinstance(optimizer, HookedOptimizer):
        own = [optimizer.part(_groups(optimizer, part)) for part in parts]

        def advance() -> None:
            progress.has_begun = True
            run(lambda place: own[place].advance())
            progress.is_done = True

        optimizer.step(advance=advance)
        return
    args: tuple[Any, ...] = (optimizer,)
    kwargs: dict[str, Any] = {}
    for hook in chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, args, kwargs)
    views = [_view(optimizer, part) for part in parts]
    progress.has_begun = True
    run(lambda place: _bare_step(views[place]))
    progress.is_done = True
    for hook in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
        hook(optimizer, args, kwargs)
    if "step" in vars(optimizer):
        # A scheduler has wrapped step() of this object to learn whether it was called.
        optimizer._opt_called = True  # type: ignore[attr-defined]


def _groups(optimizer: Optimizer, part: frozenset[int]) -> list[dict[str, Any]]:
    """Give the parameter groups with today's settings and only some of the parameters."""
    return [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in part]}
        for group in optimizer.param_groups
    ]


def _view(optimizer: Optimizer, part: frozenset[int]) -> Optimizer:
    """Make a view of the optimizer on some of its parameters, with the same state."""
    view: Optimizer = object.__new__(type(optimizer))
    view.__dict__.update(vars(optimizer))
    view.param_groups = _groups(optimizer, part)
    return view


def _bare_step(optimizer: Optimizer) -> None:
    """Run the class's step without the wrappers that call hooks and tell the compiler of gradients."""
    step = type(optimizer).step
    bare: Callable[[Optimizer], Any] = step.__wrapped__.__wrapped__  # type: ignore[attr-defined]  # set by PyTorch
    before = torch.is_grad_enabled()
    torch._C._set_grad_enabled(optimizer.defaults["differentiable"])
    try:
        bare(optimizer)
    finally:
        torch._C._set_grad_enabled(before)


def balanced(parameters: Sequence[torch.Tensor], num_parts: int) -> list[frozenset[int]]:
    """Deal parameters, the largest first, to the part that has the fewest elements."""
    parts: list[set[int]] = [set() for _ in range(num_parts)]
    sizes = [0] * num_parts
    for parameter in sorted(parameters, key=lambda parameter: parameter.numel(), reverse=True):
        emptiest = sizes.index(min(sizes))
        parts[emptiest].add(id(parameter))
        sizes[emptiest] += parameter.numel()
    return [frozenset(part) for part in parts]


Run = Callable[[Callable[[int], None]], None]


class OptimizerStep:
    """Take the steps of one optimizer, and tell an error before the weights moved from one after.

    Args:
        optimizer: Its parameters hold the gradient when it is asked to step.
        masters: What it moves in the place of parameters in half precision, with the gradient of these.
    """

    def __init__(self, optimizer: Optimizer, masters: MasterWeights | None) -> None:
        self._optimizer = optimizer
        self._masters = masters
        self._parts: list[frozenset[int]] = []
        self._dealt: list[int] = []

    def step(self, *, places: int, run: Run, unless: torch.Tensor | None = None) -> BaseException | None:
        """Take the optimizer's step.

        Args:
            places: How many threads the step may be dealt to; 1 for a step in the calling thread.
            run: Runs a function on every place at once.
            unless: 0-d, on the device; above 0 where the step is to change nothing. Only for an optimizer
                that need not wait for it.

        Returns:
            What was raised once all weights had moved, by a hook for example; the step is taken all the same.

        Raises:
            BaseException: What was raised before any weight moved.
            LockstepError: The error came in between; the weights are neither those before nor those after.
        """
        if unless is not None:
            with skipped_if(self._optimizer, unless):
                return self.step(places=places, run=run)
        if self._masters is not None:
            with self._masters.in_place():
                return self._step(places, run)
        own = self._optimizer.masters if isinstance(self._optimizer, HookedOptimizer) else None
        if own is not None:
            own.take_gradients()
            with own.in_place():
                return self._step(places, run)
        return self._step(places, run)

    def _step(self, places: int, run: Run) -> BaseException | None:
        """Do the work of `step` on what is in the optimizer's groups now."""
        parameters: list[torch.Tensor] = []
        fused = False
        for group in self._optimizer.param_groups:
            parameters += group["params"]
            fused = fused or bool(group.get("fused"))
        if fused:
            settle_layout(self._optimizer)
        versions = list(map(VERSION, parameters))
        progress = StepProgress()
        try:
            if places > 1 and can_step_in_parts(self._optimizer):
                self._deal(parameters, places)
                step_in_parts(self._optimizer, self._parts, run, progress)
            else:
                step_whole(self._optimizer, progress)
        except BaseException as error:
            if self._has_moved(error, progress, parameters, versions):
                return error
            raise
        return None

    def _has_moved(
        self,
        error: BaseException,
        progress: StepProgress,
        parameters: Sequence[torch.Tensor],
        versions: Sequence[int],
    ) -> bool:
        """Return whether all weights had moved before an error, and not none.

        Raises:
            LockstepError: The error came in between.
        """
        moved = [
            parameter._version != version
            for parameter, version in zip(parameters, versions, strict=True)
            if parameter.grad is not None
        ]
        if progress.is_done or (moved and all(moved)):
            return True
        # Fused kernels leave version counters alone, so some weights may have moved unnoticed.
        fused = any(group.get("fused") for group in self._optimizer.param_groups)
        if any(moved) or (progress.has_begun and fused):
            raise LockstepError(
                f"The step of {type(self._optimizer).__name__} raised {type(error).__name__} between the "
                f"first weight that moved and the last: {error}. Load a saved state."
            ) from error
        return False

    def _deal(self, parameters: list[torch.Tensor], places: int) -> None:
        """Deal the parameters to the places, again where the optimizer has others than before."""
        dealt = [places, *map(id, parameters)]
        if dealt != self._dealt:
            self._parts, self._dealt = balanced(parameters, places), dealt
