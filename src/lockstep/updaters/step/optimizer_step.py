"""Run the step of an optimizer: whole, or in concurrent parts where every parameter is stepped independently.

PyTorch runs the hooks of a step only inside `step()`, so a step in parts has to run them itself, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import torch
from torch.nn.utils import clip_grad_norm_
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
from lockstep.precision import ChangesOnlyGradients, MasterWeights, skipped_if
from lockstep.updaters.step.checks import VERSION_OF
from lockstep.updaters.step.fused import match_state_layout

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
    """Check whether some parameters can be stepped without the others, with the same bits.

    This holds for lockstep's own optimizers, and for PyTorch's that step parameter by parameter. They are recognized by
    their exact class, because a subclass may do something else, such as draw noise.
    """
    if isinstance(optimizer, HookedOptimizer):
        return type(optimizer).__module__.startswith("lockstep.")
    return type(optimizer) in PER_PARAMETER


def drawing_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """List the hooks that are called in a step, without those that are known to draw nothing."""
    hooks = [
        *_global_optimizer_pre_hooks.values(),
        *optimizer._optimizer_step_pre_hooks.values(),
        *(optimizer.hooks if isinstance(optimizer, HookedOptimizer) else ()),
        *optimizer._optimizer_step_post_hooks.values(),
        *_global_optimizer_post_hooks.values(),
    ]
    return [hook for hook in hooks if not isinstance(hook, ChangesOnlyGradients)] if hooks else hooks


def step_whole(optimizer: Optimizer, progress: StepProgress) -> None:
    """Run the whole step in the calling thread.

    PyTorch opens a profiler range around each step, which takes a third of the time of stepping a small model. If there
    are no hooks and no profiler is active, the step function of the class is called directly.

    Args:
        optimizer: The optimizer to step.
        progress: Records how far the step has come.
    """
    if type(optimizer) in PER_PARAMETER and not _needs_full_step(optimizer):
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
        with _progress_hooks(optimizer, progress):
            optimizer.step()


@contextmanager
def _progress_hooks(optimizer: Optimizer, progress: StepProgress) -> Iterator[None]:
    """Record the arithmetic of a step by hooks that run after all other pre-hooks and before all other post-hooks."""

    def begin(*_: Any) -> None:
        progress.has_begun = True

    def end(*_: Any) -> None:
        progress.is_done = True

    before = optimizer.register_step_pre_hook(begin)
    after = optimizer.register_step_post_hook(end)
    # A post-hook of the user that raises does so after the weights have moved; ours must have recorded that.
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]  # an OrderedDict
    try:
        yield
    finally:
        before.remove()
        after.remove()


def _needs_full_step(optimizer: Optimizer) -> bool:
    """Check whether hooks, a scheduler or a profiler need the wrappers of PyTorch around the step."""
    return bool(
        "step" in vars(optimizer)
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        # The first knows of a profiler of this thread, and the second of one that records all threads.
        or torch._C._autograd._profiler_enabled()  # noqa: SLF001 - no public way
        or torch.autograd.profiler._is_profiler_enabled  # noqa: SLF001 - as above
    )


def step_in_parts(
    optimizer: Optimizer,
    parts: Sequence[frozenset[int]],
    run: Callable[[Callable[[int], None]], None],
    progress: StepProgress,
) -> None:
    """Run one step in concurrent parts; hooks and schedulers observe one whole step.

    Args:
        optimizer: An optimizer for which `can_step_in_parts` returns True.
        parts: For each thread the parameters that it steps, by ``id``; together all of them.
        run: Runs a function of an index on all threads at once.
        progress: Records how far the step has come.

    Determinism: the bits are those of `step_whole`, because no parameter is split.
    """
    if isinstance(optimizer, HookedOptimizer):
        own = [optimizer.part(_groups_of(optimizer, part)) for part in parts]

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
    # Created after the pre-hooks, which may change options such as the learning rate.
    views = [_partial_view(optimizer, part) for part in parts]
    progress.has_begun = True
    run(lambda place: _bare_step(views[place]))
    progress.is_done = True
    for hook in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
        hook(optimizer, args, kwargs)
    if "step" in vars(optimizer):
        # A scheduler has wrapped `step()` of this object to check that it is called before the scheduler's own.
        optimizer._opt_called = True  # type: ignore[attr-defined]


def _groups_of(optimizer: Optimizer, part: frozenset[int]) -> list[dict[str, Any]]:
    """Return the parameter groups with their current options and only some of the parameters."""
    return [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) in part]}
        for group in optimizer.param_groups
    ]


def _partial_view(optimizer: Optimizer, part: frozenset[int]) -> Optimizer:
    """Create a view of an optimizer that has only some of its parameters, and shares its state."""
    # Not by the constructor, which would register the parameters again and discard the state.
    view: Optimizer = object.__new__(type(optimizer))
    view.__dict__.update(vars(optimizer))
    view.param_groups = _groups_of(optimizer, part)
    return view


def _bare_step(optimizer: Optimizer) -> None:
    """Run the step function of the class without the wrappers that call hooks and toggle gradient mode."""
    step = type(optimizer).step
    bare: Callable[[Optimizer], Any] = step.__wrapped__.__wrapped__  # type: ignore[attr-defined]  # set by PyTorch
    before = torch.is_grad_enabled()
    # This is what the outer wrapper does, so `differentiable` keeps its meaning.
    torch._C._set_grad_enabled(optimizer.defaults["differentiable"])
    try:
        bare(optimizer)
    finally:
        torch._C._set_grad_enabled(before)


def balance_parameters(parameters: Sequence[torch.Tensor], num_parts: int) -> list[frozenset[int]]:
    """Distribute parameters over parts: each, from the largest on, to the part with the fewest elements.

    Args:
        parameters: The parameters to distribute.
        num_parts: The number of parts.

    Returns:
        The parameters of each part, by ``id``.
    """
    parts: list[set[int]] = [set() for _ in range(num_parts)]
    sizes = [0] * num_parts
    for parameter in sorted(parameters, key=lambda parameter: parameter.numel(), reverse=True):
        emptiest = sizes.index(min(sizes))
        parts[emptiest].add(id(parameter))
        sizes[emptiest] += parameter.numel()
    return [frozenset(part) for part in parts]


RunOnDevices = Callable[[Callable[[int], None]], None]
OpenStream = Callable[[Sequence[object]], AbstractContextManager[None]]
NO_STREAM: Final[AbstractContextManager[None]] = nullcontext()


class OptimizerStep:
    """Runs the steps of one optimizer, and separates errors before the weights moved from errors afterwards.

    Args:
        optimizer: The optimizer. Its parameters must hold their gradients before each step.
        masters: The float32 master weights that are stepped in place of parameters in half precision; or None.
        clip: The largest norm of all gradients together; None for any.

    Attributes:
        grad_norm: The norm of all gradients before the last step clipped them; None if they are not clipped.
    """

    def __init__(self, optimizer: Optimizer, masters: MasterWeights | None, clip: float | None = None) -> None:
        self._clip = clip
        self.grad_norm: torch.Tensor | None = None
        self._optimizer = optimizer
        self._masters = masters
        self._parts: list[frozenset[int]] = []
        self._assigned: list[int] = []

    def step(
        self, *, num_devices: int, run: RunOnDevices, draws: OpenStream, found_inf: torch.Tensor | None = None
    ) -> BaseException | None:
        """Run the step of the optimizer.

        Args:
            num_devices: The number of threads that the step may be split over; 1 for a step in the calling thread.
            run: Runs a function on all devices at once.
            draws: Opens the random stream of the update for an optimizer and hooks that may draw.
            found_inf: A 0-d tensor on the device, above 0 where the step must change nothing. Only for optimizers that
                accept a flag.

        Returns:
            An error that was raised after all weights had moved, by a hook for example. The step is complete
            nevertheless.

        Raises:
            BaseException: An error that was raised before any weight moved.
            LockstepError: If an error was raised in between, so that the weights are neither the old nor the new ones.
        """
        if found_inf is not None:
            with skipped_if(self._optimizer, found_inf):
                return self.step(num_devices=num_devices, run=run, draws=draws)
        if self._masters is not None:
            with self._masters.replacing_parameters():
                return self._step(num_devices, run, draws)
        own = self._optimizer.masters if isinstance(self._optimizer, HookedOptimizer) else None
        if own is not None:
            own.copy_gradients()
            with own.replacing_parameters():
                return self._step(num_devices, run, draws)
        return self._step(num_devices, run, draws)

    def _step(self, num_devices: int, run: RunOnDevices, draws: OpenStream) -> BaseException | None:
        """Run the step on what the optimizer's groups contain now."""
        parameters: list[torch.Tensor] = []
        fused = False
        for group in self._optimizer.param_groups:
            parameters += group["params"]
            fused = fused or bool(group.get("fused"))
        if fused:
            match_state_layout(self._optimizer)
        if self._clip is not None:
            # In one intra-op thread and on gradients with the strides of the weights, so that torch's reduction adds in
            # an order that does not depend on the machine or on the devices.
            own = self._optimizer if isinstance(self._optimizer, HookedOptimizer) else None
            moving = parameters if own is None else own.moving_parameters()
            self.grad_norm = clip_grad_norm_(moving, self._clip)
        # In-place operations increase the version of a tensor, which shows after an error which weights have moved.
        versions = list(map(VERSION_OF, parameters))
        progress = StepProgress()
        try:
            in_parts, hooks = can_step_in_parts(self._optimizer), drawing_hooks(self._optimizer)
            # Opened only for code of others than PyTorch and lockstep, because it takes some 5 µs.
            with NO_STREAM if in_parts and not hooks else draws([self._optimizer, *hooks]):
                if num_devices > 1 and in_parts:
                    self._assign_parameters(parameters, num_devices)
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
        """Return whether all weights had moved before an error; False if none had.

        Raises:
            LockstepError: If some had moved.
        """
        moved = [
            parameter._version != version
            for parameter, version in zip(parameters, versions, strict=True)
            # Parameters without a gradient are not stepped, and keep their versions.
            if parameter.grad is not None
        ]
        if progress.is_done or (moved and all(moved)):
            return True
        # Fused kernels do not increase versions, so some weights may have moved unnoticed.
        fused = any(group.get("fused") for group in self._optimizer.param_groups)
        if any(moved) or (progress.has_begun and fused):
            raise LockstepError(
                f"The step of {type(self._optimizer).__name__} raised {type(error).__name__} between the "
                f"first weight that moved and the last: {error}. Load a saved state."
            ) from error
        return False

    def _assign_parameters(self, parameters: list[torch.Tensor], num_devices: int) -> None:
        """Distribute the parameters over devices, again whenever they have changed."""
        # Compared by identity: the user may add a parameter group at any time.
        assigned = [num_devices, *map(id, parameters)]
        if assigned != self._assigned:
            self._parts, self._assigned = balance_parameters(parameters, num_devices), assigned
