"""MXNet's compression of gradients to two bits, with what was lost kept for the next time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(eq=False)
class TwoBits:
    """Send of a gradient only its elements beyond a threshold, as that threshold.

    With gradient g, residual r, threshold t and what is sent s, element by element::

        r ← r + g
        s = t where r ≥ t, -t where r ≤ -t, else 0
        r ← r - s

    Args:
        threshold: t, above 0.

    Attributes:
        residuals: The r of each sender, zeros before its first gradient.

    Raises:
        ValueError: The threshold is out of range.

    References: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech
    2015, for the threshold and the residual.

    >>> compression = TwoBits(0.5)
    >>> [compression.sent("w", torch.tensor([0.3])).item() for _ in range(4)]
    [0.0, 0.5, 0.0, 0.5]
    """

    threshold: float = 0.5
    residuals: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.threshold < math.inf:
            raise ValueError(f"`threshold` must be finite and above 0, got {self.threshold}.")

    def sent(self, sender: str, gradient: torch.Tensor) -> torch.Tensor:
        """Give what arrives of a gradient.

        Args:
            sender: Whose residual it is.
            gradient: Left as it is.
        """
        residual = self.residuals.setdefault(sender, torch.zeros_like(gradient)).add_(gradient)
        above, below = residual >= self.threshold, residual <= -self.threshold
        sent = (above.to(residual.dtype) - below.to(residual.dtype)) * self.threshold
        residual.sub_(sent)
        return sent

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Give the residuals."""
        return {sender: residual.clone() for sender, residual in self.residuals.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from saved residuals, whoever's they are: one is made when its sender first sends."""
        self.residuals = {sender: residual.clone() for sender, residual in state.items()}
