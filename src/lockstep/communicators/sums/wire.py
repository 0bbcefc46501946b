"""How elements look between two ranks, as they are or in fewer bits, and memory for what is on its way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import torch

ALIGNMENT: Final = 64
"""Bytes. Every tensor begins at a multiple, where kernels are fastest and any element fits."""
COMPRESSED: Final = (torch.float32, torch.float64)
"""What formats of fewer bits apply to."""
LARGEST_EXPONENT: Final = 15
"""A message's numbers lie below 2 to this power in float16, which ends just below 2¹⁶."""
SCALE_LENGTH: Final = 2
"""Elements of float16 that hold a message's scale, which is a float32."""


class ScratchBuffer:
    """Hands out flat tensors from one block of memory until it is cleared.

    New memory for what is on its way would cost as much as the copy into it.

    Args:
        device: Where the memory lies.

    >>> arena = ScratchBuffer(torch.device("cpu"))
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


class WireFormat(ABC):
    """A format for flat tensors on their way."""

    @abstractmethod
    def encode(self, tensor: torch.Tensor, arena: ScratchBuffer) -> torch.Tensor:
        """Give the message that says what a tensor holds; it may be the tensor itself.

        Args:
            tensor: Flat, and left as it is.
            arena: Memory for a message that is not.
        """

    @abstractmethod
    def room(self, target: torch.Tensor, arena: ScratchBuffer) -> torch.Tensor:
        """Give a tensor in which a message for `target` can arrive; it may be the target itself."""

    @abstractmethod
    def decode(self, message: torch.Tensor, target: torch.Tensor) -> None:
        """Write what a message says to its target."""


class PlainFormat(WireFormat):
    """Every bit as it is; messages are the tensors themselves."""

    def encode(self, tensor: torch.Tensor, arena: ScratchBuffer) -> torch.Tensor:
        """Give the tensor itself."""
        del arena
        return tensor

    def room(self, target: torch.Tensor, arena: ScratchBuffer) -> torch.Tensor:
        """Give the target itself."""
        del arena
        return target

    def decode(self, message: torch.Tensor, target: torch.Tensor) -> None:
        """Do nothing: the message has arrived where it belongs."""


class _HalfFormat(WireFormat):
    """Floats of 32 and 64 bits in 16; everything else as it is."""

    dtype: torch.dtype
    prefix = 0
    """Elements of a message before its numbers."""

    def encode(self, tensor: torch.Tensor, arena: ScratchBuffer) -> torch.Tensor:
        """Round a tensor into a message of its own."""
        message = self.room(tensor, arena)
        if message is not tensor:
            self._round(tensor, message)
        return message

    def room(self, target: torch.Tensor, arena: ScratchBuffer) -> torch.Tensor:
        """Give room for half as much, or the target where it is not compressed."""
        if target.dtype not in COMPRESSED:
            return target
        return arena.take(self.prefix + target.numel(), self.dtype)

    def decode(self, message: torch.Tensor, target: torch.Tensor) -> None:
        """Write rounded numbers to a target."""
        if message is not target:
            self._restore(message, target)

    def _round(self, tensor: torch.Tensor, message: torch.Tensor) -> None:
        message.copy_(tensor)

    def _restore(self, message: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(message)


class BFloat16Format(_HalfFormat):
    """Numbers rounded to bfloat16: the range of float32, a relative error of at most 2⁻⁸ each time."""

    dtype = torch.bfloat16


class Float16Format(_HalfFormat):
    """Numbers times a power of two, rounded to float16: a relative error of at most 2⁻¹¹ each time.

    The power of two stands before the numbers of each message and brings the largest of them to 2¹⁴..2¹⁵.
    Those smaller than 2⁻²⁸ of it lose further bits, to an absolute error of 2⁻³⁹ of it. Where one is not
    finite the power is 1, and what is not finite arrives so.
    """

    dtype = torch.float16
    prefix = SCALE_LENGTH

    def _round(self, tensor: torch.Tensor, message: torch.Tensor) -> None:
        # All of it on the tensor's device, which nobody waits for.
        peak = torch.linalg.vector_norm(tensor, torch.inf).float()
        exponent = torch.frexp(peak).exponent
        wanted = torch.where(peak.isfinite() & (peak > 0), LARGEST_EXPONENT - exponent, 0)
        scale = torch.ldexp(torch.ones_like(peak), wanted.clamp(-126, 126))
        message[:SCALE_LENGTH].view(torch.float32).copy_(scale)
        message[SCALE_LENGTH:].copy_(tensor * scale.to(tensor.dtype))

    def _restore(self, message: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(message[SCALE_LENGTH:])
        target.div_(message[:SCALE_LENGTH].view(torch.float32).to(target.dtype))


def wire_format(compression: str | None) -> WireFormat:
    """Give the format of this name.

    Raises:
        ValueError: There is none.
    """
    formats: dict[str | None, Callable[[], WireFormat]] = {
        None: PlainFormat,
        "bf16": BFloat16Format,
        "fp16": Float16Format,
    }
    if compression not in formats:
        raise ValueError(f"`compression` must be None, 'bf16' or 'fp16', got {compression!r}.")
    return formats[compression]()
