"""Run the arithmetic of an optimizer's step: whole, or in parts where every parameter is stepped independently.

PyTorch runs the hooks of a step only inside `step()`, so a step in parts has to run them itself, once.

Weights and state are prepared for its fused optimizers. On a CPU their kernels read and write memory from the first
element of each tensor on, and ignore strides. A weight that is not dense would have its neighbours in memory changed,
and state with other strides than its weight would be matched with the wrong elements. On a GPU PyTorch refuses both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from lockstep.optim import HookedOptimizer
from lockstep.precision import HALF_PRECISION, ChangesOnlyGradients, step_hooks
from lockstep.strides import is_dense, laid_out_for

RunOnDevices: TypeAlias = Callable[[Callable[[int], None]], None]
"""Runs a function of a device's index on all devices at once."""

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)

_NAMES: Final = ("ASGD", "SGD", "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "Rprop")
PER_PARAMETER: Final = frozenset(getattr(torch.optim, name) for name in _NAMES)
"""Optimizers whose step of one parameter reads nothing of another."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one thread steps.

    Attributes:
        stepped: The tensors by the ``id`` of the parameter that each stands for: itself, or a piece of it.
        state: Their state; None for that of the optimizer.
    """

    stepped: Mapping[int, torch.Tensor]
    state: defaultdict[torch.Tensor, Any] | None = None


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
    own = optimizer.hooks if isinstance(optimizer, HookedOptimizer) else ()
    pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    if not (own or pre or post or _global_optimizer_pre_hooks or _global_optimizer_post_hooks):
        return []
    return [hook for hook in (*step_hooks(optimizer), *own) if not isinstance(hook, ChangesOnlyGradients)]


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
        bare_step(optimizer)
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
    begin: Callable[[], tuple[Sequence[Part], Callable[[], None] | None]],
    run: RunOnDevices,
    progress: StepProgress,
) -> None:
    """Run one step in concurrent parts; hooks and schedulers observe one whole step.

    Args:
        optimizer: An optimizer for which `can_step_in_parts` returns True. Any other gets a single part.
        begin: Returns for each thread what it steps, and what is called when all parts have been stepped, before the
            post-hooks; None for nothing. Called after the pre-hooks, which may replace gradients.
        run: Runs a function of an index on all threads at once.
        progress: Records how far the step has come.

    Determinism: the bits are those of `step_whole`, because parameters are split at most where elementwise kernels
    round the same.
    """

    def move(stepper: Callable[[Optimizer, Part], Callable[[], None]]) -> None:
        parts, end = begin()
        steps = [stepper(optimizer, part) for part in parts]
        progress.has_begun = True
        if len(steps) == 1:
            steps[0]()
        else:
            run(lambda place: steps[place]())
        if end is not None:
            end()
        progress.is_done = True

    if isinstance(optimizer, HookedOptimizer):
        optimizer.step(advance=lambda: move(lambda _, part: partial_view(optimizer, part).advance))
        return
    args: tuple[Any, ...] = (optimizer,)
    kwargs: dict[str, Any] = {}
    for hook in chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
        result = hook(optimizer, args, kwargs)
        if result is not None and result != (args, kwargs):
            raise RuntimeError(
                "A step pre-hook must return None or the arguments that it has received, because the step of an "
                f"updater has no others, got {result!r}."
            )
    # Views are created after the pre-hooks, which may change options such as the learning rate.
    move(_view_stepper if type(optimizer) in PER_PARAMETER else _own_stepper)
    for hook in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
        hook(optimizer, args, kwargs)
    if "step" in vars(optimizer):
        # A scheduler has wrapped `step()` of this object to check that it is called before the scheduler's own.
        optimizer._opt_called = True  # type: ignore[attr-defined]


def _groups_of(optimizer: Optimizer, part: Part) -> list[dict[str, Any]]:
    """Return the parameter groups with their current options and what a part has of the parameters."""
    stepped = part.stepped
    return [
        {**group, "params": [stepped[id(parameter)] for parameter in group["params"] if id(parameter) in stepped]}
        for group in optimizer.param_groups
    ]


def partial_view(optimizer: AnyOptimizer, part: Part) -> AnyOptimizer:
    """Create a view of an optimizer that steps a part of its parameters, and shares its state by default."""
    # Not by the constructor, which would register the parameters again and discard the state.
    view: AnyOptimizer = object.__new__(type(optimizer))
    view.__dict__.update(vars(optimizer))
    view.param_groups = _groups_of(optimizer, part)
    if part.state is not None:
        view.state = part.state
    return view


def _view_stepper(optimizer: Optimizer, part: Part) -> Callable[[], None]:
    return partial(bare_step, partial_view(optimizer, part))


def _own_stepper(optimizer: Optimizer, part: Part) -> Callable[[], None]:
    """Return the step of an optimizer of others, which may keep anything in its groups and attributes."""

    def step() -> None:
        before, held = optimizer.state, [group["params"] for group in optimizer.param_groups]
        for group, own in zip(optimizer.param_groups, _groups_of(optimizer, part), strict=True):
            group["params"] = own["params"]
        optimizer.state = before if part.state is None else part.state
        try:
            bare_step(optimizer)
        finally:
            optimizer.state = before
            for group, params in zip(optimizer.param_groups, held, strict=True):
                group["params"] = params

    return step


def bare_step(optimizer: Optimizer) -> None:
    """Run the step function of the class without the wrappers that call hooks and toggle gradient mode.

    Args:
        optimizer: An optimizer that is not one of lockstep's.
    """
    step = type(optimizer).step
    if type(optimizer) not in PER_PARAMETER:
        # PyTorch wraps the function of every class once, to call hooks.
        getattr(step, "__wrapped__", step)(optimizer)
        return
    bare: Callable[[Optimizer], Any] = step.__wrapped__.__wrapped__  # type: ignore[attr-defined]  # set by PyTorch
    before = torch.is_grad_enabled()
    # This is what the outer wrapper does, so `differentiable` keeps its meaning.
    torch._C._set_grad_enabled(optimizer.defaults["differentiable"])
    try:
        bare(optimizer)
    finally:
        torch._C._set_grad_enabled(before)


def balance(
    stepped: Mapping[int, torch.Tensor], num_parts: int, state: defaultdict[torch.Tensor, Any] | None = None
) -> list[Part]:
    """Distribute tensors over parts: each, from the largest on, to the part with the fewest elements.

    Args:
        stepped: The tensors to distribute, by the ``id`` of the parameter that each stands for.
        num_parts: The number of parts.
        state: The state of the tensors; None for that of the optimizer.
    """
    parts: list[dict[int, torch.Tensor]] = [{} for _ in range(num_parts)]
    sizes = [0] * num_parts
    for parameter, tensor in sorted(stepped.items(), key=lambda item: item[1].numel(), reverse=True):
        emptiest = sizes.index(min(sizes))
        parts[emptiest][parameter] = tensor
        sizes[emptiest] += tensor.numel()
    return [Part(part, state) for part in parts]


FUSED: Final = (SGD, Adagrad, Adam, AdamW)
"""PyTorch's optimizers that have an option ``fused``."""


_NO_STATE: Final[dict[str, Any]] = {}


def check_dense(optimizer: Optimizer, *, has_masters: bool) -> None:
    """Check that the weights of a fused optimizer are dense.

    Args:
        optimizer: Any optimizer.
        has_masters: Whether it steps dense master weights in place of weights in half precision.

    Raises:
        ValueError: If a weight of a fused optimizer is not dense.
    """
    for weight in _fused_weights(optimizer):
        if not is_lazy(weight) and not (has_masters and weight.dtype in HALF_PRECISION):
            _check_dense(optimizer, weight)


def match_state_layout(optimizer: Optimizer) -> None:
    """Convert the state of a fused optimizer to the strides of its weights, before a step.

    They differ if a model has changed its memory format, or if a state was saved in another format.

    Args:
        optimizer: Any optimizer. Its state is changed in place, but only in its memory layout.

    Raises:
        ValueError: If a weight that has a gradient is not dense.
    """
    for weight in _fused_weights(optimizer):
        if weight.grad is None:
            continue
        remembered: dict[str, Any] = dict.get(optimizer.state, weight, _NO_STATE)
        # The usual case, checked in a third of the time.
        if weight.is_contiguous() and all(map(_is_contiguous, remembered.values())):
            continue
        # Checked again before every step: the user may have replaced the memory of a weight.
        _check_dense(optimizer, weight)
        for key, value in remembered.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                remembered[key] = laid_out_for(weight, value)


def _fused_weights(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over the weights that PyTorch's fused kernels step."""
    if isinstance(optimizer, FUSED):
        for group in optimizer.param_groups:
            if group.get("fused"):
                yield from group["params"]


def _is_contiguous(value: object) -> bool:
    return not isinstance(value, Tensor) or value.is_contiguous()


def _check_dense(optimizer: Optimizer, weight: Tensor) -> None:
    if not is_dense(weight):
        raise ValueError(
            f"`optimizer` must have `fused=False` for weights that are not dense in memory, got a fused "
            f"{type(optimizer).__name__} and a weight of shape {tuple(weight.shape)} and strides "
            f"{weight.stride()}. Use `foreach=True`, or give the module a weight of its own: "
            "`weight.data = weight.data.clone(memory_format=torch.contiguous_format)`."
        )
