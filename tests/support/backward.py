"""Do something in the middle of a backward."""

from __future__ import annotations

from collections.abc import Callable

import torch


def in_backward(value: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor | None]) -> torch.Tensor:
    """Hand a value through, and its gradient through a function, which may raise, or leave it as it is."""
    handed = value.clone()
    handed.register_hook(change)
    return handed
