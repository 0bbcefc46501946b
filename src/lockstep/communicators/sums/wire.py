"""Formats in which elements are sent between ranks, exact or compressed."""

from __future__ import annotations

from typing import Final

import torch

COMPRESSED_DTYPES: Final = (torch.float32, torch.float64)
"""The dtypes that compressed formats apply to; tensors of other dtypes are sent as they are."""
LARGEST_EXPONENT: Final = 15
"""The numbers of a float16 message are below 2 to this power. The largest float16 is just below 2¹⁶."""
SCALE_LENGTH: Final = 2
"""The number of float16 elements that hold the scale of a message, which is a float32."""


class WireFormat:
    """The format in which flat tensors are sent; as it is, exact: every message is the tensor itself."""

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the message for a tensor, which may be the tensor itself.

        Args:
            tensor: The flat tensor to send. It is not changed.
        """
        return tensor

    def receive_buffer(self, target: torch.Tensor) -> torch.Tensor:
        """Return a tensor into which the message for a tensor can be received, which may be the tensor itself.

        Args:
            target: The flat tensor that the message is decoded into afterwards.
        """
        return target

    def decode(self, message: torch.Tensor, target: torch.Tensor) -> None:
        """Write the elements in a message to a tensor, unless they were received into it.

        Args:
            message: The message as `encode` returned it on the rank that sent it.
            target: The flat tensor to write to.
        """


EXACT: Final = WireFormat()
"""The exact format."""


class _HalfFormat(WireFormat):
    """A format that sends float32 and float64 in 16 bits, and all other dtypes as they are."""

    dtype: torch.dtype
    prefix = 0
    """The number of elements of a message before its numbers."""

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a message with the rounded elements."""
        message = self.receive_buffer(tensor)
        if message is not tensor:
            self._round(tensor, message)
        return message

    def receive_buffer(self, target: torch.Tensor) -> torch.Tensor:
        """Return memory for a compressed message, or the target if its dtype is not compressed."""
        if target.dtype not in COMPRESSED_DTYPES:
            return target
        return target.new_empty(self.prefix + target.numel(), dtype=self.dtype)

    def decode(self, message: torch.Tensor, target: torch.Tensor) -> None:
        """Write the rounded elements to the target."""
        if message is not target:
            self._restore(message, target)

    def _round(self, tensor: torch.Tensor, message: torch.Tensor) -> None:
        message.copy_(tensor)

    def _restore(self, message: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(message)


class BFloat16Format(_HalfFormat):
    """A format that rounds to bfloat16: the range of float32, with a relative error of at most 2⁻⁸ per message."""

    dtype = torch.bfloat16


class Float16Format(_HalfFormat):
    """A format that scales by a power of two and rounds to float16: a relative error of at most 2⁻¹¹ per message.

    The power of two precedes the numbers of each message, and brings the largest of them to 2¹⁴..2¹⁵. Numbers
    below 2⁻²⁸ times the largest lose further bits, with an absolute error of up to 2⁻³⁹ times the largest. If a
    number is not finite, the power is 1, and infinities and NaNs arrive as such.
    """

    dtype = torch.float16
    prefix = SCALE_LENGTH

    def _round(self, tensor: torch.Tensor, message: torch.Tensor) -> None:
        # The scale stays a tensor on the device: reading it on the host would wait for the device.
        peak = torch.linalg.vector_norm(tensor, torch.inf).float()
        exponent = torch.frexp(peak).exponent
        wanted = torch.where(peak.isfinite() & (peak > 0), LARGEST_EXPONENT - exponent, 0)
        # A power of two scales without rounding as long as nothing underflows. Within these bounds it is a normal
        # float32.
        scale = torch.ldexp(torch.ones_like(peak), wanted.clamp(-126, 126))
        message[:SCALE_LENGTH].view(torch.float32).copy_(scale)
        message[SCALE_LENGTH:].copy_(tensor * scale.to(tensor.dtype))

    def _restore(self, message: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(message[SCALE_LENGTH:])
        target.div_(message[:SCALE_LENGTH].view(torch.float32).to(target.dtype))


def wire_format(compression: str | None) -> WireFormat:
    """Return the format with this name.

    Args:
        compression: None for the exact format, "bf16" or "fp16".

    Raises:
        ValueError: If there is no format with this name.
    """
    formats = {None: EXACT, "bf16": BFloat16Format(), "fp16": Float16Format()}
    if compression not in formats:
        raise ValueError(f"`compression` must be None, 'bf16' or 'fp16', got {compression!r}.")
    return formats[compression]
