"""Penalties, clipping, noise and layer-wise rates, as hooks that change gradients before the step.

Each hook works with lockstep's optimizers, ``optimizer.add_hook(hook)``, and with any other torch optimizer,
``optimizer.register_step_pre_hook(hook)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from lockstep.arguments import check_integer, check_number
from lockstep.optim.momentum import add_scaled_
from lockstep.optim.norm import global_norm, norms
from lockstep.precision import ChangesOnlyGradients
from lockstep.state import check_keys


class GradientHook(ABC):
    """A hook that changes all gradients in place before the weights are updated.

    It can be called in three ways: ``hook(optimizer)``, as lockstep's optimizers do;
    ``hook(optimizer, parameter)``, for a single parameter; and ``hook(optimizer, args, kwargs)``, as torch
    does after ``register_step_pre_hook``. (With ``step(closure)``, torch calls it before the closure has
    computed new gradients; lockstep's optimizers call it after that.)

    Parameters without a gradient are left out, and so are groups whose option ``frozen`` is True.
    """

    timing: ClassVar[str] = "pre"
    per_parameter: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The default name for ``add_hook``: the name of the class."""
        return type(self).__name__

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, *where: Any) -> None:
        """Change the gradients.

        Args:
            optimizer: The optimizer whose gradients are changed; with a parameter in ``where``, it is not used.
            *where: Nothing, a single parameter, or the two arguments that torch passes to a step hook.
        """
        # torch passes the two arguments of the step, lockstep's optimizers nothing or a parameter.
        weights = list(where) if len(where) == 1 else _parameters(optimizer)
        pairs = [(weight.detach(), weight.grad) for weight in weights if weight.grad is not None]
        if pairs:
            self.change_([weight for weight, _ in pairs], [grad for _, grad in pairs])

    @abstractmethod
    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Change these gradients in place.

        Shapes: both lists hold P tensors, at least one; the p-th of both have one shape.

        Args:
            weights: The weights, which must be left untouched.
            grads: The gradients, changed in place.
        """


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """List the parameters of an optimizer except those of frozen groups, which only lockstep's optimizers have."""
    groups = [group for group in optimizer.param_groups if not group.get("frozen", False)]
    return [weight for group in groups for weight in group["params"]]


@dataclass(frozen=True)
class _Penalty(GradientHook, ChangesOnlyGradients):
    """A hook that adds the gradient of a penalty on the weights, times a rate."""

    rate: float

    def __post_init__(self) -> None:
        check_number("rate", self.rate, least=0, finite=True)


class WeightDecay(_Penalty):
    """Add the gradient of half the squared norm of the weights, times a rate: g ← g + rate·w.

    Args:
        rate: The weight decay, at least 0.

    Raises:
        ValueError: If the rate is out of range.

    >>> weight = torch.nn.Parameter(torch.tensor([2.0]))
    >>> weight.grad = torch.tensor([1.0])
    >>> WeightDecay(0.25)(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([1.5000])
    """

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Add rate·w to each gradient."""
        add_scaled_(grads, weights, self.rate)


class Lasso(_Penalty):
    """Add the gradient of the sum of the weights' absolute values, times a rate: g ← g + rate·sign(w).

    Args:
        rate: The factor of the penalty, at least 0.

    Raises:
        ValueError: If the rate is out of range.

    >>> weight = torch.nn.Parameter(torch.tensor([2.0, 0.0, -2.0]))
    >>> weight.grad = torch.tensor([1.0, 1.0, 1.0])
    >>> Lasso(0.25)(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([1.2500, 1.0000, 0.7500])
    """

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Add rate·sign(w) to each gradient."""
        signs = list(torch._foreach_sign(weights))  # noqa: SLF001 - torch's multi-tensor kernels have no other name
        add_scaled_(grads, signs, self.rate)


@dataclass(frozen=True)
class GradientClipping(GradientHook, ChangesOnlyGradients):
    """Scale all gradients by one factor so that their total norm is at most a threshold.

    With the norm n of all gradients as one vector: g ← g · min(1, threshold/n). The direction does not change,
    and zeros stay zero. If the norm is not finite, every gradient becomes zero or NaN, which makes it visible.
    When added to one group (``add_hook(hook, group=0)``), it limits the norm of that group alone.

    Args:
        threshold: The largest norm, above 0.

    Raises:
        ValueError: If the threshold is out of range.

    Determinism: the order of summation depends on the shapes and their order, not on the number of
    threads (see `lockstep.optim.norm`). Nothing synchronizes with the device.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> GradientClipping(2.5)(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([1.5000, 2.0000])
    """

    threshold: float

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, above=0)

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:  # noqa: ARG002 - gradients alone decide
        """Scale all gradients by the same factor."""
        # Kept on the device: reading the norm on the host would wait for the whole backward.
        rate = (self.threshold / global_norm(grads)).clamp(max=1)
        for device in {grad.device for grad in grads}:
            torch._foreach_mul_([grad for grad in grads if grad.device == device], rate.to(device))


@dataclass(frozen=True)
class GradientHardClipping(GradientHook, ChangesOnlyGradients):
    """Clamp every element of the gradients between two bounds: g ← min(max(g, lower), upper).

    Args:
        lower: The smallest value of an element.
        upper: The largest value of an element, at least ``lower``.

    Raises:
        ValueError: If ``lower`` is greater than ``upper``.

    >>> weight = torch.nn.Parameter(torch.zeros(3))
    >>> weight.grad = torch.tensor([-3.0, 0.5, 3.0])
    >>> GradientHardClipping(-1.0, 2.0)(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([-1.0000,  0.5000,  2.0000])
    """

    lower: float
    upper: float

    def __post_init__(self) -> None:
        if not self.lower <= self.upper:
            raise ValueError(f"`lower` must be at most `upper` ({self.upper}), got {self.lower}.")

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:  # noqa: ARG002 - gradients alone decide
        """Clamp each gradient."""
        torch._foreach_clamp_min_(grads, self.lower)
        torch._foreach_clamp_max_(grads, self.upper)


@dataclass(frozen=True)
class GradientLARS(GradientHook, ChangesOnlyGradients):
    """Scale the gradient of each parameter so that its step is proportional to the norm of the parameter.

    With ‖·‖ the Euclidean norm of one parameter or its gradient, λ the weight decay and c the coefficient::

        r = c·‖w‖ / (ε + ‖g‖ + λ·‖w‖)   where ‖w‖ > threshold, else 1
        g ← r·(g + λ·w)

    With a bound b on the elements, g in the last line is min(max(g, -b), b): the norm is that before the clipping, as
    in MXNet's lars. To clip before the norm, add `GradientHardClipping` before this hook.

    With c = 1, the learning rate is the fraction of its own norm that a parameter moves in a step. Combined with
    `MomentumSGD`, this is the complete optimizer of the paper, where c is called the trust coefficient.

    Args:
        threshold: The norm up to which a parameter keeps its unscaled gradient, at least 0.
        weight_decay: The weight decay λ, at least 0.
        eps: The number ε that is added to the denominator, above 0.
        coefficient: The trust coefficient c, above 0.
        clip: The bound b, above 0; None for none.

    Raises:
        ValueError: If a number is out of range.

    Determinism: the order of summation depends on the shapes (see `lockstep.optim.norm`). Nothing
    synchronizes with the device.

    References: You, Gitman, Ginsburg, "Large Batch Training of Convolutional Networks", 2017,
    arXiv:1708.03888, section 4 and algorithm 1.

    >>> weight = torch.nn.Parameter(torch.tensor([6.0, 8.0]))
    >>> weight.grad = torch.tensor([0.0, 5.0])
    >>> GradientLARS()(torch.optim.SGD([weight]))
    >>> weight.grad
    tensor([ 0., 10.])
    """

    threshold: float = 1e-2
    weight_decay: float = 0.0
    eps: float = 1e-9
    coefficient: float = 1.0
    clip: float | None = None

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, least=0, finite=True)
        check_number("weight_decay", self.weight_decay, least=0, finite=True)
        check_number("eps", self.eps, above=0)
        check_number("coefficient", self.coefficient, above=0, finite=True)
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"`clip` must be above 0 or None, got {self.clip}.")

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Clip each gradient, add the weight decay, and scale the sum."""
        rates = [
            torch.where(
                weight_norm > self.threshold,
                self.coefficient * weight_norm / (self.eps + grad_norm + self.weight_decay * weight_norm),
                1.0,
            )
            for weight_norm, grad_norm in zip(norms(weights), norms(grads), strict=True)
        ]
        # After the norms: ‖g‖ in the rule is that of the gradient without clipping and decay.
        if self.clip is not None:
            torch._foreach_clamp_min_(grads, -self.clip)
            torch._foreach_clamp_max_(grads, self.clip)
        if self.weight_decay != 0:
            add_scaled_(grads, weights, self.weight_decay)
        for grad, rate in zip(grads, rates, strict=True):
            grad.mul_(rate)


_NUM_WORDS = 2**32


class GradientNoise(GradientHook):
    """Add normal noise with decreasing variance to every element of the gradients.

    In call t, counted from 0: g ← g + N(0, σ²) with σ² = eta / (1 + t)^0.55.

    The noise has its own random stream, keyed by (seed, t): nothing is drawn from torch's default generators,
    and a hook that resumes from (seed, t) continues with the same noise.

    Args:
        eta: The variance in the first call, at least 0.
        seed: The seed of the random stream, in 0..2**32 - 1.

    Raises:
        ValueError: If a number is out of range.

    Attributes:
        t: The number of calls so far.

    Determinism: drawn on the CPU, one parameter after another, and then moved, so that the bits do not depend
    on the device.

    References: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks",
    2015, arXiv:1511.06807, section 3.

    >>> weight = torch.nn.Parameter(torch.zeros(10000))
    >>> weight.grad = torch.zeros(10000)
    >>> noise = GradientNoise(eta=0.01, seed=7)
    >>> noise(torch.optim.SGD([weight]))
    >>> round(weight.grad.std().item(), 2), noise.t
    (0.1, 1)
    """

    def __init__(self, eta: float, seed: int = 0) -> None:
        check_number("eta", eta, least=0, finite=True)
        check_integer("seed", seed)
        if not 0 <= seed < _NUM_WORDS:
            raise ValueError(f"`seed` must lie in 0..2**32 - 1, got {seed}.")
        self.eta = eta
        self.seed = seed
        self.t = 0

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:  # noqa: ARG002 - gradients alone decide
        """Add the noise of call t, and count the call."""
        generator = torch.Generator().manual_seed(stream_seed(self.seed, self.t))
        deviation = math.sqrt(self.eta / (1 + self.t) ** 0.55)
        for grad in grads:
            # On the CPU, because generators of other devices draw other numbers for the same seed.
            noise = torch.randn(grad.shape, dtype=grad.dtype, generator=generator)
            grad.add_(noise.to(grad.device), alpha=deviation)
        # Last, so that a call that raised is repeated with the same noise.
        self.t += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the random stream."""
        return {"seed": self.seed, "t": self.t}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position in the random stream.

        Raises:
            StateError: If the state does not hold exactly a seed and a count.
        """
        check_keys(state_dict, ("seed", "t"), of="GradientNoise")
        self.seed, self.t = state_dict["seed"], state_dict["t"]


def stream_seed(seed: int, t: int) -> int:
    """Return the seed for call t of a stream, with 32 bits, which is all that a CPU generator uses.

    For a fixed seed, each operation maps the 32-bit words one to one, so that 2**32 calls have different seeds.
    The multiplications keep neighboring seeds and calls from yielding the same sequences, shifted.

    >>> len({stream_seed(7, t) for t in range(1000)} | {stream_seed(8, t) for t in range(1000)})
    2000
    """
    word = _mix((t + _mix(seed)) % _NUM_WORDS)
    return _mix(word ^ seed)


def _mix(word: int) -> int:
    """Mix the bits of a 32-bit word; one to one, because xor-shifts and odd factors can be inverted.

    The shifts and factors are those of the least biased such function that Wellons found ("Prospecting
    for hash functions", 2018, there named lowbias32).
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ (word >> shift)) * factor % _NUM_WORDS
    return word ^ (word >> 16)
