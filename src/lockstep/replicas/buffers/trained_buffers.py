"""Find the buffers of a model that require a gradient."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.replicas.buffers.buffer_refs import BufferRef, buffer_refs


@dataclass(frozen=True, slots=True)
class TrainedBuffer:
    """A buffer that requires a gradient.

    Attributes:
        index: Its number among the model's `buffer_refs`.
        name: Its first name in the model.
        tensor: The model's own.
    """

    index: int
    name: str
    tensor: torch.Tensor


def trained_buffers(
    model: nn.Module, slots: Sequence[BufferRef] | None = None, *, frozen: Collection[str] = ()
) -> list[TrainedBuffer]:
    """Return the buffers of a model that require a gradient now.

    Args:
        model: Its buffers are only looked at.
        slots: Its `buffer_refs`, if they are known.
        frozen: Names of buffers to leave out.
    """
    tensors = [slot.get() for slot in (buffer_refs(model) if slots is None else slots)]
    if not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return []
    return [
        TrainedBuffer(index, name, tensor)
        for index, (name, tensor) in enumerate(model.named_buffers())
        if tensor.requires_grad and name not in frozen
    ]


def refuse_computed_buffers(model: nn.Module) -> None:
    """Refuse buffers with a graph behind them, where gradients end at the buffers.

    Raises:
        ValueError: A buffer that requires a gradient was computed from other tensors.
    """
    for buffer in trained_buffers(model):
        if not buffer.tensor.is_leaf:
            raise ValueError(
                "`model` must have leaf tensors as buffers where they require gradients, got "
                f"{buffer.name!r}, which was computed from other tensors: their gradients would be lost. "
                "Compute it in forward, or register it detached."
            )


def refuse_trained_buffers(model: nn.Module, slots: Sequence[BufferRef] | None = None) -> None:
    """Refuse buffers that require a gradient, where only parameters are trained.

    Args:
        model: Its buffers are only looked at.
        slots: Its `buffer_refs`, if they are known.

    Raises:
        ValueError: There is one.
    """
    for buffer in trained_buffers(model, slots):
        raise ValueError(
            f"`model` must have no buffers that require gradients, got {buffer.name!r}. Register it as an "
            "nn.Parameter where it shall be trained, else call requires_grad_(False) on it."
        )
