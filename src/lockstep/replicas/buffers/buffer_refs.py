"""Where the modules of a model keep their buffers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class BufferRef:
    """Where a module keeps a buffer; a forward may put another tensor there."""

    module: nn.Module
    name: str

    def get(self) -> torch.Tensor | None:
        """Give the tensor that is there now."""
        return self.module._buffers[self.name]

    def put(self, tensor: torch.Tensor | None) -> None:
        """Put a tensor there, or none."""
        self.module._buffers[self.name] = tensor


def buffer_refs(model: nn.Module) -> list[BufferRef]:
    """List a model's buffers, each tensor once, in an order that its copies share."""
    slots: dict[int, BufferRef] = {}
    for slot in all_buffer_refs(model):
        buffer = slot.get()
        if buffer is not None:
            slots.setdefault(id(buffer), slot)
    return list(slots.values())


def all_buffer_refs(model: nn.Module) -> list[BufferRef]:
    """List every name under which a module keeps a buffer, or none as yet."""
    return [BufferRef(module, name) for module in model.modules() for name in module._buffers]
