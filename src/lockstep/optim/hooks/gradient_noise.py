"""Add normal noise whose variance decreases during training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import StateError
from lockstep.optim.hooks.gradient_hook import GradientHook

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
        if not 0 <= eta < math.inf:
            raise ValueError(f"`eta` must be finite and at least 0, got {eta}.")
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
        if state_dict.keys() != {"seed", "t"}:
            raise StateError(f"The state of GradientNoise must hold ['seed', 't'], got {sorted(state_dict)}.")
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
