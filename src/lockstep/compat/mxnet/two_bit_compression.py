"""MXNet's compression of gradients to two bits per element, with error feedback."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class TwoBitCompression:
    """Compress a gradient to the elements beyond a threshold, each sent as plus or minus the threshold.

    With gradient g, residual r, threshold t and the sent value s, elementwise::

        r ← r + g
        s = t where r ≥ t, -t where r ≤ -t, else 0
        r ← r - s

    Args:
        threshold: The threshold t, above 0.

    Attributes:
        residuals: The residual r of each sender, zeros before its first gradient.

    Raises:
        ValueError: If the threshold is out of range.

    References: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech
    2015, for the threshold and the residual.

    >>> compression = TwoBitCompression(0.5)
    >>> [compression.compress("w", torch.tensor([0.3])).item() for _ in range(4)]
    [0.0, 0.5, 0.0, 0.5]
    """

    threshold: float = 0.5
    residuals: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"`threshold` must be finite and above 0, got {self.threshold}.")

    def compress(self, sender: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return the values that the receiver gets for a gradient, and keep the rest in the residual.

        Args:
            sender: The name of the sender, which has its own residual.
            gradient: The gradient; left untouched.
        """
        residual = self.residuals.setdefault(sender, torch.zeros_like(gradient)).add_(gradient)
        above, below = residual >= self.threshold, residual <= -self.threshold
        sent = (above.to(residual.dtype) - below.to(residual.dtype)) * self.threshold
        residual.sub_(sent)
        return sent

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residuals."""
        return {sender: residual.clone() for sender, residual in self.residuals.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load saved residuals, of any senders: a residual is created when its sender sends first."""
        self.residuals = {sender: residual.clone() for sender, residual in state.items()}
