"""Take the optimizer's step: whole, or in parts side by side where every parameter is stepped by itself.

PyTorch runs the hooks of a step inside `step()` only, so a step in parts must run them itself, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
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

from lockstep.optim import HookedOptimizer

PER_PARAMETER: Final = frozenset(
    {ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop}
)
"""Optimizers whose step of one parameter reads nothing of another."""


@dataclass(slots=True)
class Progress:
    """How far a step has come: whether its arithmetic has begun, and whether it has moved all weights."""

    has_begun: bool = False
    is_done: bool = False

    @contextmanager
    def around_arithmetic(self) -> Iterator[None]:
        """Take note of the beginning and of the end of what moves the weights."""
        self.has_begun = True
        yield
        self.is_done = True


def can_step_in_parts(optimizer: Optimizer) -> bool:
    """Tell whether parts of the parameters may be stepped by themselves, with the same bits.

    So it is for lockstep's own rules and for PyTorch's that work parameter by parameter, the latter by
    their exact class: a subclass may do otherwise.
    """
    return isinstance(optimizer, HookedOptimizer) or type(optimizer) in PER_PARAMETER


def step_whole(optimizer: Optimizer, progress: Progress) -> None:
    """Take the step as any loop would.

    PyTorch opens a range for its profiler around each, at a third of the time in which a small model is
    stepped; where nobody profiles and no hook waits, the class's step is all there is to it.

    Args:
        optimizer: What steps.
        progress: Told how far it has come.
    """
    if type(optimizer) in PER_PARAMETER and not _is_watched(optimizer):
        with progress.around_arithmetic():
            _bare_step(optimizer)
    elif isinstance(optimizer, HookedOptimizer):

        def advance() -> None:
            with progress.around_arithmetic():
                optimizer.advance()

        optimizer.step(advance=advance)
    else:
        with _marking_hooks(optimizer, progress):
            optimizer.step()


@contextmanager
def _marking_hooks(optimizer: Optimizer, progress: Progress) -> Iterator[None]:
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
    progress: Progress,
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
            with progress.around_arithmetic():
                run(lambda place: own[place].advance())

        optimizer.step(advance=advance)
        return
    args: tuple[Any, ...] = (optimizer,)
    kwargs: dict[str, Any] = {}
    for hook in chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
        hook(optimizer, args, kwargs)
    views = [_view(optimizer, part) for part in parts]
    with progress.around_arithmetic():
        run(lambda place: _bare_step(views[place]))
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
