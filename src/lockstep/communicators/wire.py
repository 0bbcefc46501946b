"""How elements look between two ranks: as they are, or in fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from lockstep.communicators.arena import Arena


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
