"""Memory for what is on its way, used again and again: new memory costs as much as the copy into it."""

from __future__ import annotations

import torch

ALIGNMENT = 64
"""Bytes. Every tensor begins at a multiple, where kernels are fastest and any element fits."""


class Arena:
    """Hands out flat tensors from one block of memory until it is cleared.

    Args:
        device: Where the memory lies.

    >>> arena = Arena(torch.device("cpu"))
    >>> arena.take(3, torch.float32).shape
    torch.Size([3])
    """

    def __init__(self, device: torch.device) -> None:
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._taken = 0

    def take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Give a tensor of so many elements, whose values are whatever lay there.

        A block that is too small is left to those who hold parts of it, and a longer one takes its place.
        """
        num_bytes = -(-size * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if self._taken + num_bytes > self._block.numel():
            self._block = self._block.new_empty(max(2 * self._block.numel(), num_bytes))
            self._taken = 0
        part = self._block[self._taken : self._taken + size * dtype.itemsize]
        self._taken += num_bytes
        return part.view(dtype)

    def clear(self) -> None:
        """Take everything back; what was given out must no longer be in use."""
        self._taken = 0
