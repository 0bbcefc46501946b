"""Add normal noise that fades as training goes on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import StateError
from lockstep.optim.hooks.gradient_hook import GradientHook

_WORD = 2**32


class GradientNoise(GradientHook):
    """Add normal noise to every element of the gradients, of a variance that fades.

    In call t, counted from 0: g ← g + N(0, σ²) with σ² = eta / (1 + t)^0.55.

    The noise comes from a stream of its own, keyed by (seed, t): nothing is drawn from torch's default
    generators, and a hook that goes on from (seed, t) goes on with the same noise.

    Args:
        eta: The variance in the first call, at least 0.
        seed: In 0..2**32 - 1.

    Raises:
        ValueError: A number is out of range.

    Attributes:
        t: How often it was called.

    Determinism: drawn on the CPU, parameter after parameter, and then moved, so that devices add the
    same bits.

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
        if not 0 <= eta < math.inf:
            raise ValueError(f"`eta` must be finite and at least 0, got {eta}.")
        if not 0 <= seed < _WORD:
            raise ValueError(f"`seed` must lie in 0..2**32 - 1, got {seed}.")
        self.eta = eta
        self.seed = seed
        self.t = 0

    def change_(self, weights: list[Tensor], grads: list[Tensor]) -> None:  # noqa: ARG002 - gradients alone decide
        """Add the noise of call t, and count it."""
        generator = torch.Generator().manual_seed(stream_seed(self.seed, self.t))
        deviation = math.sqrt(self.eta / (1 + self.t) ** 0.55)
        for grad in grads:
            noise = torch.randn(grad.shape, dtype=grad.dtype, generator=generator)
            grad.add_(noise.to(grad.device), alpha=deviation)
        self.t += 1

    def state_dict(self) -> dict[str, Any]:
        """Return where in its stream it is."""
        return {"seed": self.seed, "t": self.t}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            StateError: There is more or less than a seed and a count.
        """
        if state_dict.keys() != {"seed", "t"}:
            raise StateError(f"The state of GradientNoise must hold ['seed', 't'], got {sorted(state_dict)}.")
        self.seed, self.t = state_dict["seed"], state_dict["t"]


def stream_seed(seed: int, t: int) -> int:
    """Give call t of a stream a seed of 32 bits, which is all that a CPU generator reads.

    For a fixed seed each step maps the 32-bit words one to one, so that no two of 2**32 calls meet;
    the multiplications keep neighbouring seeds and calls from meeting in step.

    >>> len({stream_seed(7, t) for t in range(1000)} | {stream_seed(8, t) for t in range(1000)})
    2000
    """
    word = _mix((t + _mix(seed)) % _WORD)
    return _mix(word ^ seed)


def _mix(word: int) -> int:
    """Scatter the 32-bit words, one to one: xor-shifts and odd factors can be undone.

    The shifts and factors are those of the least biased such function that Wellons found ("Prospecting
    for hash functions", 2018, there named lowbias32).
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        word = (word ^ (word >> shift)) * factor % _WORD
    return word ^ (word >> 16)
