"""Formats in which elements are sent between ranks, exact or compressed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

COMPRESSED_DTYPES: Final = (torch.float32, torch.float64)
"""The dtypes that compressed formats apply to; tensors of other dtypes are sent as they are."""
LARGEST_EXPONENT: Final = 15
"""The numbers of a float16 message are below 2 to this power. The largest float16 is just below 2¹⁶."""


@dataclass(frozen=True)
class WireFormat:
    """The format in which flat tensors are sent.

    Without a dtype it is exact: every message is the tensor itself. With one, float32 and float64 are sent in 16 bits,
    and all other dtypes as they are.

    bfloat16 has the range of float32, and a relative error of at most 2⁻⁸ per message. For float16, a power of two
    precedes the numbers of each message and brings the largest of them to 2¹⁴..2¹⁵: the relative error is at most 2⁻¹¹
    per message. Numbers below 2⁻²⁸ times the largest lose further bits, with an absolute error of up to 2⁻³⁹ times the
    largest. If a number is not finite, the power is 1, and infinities and NaNs arrive as such.

    Attributes:
        dtype: That of compressed messages; None for none.
        scale_length: The number of elements of a message before its numbers.
    """

    dtype: torch.dtype | None = None
    scale_length: int = 0

    def encode(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the message for a tensor, which may be the tensor itself.

        Args:
            tensor: The flat tensor to send. It is not changed.
        """
        message = self.receive_buffer(tensor)
        if message is tensor:
            return message
        if self.scale_length:
            scale = _scale_of(tensor)
            message[: self.scale_length].view(torch.float32).copy_(scale)
            tensor = tensor * scale.to(tensor.dtype)
        message[self.scale_length :].copy_(tensor)
        return message

    def receive_buffer(self, target: torch.Tensor) -> torch.Tensor:
        """Return a tensor into which the message for a tensor can be received, which may be the tensor itself.

        Args:
            target: The flat tensor that the message is decoded into afterwards.
        """
        if self.dtype is None or target.dtype not in COMPRESSED_DTYPES:
            return target
        return target.new_empty(self.scale_length + target.numel(), dtype=self.dtype)

    def decode(self, message: torch.Tensor, target: torch.Tensor) -> None:
        """Write the elements in a message to a tensor, unless they were received into it.

        Args:
            message: The message as `encode` returned it on the rank that sent it.
            target: The flat tensor to write to.
        """
        if message is not target:
            target.copy_(message[self.scale_length :])
            if self.scale_length:
                target.div_(message[: self.scale_length].view(torch.float32).to(target.dtype))


def _scale_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the power of two of a float16 message."""
    # The scale stays a tensor on the device: reading it on the host would wait for the device.
    peak = torch.linalg.vector_norm(tensor, torch.inf).float()
    exponent = torch.frexp(peak).exponent
    wanted = torch.where(peak.isfinite() & (peak > 0), LARGEST_EXPONENT - exponent, 0)
    # A power of two scales without rounding as long as nothing underflows. Within these bounds it is a normal float32.
    return torch.ldexp(torch.ones_like(peak), wanted.clamp(-126, 126))


EXACT: Final = WireFormat()
"""The exact format."""
BFLOAT16: Final = WireFormat(torch.bfloat16)
FLOAT16: Final = WireFormat(torch.float16, scale_length=2)
"""The scale of a message, which is a float32, takes two elements."""


def wire_format(compression: str | None) -> WireFormat:
    """Return the format with this name.

    Args:
        compression: None for the exact format, "bf16" or "fp16".

    Raises:
        ValueError: If there is no format with this name.
    """
    formats = {None: EXACT, "bf16": BFLOAT16, "fp16": FLOAT16}
    if compression not in formats:
        raise ValueError(f"`compression` must be None, 'bf16' or 'fp16', got {compression!r}.")
    return formats[compression]
