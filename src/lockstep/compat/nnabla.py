"""NNabla's name: an updater around a loss and a data feeder that are functions without arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Protocol

import torch
from torch.optim import Optimizer

from lockstep.communicators import Communicator
from lockstep.optim import LAMB, SGDW, WeightDecay
from lockstep.precision import DynamicLossScale, LossScaler, nnabla_loss_scale
from lockstep.state import check_keys

SMALLEST: Final = 2.0**-126
"""The smallest power of two that float32 holds as a normal number."""

LARGEST: Final = 2.0**127
"""The largest power of two that float32 holds."""


class AllReduce(Protocol):
    """What NNabla's communicators have, as far as the updater needs it."""

    def all_reduce(self, data: Sequence[torch.Tensor], division: bool = False, inplace: bool = False) -> Any:
        """Add up tensors over ranks, each in its own memory."""


def no_data() -> None:
    """Feed nothing."""


@dataclass(eq=False)
class DynamicLossScalingUpdater:
    """Do updates of a loss under a scale that steps down after an overflow and up after a good run.

    Peculiar to NNabla: accumulated batches and ranks are **summed**, so that the learning rate or the loss is
    to be divided by their number; after an overflow the update is tried again with **new** data, and the
    batches that overflowed are lost, while buffers and random numbers have moved on; the scale grows with
    good update N + 2, later with every N + 1 (`lockstep.precision.nnabla_loss_scale`). `ParallelUpdater` has
    the same without the peculiarities.

    All arguments are attributes that may be set between updates.

    Args:
        solver: Any of torch's optimizers.
        loss: Computes the loss of what `data_feeder` fed: one element, carrying a gradient.
        data_feeder: Called before each forward.
        scale: The factor of the loss, positive.
        scaling_factor: What the scale is multiplied by, or divided by after an overflow; above 1.
        N: The interval of growth in good updates; see above.
        clear_buffer: Whether backward frees the graph as it goes.
        accum_grad: How many forwards and backwards make up an update.
        weight_decay: The rate of decay on true gradients; None for none. `lockstep.optim.SGDW` and
            `lockstep.optim.LAMB`, which decay by themselves, take it in the place of their own; torch's AdamW
            has its own beside it. `lockstep.optim.hooks.GradientLARS` has a rate of its own.
        comm: A lockstep `Communicator`, or anything with NNabla's ``all_reduce(tensors, division=,
            inplace=)``; None to exchange nothing.
        grads: What to exchange: parameters, whose gradients it will be, or gradients themselves. With none
            there is no exchange, as in NNabla.

    Attributes:
        minimum: The floor of the scale, which NNabla lacks: 2⁻¹⁴, or where the scale begins below that the
            smallest power of two that float32 holds as a normal number.
        maximum: Its ceiling, which NNabla lacks: 2²⁴, or where the scale begins above that the largest power
            of two that float32 holds.

    Raises:
        ValueError: A number for the scale is out of range.

    References: nnabla 1.35.1, ``nnabla.experimental.mixed_precision_training``, for the face. The arithmetic
    is that of `lockstep.LossScaler`.

    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> updater = DynamicLossScalingUpdater(torch.optim.SGD([weight], lr=0.5), lambda: (weight * 3).sum())
    >>> updater.update(), weight.item(), updater.scale
    (True, -0.5, 8.0)
    """

    max_tries: ClassVar[int] = 101
    """How often one `update` tries: once, and 100 times more."""

    solver: Optimizer
    loss: Callable[[], torch.Tensor]
    data_feeder: Callable[[], object] = no_data
    scale: float = 8.0
    scaling_factor: float = 2.0
    N: int = 2000
    clear_buffer: bool = True
    accum_grad: int = 1
    weight_decay: float | None = None
    comm: Communicator | AllReduce | None = None
    grads: Sequence[torch.Tensor] = ()
    minimum: float = field(default=DynamicLossScale.minimum, init=False)
    maximum: float = field(default=DynamicLossScale.maximum, init=False)
    _counter: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        self._policy()

    def update(self) -> bool:
        """Try to update, with new data each time, until the gradient is finite or no try is left.

        Returns:
            Whether the weights have moved. (NNabla does not say.)

        What `data_feeder` or `loss` raise goes through; the scale stays where it has stepped down to.
        """
        tries = 0
        while tries < self.max_tries:
            if self._try():
                return True
            tries += 1
        return False

    def state_dict(self) -> dict[str, float]:
        """Give the scale and the count of good updates since it last changed."""
        return {"scale": self.scale, "counter": self._counter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved scale.

        Raises:
            StateError: Keys are missing or unknown.
        """
        check_keys(state, ["scale", "counter"], of="a DynamicLossScalingUpdater")
        self.scale, self._counter = float(state["scale"]), int(state["counter"])

    def _policy(self) -> DynamicLossScale:
        """Give the scale as a value, by the attributes as they are now."""
        self._make_room()
        bounds = {"minimum": self.minimum, "maximum": self.maximum}
        policy = nnabla_loss_scale(self.scale, self.scaling_factor, self.N, **bounds)
        # NNabla counts from 0; and an interval that was shortened may be over already.
        counted = min(self._counter - 1, policy.interval - 1)
        return replace(policy, finite_updates=max(counted, -policy.uncounted))

    def _make_room(self) -> None:
        """Let a scale be that lies outside of the default bounds, and move from there as NNabla's does."""
        if self.scale < self.minimum == DynamicLossScale.minimum:
            self.minimum = SMALLEST
        if self.scale > self.maximum == DynamicLossScale.maximum:
            self.maximum = LARGEST

    def _try(self) -> bool:
        """Compute a gradient with new data, and step if it is finite."""
        self.solver.zero_grad()
        policy = self._policy()
        scaler = LossScaler(policy)
        for _ in range(self.accum_grad):
            self.data_feeder()
            scaled = scaler.scale(self.loss())
            scaled.backward(retain_graph=not self.clear_buffer)  # type: ignore[no-untyped-call]  # torch's gap
        self._exchange()
        scaler.unscale_(self.solver)
        finite = not bool(scaler.nonfinite(self.solver))
        with self._decaying():
            scaler.step(self.solver)
        scaler.update()
        after = policy.after(finite=finite)
        self.scale, self._counter = after.factor, after.finite_updates + 1
        return finite

    def _exchange(self) -> None:
        """Add up the gradients of all ranks while they are scaled, so that all decide alike."""
        if self.comm is None or len(self.grads) == 0:
            return
        gradients = [_gradient(each) for each in self.grads]
        if isinstance(self.comm, Communicator):
            self.comm.all_reduce(gradients)
        else:
            self.comm.all_reduce(gradients, division=False, inplace=False)

    @contextmanager
    def _decaying(self) -> Iterator[None]:
        """Have a step decay the weights, after the gradients were divided by the scale."""
        rate = self.weight_decay
        if rate is None:
            yield
        elif isinstance(self.solver, SGDW | LAMB):
            with _own_decay(self.solver, rate):
                yield
        else:
            handle = self.solver.register_step_pre_hook(WeightDecay(rate))
            try:
                yield
            finally:
                handle.remove()


@contextmanager
def _own_decay(solver: Optimizer, rate: float) -> Iterator[None]:
    """Give a solver another rate for its own decay, and then the one it had."""
    kept = [group["weight_decay"] for group in solver.param_groups]
    for group in solver.param_groups:
        group["weight_decay"] = rate
    try:
        yield
    finally:
        for group, own in zip(solver.param_groups, kept, strict=True):
            group["weight_decay"] = own


def _gradient(tensor: torch.Tensor) -> torch.Tensor:
    """Give the gradient of a parameter, zeros if it has none, for other ranks may have one."""
    if not tensor.requires_grad:
        return tensor
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad
