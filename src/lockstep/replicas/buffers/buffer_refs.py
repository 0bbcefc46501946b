"""References to the buffers of modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class BufferRef:
    """A reference to a buffer of a module, by name, because a forward may assign another tensor to that name.

    Attributes:
        module: The module.
        name: The name of the buffer in the module.
    """

    module: nn.Module
    name: str

    def get(self) -> torch.Tensor | None:
        """Return the tensor that the module has now."""
        return self.module._buffers[self.name]

    def set(self, tensor: torch.Tensor | None) -> None:
        """Assign a tensor, or None, to the name.

        Args:
            tensor: The new tensor.
        """
        self.module._buffers[self.name] = tensor


def buffer_refs(model: nn.Module) -> list[BufferRef]:
    """List the buffers of a model, each tensor once, in an order that is the same for copies of the model.

    Args:
        model: The model.
    """
    refs: dict[int, BufferRef] = {}
    for ref in all_buffer_refs(model):
        buffer = ref.get()
        if buffer is not None:
            refs.setdefault(id(buffer), ref)
    return list(refs.values())


def all_buffer_refs(model: nn.Module) -> list[BufferRef]:
    """List every name under which a module has a buffer, including names that are None.

    Args:
        model: The model.
    """
    return [BufferRef(module, name) for module in model.modules() for name in module._buffers]
