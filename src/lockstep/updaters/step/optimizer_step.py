"""Run the step of an optimizer, and tell errors before the weights moved from those afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from lockstep.errors import LockstepError
from lockstep.optim import HookedOptimizer, norms
from lockstep.precision import MasterWeights, skipped_if
from lockstep.updaters.step.checks import VERSION_OF
from lockstep.updaters.step.sharing import SharedStep
from lockstep.updaters.step.stepping import (
    RunOnDevices,
    StepProgress,
    balance,
    can_step_in_parts,
    drawing_hooks,
    match_state_layout,
    step_in_parts,
    step_whole,
)

OpenStream = Callable[[Sequence[object]], AbstractContextManager[None]]
NO_STREAM: Final[AbstractContextManager[None]] = nullcontext()


@dataclass(eq=False)
class OptimizerStep:
    """Runs the steps of one optimizer, and separates errors before the weights moved from errors afterwards.

    Args:
        optimizer: The optimizer. Its parameters must hold their gradients before each step.
        masters: The float32 master weights that are stepped in place of parameters in half precision; or None.
        clip: The largest norm of all gradients together; None for any.
        shared: Steps what this rank owns, where the ranks share the optimizer out; None for all parameters.

    Attributes:
        grad_norm: The norm of all gradients before the last step clipped them; None if they are not clipped.
    """

    optimizer: Optimizer
    masters: MasterWeights | None
    clip: float | None
    shared: SharedStep | None

    def __post_init__(self) -> None:
        self.grad_norm: torch.Tensor | None = None
        self._in_parts = can_step_in_parts(self.optimizer)

    @property
    def runs_other_code(self) -> bool:
        """Whether a step runs code of others than PyTorch and lockstep, which may read or draw anything."""
        return not self._in_parts or bool(drawing_hooks(self.optimizer))

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
        if self.shared is not None:
            self.shared.prepare()
        if found_inf is not None:
            with skipped_if(self.optimizer, found_inf):
                return self.step(num_devices=num_devices, run=run, draws=draws)
        masters = self.masters
        if masters is None and isinstance(self.optimizer, HookedOptimizer):
            masters = self.optimizer.masters
            if masters is not None:
                masters.copy_gradients()
        with NO_STREAM if masters is None else masters.replacing_parameters():
            return self._step(num_devices, run, draws)

    def _step(self, num_devices: int, run: RunOnDevices, draws: OpenStream) -> BaseException | None:
        """Run the step on what the optimizer's groups contain now."""
        parameters: list[torch.Tensor] = []
        fused = False
        for group in self.optimizer.param_groups:
            parameters += group["params"]
            fused = fused or bool(group.get("fused"))
        if fused:
            match_state_layout(self.optimizer)
        if self.clip is not None:
            # In one intra-op thread and on gradients with the strides of the weights, so that torch's reduction adds in
            # an order that does not depend on the machine or on the devices.
            own = self.optimizer if isinstance(self.optimizer, HookedOptimizer) else None
            moving = parameters if own is None else own.moving_parameters()
            given = (each.grad for each in moving if each.grad is not None)
            if sparse := [each for each in given if each.layout is not torch.strided]:
                norms(sparse)  # which refuses them
            self.grad_norm = clip_grad_norm_(moving, self.clip)
        # In-place operations increase the version of a tensor, which shows after an error which weights have moved.
        versions = list(map(VERSION_OF, parameters))
        progress = StepProgress()
        try:
            in_parts, hooks = self._in_parts, drawing_hooks(self.optimizer)
            # Opened only for code of others than PyTorch and lockstep, because it takes some 5 µs.
            with NO_STREAM if in_parts and not hooks else draws([self.optimizer, *hooks]):
                if self.shared is not None:
                    self.shared.step(parameters, num_devices if in_parts else 1, run, progress)
                elif num_devices > 1 and in_parts:
                    whole = {id(parameter): parameter for parameter in parameters}
                    step_in_parts(self.optimizer, lambda: (balance(whole, num_devices), None), run, progress)
                else:
                    step_whole(self.optimizer, progress)
        except BaseException as error:
            if self._has_moved(error, progress, parameters, versions):
                return error
            # Errors of this library may quote a traceback of another rank.
            if "closure" in str(error) and isinstance(error, Exception) and not isinstance(error, LockstepError):
                kind = type(self.optimizer).__name__
                raise ValueError(
                    f"`optimizer` must have a step that says what it requires, got {kind}, whose step was called "
                    f"without a closure and raised {type(error).__name__}: {error}. Derive a class in which it is an "
                    f"argument without a default, by which it is recognized: class With({kind}): def step(self, "
                    "closure): return super().step(closure)."
                ) from error
            raise
        return None

    def _has_moved(
        self, error: BaseException, progress: StepProgress, parameters: Sequence[torch.Tensor], versions: Sequence[int]
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
        # The versions say nothing of weights that other ranks step.
        if progress.is_done or (moved and all(moved) and self.shared is None):
            return True
        # Fused kernels and other ranks do not increase versions, so some weights may have moved unnoticed.
        silent = self.shared is not None or any(group.get("fused") for group in self.optimizer.param_groups)
        if (any(moved) and self.shared is None) or (progress.has_begun and silent):
            raise LockstepError(
                f"The step of {type(self.optimizer).__name__} raised {type(error).__name__} between the "
                f"first weight that moved and the last: {error}. Load a saved state."
            ) from error
        return False
