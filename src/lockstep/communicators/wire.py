"""How elements look between two ranks: as they are, or in fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import torch

from lockstep.communicators.arena import Arena

COMPRESSED: Final = (torch.float32, torch.float64)
"""What formats of fewer bits apply to."""
LARGEST_EXPONENT: Final = 15
"""A message's numbers lie below 2 to this power in float16, which ends just below 2¹⁶."""
SCALE_LENGTH: Final = 2
"""Elements of float16 that hold a message's scale, which is a float32."""


class WireFormat(ABC):
    """A format for flat tensors on their way."""

    @abstractmethod
    def encode(self, tensor: torch.Tensor, arena: Arena) -> torch.Tensor:
        """Give the message that says what a tensor holds; it may be the tensor itself.

        Args:
            tensor: Flat, and left as it is.
            arena: Memory for a message that is not.
        """

    @abstractmethod
    def room(self, target: torch.Tensor, arena: Arena) -> torch.Tensor:
        """Give a tensor in which a message for `target` can arrive; it may be the target itself."""

    @abstractmethod
    def decode(self, message: torch.Tensor, target: torch.Tensor) -> None:
        """Write what a message says to its target."""


class PlainFormat(WireFormat):
    """Every bit as it is; messages are the tensors themselves."""

    def encode(self, tensor: torch.Tensor, arena: Arena) -> torch.Tensor:
        """Give the tensor itself."""
        del arena
        return tensor

    def room(self, target: torch.Tensor, arena: Arena) -> torch.Tensor:
        """Give the target itself."""
        del arena
        return target

    def decode(self, message: torch.Tensor, target: torch.Tensor) -> None:
        """Do nothing: the message has arrived where it belongs."""


class _HalfFormat(WireFormat):
    """Floats of 32 and 64 bits in 16; everything else as it is."""

    def encode(self, tensor: torch.Tensor, arena: Arena) -> torch.Tensor:
        """Round a tensor into a message of its own."""
        message = self.room(tensor, arena)
        if message is not tensor:
            self._round(tensor, message)
        return message

    def room(self, target: torch.Tensor, arena: Arena) -> torch.Tensor:
        """Give room for half as much, or the target where it is not compressed."""
        if target.dtype not in COMPRESSED:
            return target
        return arena.take(self._length(target.numel()), self._dtype())

    def decode(self, message: torch.Tensor, target: torch.Tensor) -> None:
        """Write rounded numbers to a target."""
        if message is not target:
            self._restore(message, target)

    @abstractmethod
    def _dtype(self) -> torch.dtype: ...

    @abstractmethod
    def _length(self, size: int) -> int:
        """Give the elements of a message that carries so many numbers."""

    @abstractmethod
    def _round(self, tensor: torch.Tensor, message: torch.Tensor) -> None: ...

    @abstractmethod
    def _restore(self, message: torch.Tensor, target: torch.Tensor) -> None: ...


class BFloat16Format(_HalfFormat):
    """Numbers rounded to bfloat16: the range of float32, a relative error of at most 2⁻⁸ each time."""

    def _dtype(self) -> torch.dtype:
        return torch.bfloat16

    def _length(self, size: int) -> int:
        return size

    def _round(self, tensor: torch.Tensor, message: torch.Tensor) -> None:
        message.copy_(tensor)

    def _restore(self, message: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(message)


class Float16Format(_HalfFormat):
    """Numbers times a power of two, rounded to float16: a relative error of at most 2⁻¹¹ each time.

    The power of two stands before the numbers of each message and brings the largest of them to 2¹⁴..2¹⁵.
    Those smaller than 2⁻²⁸ of it lose further bits, to an absolute error of 2⁻³⁹ of it. Where one is not
    finite the power is 1, and what is not finite arrives so.
    """

    def _dtype(self) -> torch.dtype:
        return torch.float16

    def _length(self, size: int) -> int:
        return SCALE_LENGTH + size

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
