"""Read what the caller gives as gradients of a model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep import nest
from lockstep.replicas.gather import Outputs
from lockstep.tree import Tensors


@dataclass(frozen=True, slots=True)
class _Output:
    """Stands for an output, by its number."""

    index: int


def read_output_grads(outputs: Outputs, merged: list[torch.Tensor], given: Any) -> Tensors:
    """Give one gradient for each output, in its dtype; None where nothing flows back.

    Args:
        outputs: Of the forward.
        merged: The outputs put together.
        given: None where the model returned a loss: one floating-point output without dimensions, whose
            gradient is 1. Else the containers that the model returned with a gradient, or None, in the place
            of each output; keys of dicts may be left out.

    Raises:
        TypeError: Something else than a tensor stands for an output.
        ValueError: None was given where there is no loss or more than one, or what was given has other
            containers or shapes than the outputs.
    """
    if given is None:
        return _of_the_loss(outputs, merged)
    if isinstance(given, torch.Tensor) and isinstance(outputs.shards[0].returned, torch.Tensor):
        return [_checked(given, outputs.names[0], merged[0])]
    returned = outputs.nest([_Output(index) for index in range(len(merged))])
    if isinstance(returned, _Output) and isinstance(given, tuple | list):
        returned = [returned]
    grads: Tensors = [None] * len(merged)
    for index, grad in _pairs(returned, given):
        grads[index] = _checked(grad, outputs.names[index], merged[index])
    return grads


def _checked(grad: Any, name: str, output: torch.Tensor) -> torch.Tensor:
    """Give what stands for the gradient of one output in that one's dtype."""
    if not isinstance(grad, torch.Tensor):
        raise TypeError(f"`output_grads` must hold a tensor for {name!r}, got a {type(grad).__name__}.")
    if grad.shape != output.shape:
        raise ValueError(
            f"`output_grads` must have the shape {tuple(output.shape)} for {name!r}, got {tuple(grad.shape)}."
        )
    return grad.detach().to(output.dtype)


def _of_the_loss(outputs: Outputs, merged: list[torch.Tensor]) -> Tensors:
    """Let the gradient of the only loss be 1."""
    scalars = [index for index, each in enumerate(merged) if each.dim() == 0 and each.is_floating_point()]
    if len(scalars) > 1:
        shards = [each.tensors for each in outputs.shards]
        scalars = [index for index in scalars if any(tensors[index].requires_grad for tensors in shards)]
    if len(scalars) != 1:
        found = ", ".join(f"{name}: {tuple(each.shape)}" for name, each in zip(outputs.names, merged, strict=True))
        raise ValueError(
            "`output_grads` must be given unless the model returns one loss, a floating-point number without "
            f"dimensions; got outputs of shapes {found}."
        )
    return [torch.ones_like(each) if index in scalars else None for index, each in enumerate(merged)]


def _pairs(returned: Any, given: Any) -> list[tuple[int, Any]]:
    """Pair the numbers of outputs with what was given for them."""
    if given is None:
        return []
    if isinstance(returned, _Output):
        return [(returned.index, given)]
    if isinstance(returned, Mapping):
        if not isinstance(given, Mapping) or given.keys() - returned.keys():
            raise ValueError(f"`output_grads` must have the keys of the output, {list(returned)}, got {_kind(given)}.")
        return [pair for key, part in given.items() for pair in _pairs(returned[key], part)]
    if nest.is_record(returned):
        parts = nest.record_parts(given) if nest.is_record(given) else given
        return _pairs(nest.record_parts(returned), parts)
    if isinstance(returned, tuple | list):
        if not isinstance(given, tuple | list) or len(given) != len(returned):
            raise ValueError(
                f"`output_grads` must hold {len(returned)} gradients, as the output does, got {_kind(given)}."
            )
        return [pair for parts in zip(returned, given, strict=True) for pair in _pairs(*parts)]
    return []


def _kind(given: Any) -> str:
    """Describe what was given in the place of a container."""
    if isinstance(given, Mapping):
        return str(list(given))
    if isinstance(given, tuple | list):
        return str(len(given))
    return f"a {type(given).__name__}"
