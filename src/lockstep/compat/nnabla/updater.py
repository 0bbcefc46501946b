"""NNabla's interface: an updater around a loss and a data feeder that are functions without arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Protocol

import torch
from torch.optim import Optimizer

from lockstep.communicators import Communicator
from lockstep.compat.nnabla.solvers import LAMB, SGDW
from lockstep.optim import WeightDecay
from lockstep.precision import DynamicLossScale, LossScaler, nnabla_loss_scale, required_by_step
from lockstep.state import check_keys

SMALLEST_SCALE: Final = 2.0**-126
"""The smallest power of two that is a normal number in float32."""

LARGEST_SCALE: Final = 2.0**127
"""The largest power of two in float32."""


class AllReduce(Protocol):
    """The method of NNabla's communicators that the updater uses."""

    def all_reduce(self, data: Sequence[torch.Tensor], division: bool = False, inplace: bool = False) -> Any:
        """Sum tensors over ranks in place.

        Args:
            data: The tensors to sum.
            division: Whether to divide the sums by the number of ranks.
            inplace: Whether to exchange each tensor on its own instead of a packed copy of all.
        """


def no_data() -> None:
    """Feed no data."""


@dataclass(eq=False)
class DynamicLossScalingUpdater:
    """Updates the weights with a loss scale that decreases after an overflow and increases after finite updates.

    Specific to NNabla: accumulated batches and ranks are **summed**, so that you divide the learning rate or the
    loss by their number; after an overflow the update is attempted again with **new** data, and the batches that
    overflowed are lost, while buffers and random number generators have advanced; the scale grows with finite
    update N + 2, and later with every N + 1 (`lockstep.precision.nnabla_loss_scale`). `ParallelUpdater` offers the
    same without these differences.

    All arguments are attributes that you can set between updates.

    Args:
        solver: Any torch optimizer whose step requires no argument, which excludes LBFGS.
        loss: A function that returns the loss of the data that `data_feeder` fed, as one element with a graph.
        data_feeder: A function that is called before each forward.
        scale: The loss scale, above 0.
        scaling_factor: The factor by which the scale is multiplied, and divided after an overflow; above 1.
        N: The number of finite updates between two increases of the scale; see above. A fraction counts for nothing.
        clear_buffer: Whether backward frees the graph.
        accum_grad: The number of forwards and backwards per update.
        weight_decay: The weight decay that is added to the unscaled gradients; None for none.
            `SGDW` and `LAMB` apply it by their own rule, instead of their own weight
            decay; torch's AdamW applies its own in addition. `lockstep.optim.hooks.GradientLARS` has its own too.
        comm: A lockstep `Communicator`, or any object with NNabla's ``all_reduce(tensors, division=, inplace=)``;
            None for a single process.
        grads: What to sum over ranks: parameters, for their gradients, or gradients themselves, which are then kept
            between updates and set to zero in place. If it is empty, nothing is exchanged, as in NNabla.

    Attributes:
        minimum: The lower bound of the scale, which NNabla does not have: 2⁻¹⁴, or, for a scale that starts below
            it, the smallest power of two that is a normal number in float32.
        maximum: The upper bound of the scale, which NNabla does not have: 2²⁴, or, for a scale that starts above
            it, the largest power of two in float32.

    Raises:
        ValueError: If a number for the scale is out of range, or the step of the solver requires an argument.

    References: nnabla 1.35.1, ``nnabla.experimental.mixed_precision_training``, for the interface. The arithmetic
    is that of `lockstep.LossScaler`.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> updater = DynamicLossScalingUpdater(torch.optim.SGD([weight], lr=0.5), lambda: (weight * 3).sum())
    >>> updater.update(), weight.item(), updater.scale
    (True, -0.5, 8.0)
    """

    max_tries: ClassVar[int] = 101
    """The largest number of attempts per `update`: one, and 100 more."""

    solver: Optimizer
    loss: Callable[[], torch.Tensor]
    data_feeder: Callable[[], object] = no_data
    scale: float = 8.0
    scaling_factor: float = 2.0
    N: float = 2000
    clear_buffer: bool = True
    accum_grad: int = 1
    weight_decay: float | None = None
    comm: Communicator | AllReduce | None = None
    grads: Sequence[torch.Tensor | None] = ()
    minimum: float = field(default=DynamicLossScale.minimum, init=False)
    maximum: float = field(default=DynamicLossScale.maximum, init=False)
    _counter: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        for argument in required_by_step(self.solver):
            raise ValueError(
                f"`solver` must have a step without arguments, got {type(self.solver).__name__}, whose step requires "
                f"{argument!r}. Pass it to a ParallelUpdater, which calls it with a closure."
            )
        # Checks the numbers for the scale.
        self._policy()

    def update(self) -> bool:
        """Attempt an update, with new data each time, until the gradient is finite or `max_tries` is reached.

        Returns:
            Whether the weights were updated. (NNabla returns nothing.)

        Exceptions of `data_feeder` and `loss` are passed on; the scale keeps the value to which it had decreased.
        """
        tries = 0
        while tries < self.max_tries:
            if self._attempt():
                return True
            tries += 1
        return False

    def state_dict(self) -> dict[str, float]:
        """Return the scale, and the number of finite updates since it last changed."""
        return {"scale": self.scale, "counter": self._counter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved scale.

        Raises:
            StateError: If keys are missing or unknown.
        """
        check_keys(state, ["scale", "counter"], of="a DynamicLossScalingUpdater")
        self.scale, self._counter = float(state["scale"]), int(state["counter"])

    def _policy(self) -> DynamicLossScale:
        """Return the scale as a value of the core, from the current attributes."""
        # A scale outside of the default bounds then changes as NNabla's does.
        if self.scale < self.minimum == DynamicLossScale.minimum:
            self.minimum = SMALLEST_SCALE
        if self.scale > self.maximum == DynamicLossScale.maximum:
            self.maximum = LARGEST_SCALE
        bounds = {"minimum": self.minimum, "maximum": self.maximum}
        policy = nnabla_loss_scale(self.scale, self.scaling_factor, self.N, **bounds)
        # NNabla counts from 0, and `N` may have been reduced below the current count.
        counted = min(self._counter - 1, policy.interval - 1)
        return replace(policy, finite_updates=max(counted, -policy.uncounted))

    def _attempt(self) -> bool:
        """Compute a gradient with new data, and return whether it was finite and applied."""
        # Gradients that were given must stay those of the parameters.
        self.solver.zero_grad(set_to_none=all(each is None or each.requires_grad for each in self.grads))
        policy = self._policy()
        scaler = LossScaler(policy)
        for _ in range(self.accum_grad):
            self.data_feeder()
            scaled = scaler.scale(self.loss())
            scaled.backward(retain_graph=not self.clear_buffer)  # type: ignore[no-untyped-call]  # torch's gap
        self._exchange()
        scaler.unscale_(self.solver)
        # Before the weight decay, which must see gradients without the scale.
        finite = not bool(scaler.nonfinite(self.solver))
        with self._weight_decay_applied():
            scaler.step(self.solver)
        scaler.update()
        after = policy.after(finite=finite)
        self.scale, self._counter = after.factor, after.finite_updates + 1 if finite else 0
        return finite

    def _exchange(self) -> None:
        """Sum the gradients of all ranks before they are checked, so that all ranks make the same decision."""
        if self.comm is None or len(self.grads) == 0:
            return
        gradients = [_gradient(each) for each in self.grads]
        if isinstance(self.comm, Communicator):
            self.comm.all_reduce(gradients)
        else:
            self.comm.all_reduce(gradients, division=False, inplace=False)

    @contextmanager
    def _weight_decay_applied(self) -> Iterator[None]:
        """Apply the weight decay in a step of the solver, after the gradients were divided by the scale."""
        rate = self.weight_decay
        with ExitStack() as stack:
            if rate is not None and isinstance(self.solver, SGDW | LAMB):
                for group in self.solver.param_groups:
                    stack.callback(group.update, weight_decay=group["weight_decay"])
                    group["weight_decay"] = rate
            elif rate is not None:
                stack.callback(self.solver.register_step_pre_hook(WeightDecay(rate)).remove)
            yield


def _gradient(tensor: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of a parameter, zeros if it has none, because other ranks may have one; other tensors as is.

    Args:
        tensor: A parameter, or a gradient.

    Raises:
        TypeError: If it is None, as the gradient of a parameter is before the first backward.
    """
    if tensor is None:
        raise TypeError("`grads` must hold parameters or gradients, got None. Pass list(model.parameters()).")
    if not tensor.requires_grad:
        return tensor
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad
