"""Find the buffers of a model that require a gradient."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from lockstep.replicas.buffers.buffer_refs import BufferRef, buffer_refs


def trained_buffers(
    model: nn.Module, refs: Sequence[BufferRef] | None = None, *, frozen: Collection[str] = ()
) -> dict[int, tuple[str, torch.Tensor]]:
    """Return the buffers of a model that currently require a gradient: name and tensor by the index in `buffer_refs`.

    Args:
        model: The model. It is not modified.
        refs: The `buffer_refs` of the model, if they are known.
        frozen: The names of buffers to leave out.
    """
    tensors = [ref.get() for ref in (buffer_refs(model) if refs is None else refs)]
    # The usual case returns before the names are collected, which takes longer.
    if not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return {}
    return {
        index: (name, tensor)
        for index, (name, tensor) in enumerate(model.named_buffers())
        if tensor.requires_grad and name not in frozen
    }


def check_no_computed_buffers(model: nn.Module) -> None:
    """Check that buffers that require gradients are leaf tensors, because gradients end at the buffers.

    Args:
        model: The model. It is not modified.

    Raises:
        ValueError: If a buffer that requires a gradient was computed from other tensors.
    """
    for name, buffer in trained_buffers(model).values():
        if not buffer.is_leaf:
            raise ValueError(
                "`model` must have leaf tensors as buffers where they require gradients, got "
                f"{name!r}, which was computed from other tensors: their gradients would be lost. "
                "Compute it in forward, or register it detached."
            )


def check_no_trained_buffers(model: nn.Module, refs: Sequence[BufferRef] | None = None) -> None:
    """Check that no buffer requires a gradient, because only parameters are trained.

    Args:
        model: The model. It is not modified.
        refs: The `buffer_refs` of the model, if they are known.

    Raises:
        ValueError: If a buffer requires a gradient.
    """
    for name, _ in trained_buffers(model, refs).values():
        raise ValueError(
            f"`model` must have no buffers that require gradients, got {name!r}. Register it as an "
            "nn.Parameter to train it, or call requires_grad_(False) on it."
        )
