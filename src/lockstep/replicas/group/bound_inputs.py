"""The names and shapes that the inputs of a model must have, and checks of inputs against them.

Bound inputs are `Inputs` whose tensors lie on "meta", where they have a shape but no memory. Data comes before labels,
and is what a gradient may be wanted for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from lockstep.replicas.batch.inputs import BatchDim, Inputs, argument_of, read_inputs

Description: TypeAlias = "tuple[str, Sequence[int]]"
"""The name or path of an input, and its shape for the whole batch."""


def bound_inputs(
    data: Sequence[Description],
    labels: Sequence[Description] | None,
    batch_dim: BatchDim,
    before: Inputs | None = None,
) -> Inputs:
    """Return bound inputs.

    Args:
        data: The descriptions of the inputs.
        labels: The descriptions of the labels, or None.
        batch_dim: The dimension that counts samples, for all inputs or by name.
        before: The inputs that are bound so far, of which only shapes may change and labels may come or go, or None.

    Raises:
        TypeError: If a description is not a pair of a name and a shape.
        ValueError: If there is no data, a name occurs twice, a shape has a negative length or lacks the dimension that
            counts samples, the numbers of samples differ, or there is none; or if an input has another name or number
            of dimensions than before.
    """
    if not data:
        raise ValueError("`data` must describe at least one input, got none.")
    described = [_read_description(each, "data") for each in data]
    found = described + [_read_description(each, "labels") for each in labels or ()]
    names = [path for path, _ in found]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`data` and `labels` must name each input once, got {twice!r} twice.")
    if before is not None:
        _check_only_shapes_change(before, found, len(described))
    wanted = dict(described)
    return read_inputs((), {}, found, batch_dim, wanted=lambda path, _: path in wanted)


def _read_description(description: Description, argument: str) -> tuple[str, torch.Tensor]:
    """Return the name of one description, and a tensor of its shape."""
    try:
        name, shape = description
        sizes = tuple(shape)
    except (TypeError, ValueError):
        name, sizes = None, ()
    # `type(size) is int` also rejects booleans.
    if not isinstance(name, str) or not all(type(size) is int for size in sizes):
        raise TypeError(f"`{argument}` must hold pairs of a name and a shape, got {description!r}.")
    if min(sizes, default=0) < 0:
        raise ValueError(f"`{argument}` must hold lengths of at least 0, got {sizes} for {name!r}.")
    return name, torch.empty(sizes, device="meta")


def data_and_labels(bound: Inputs) -> tuple[list[str], list[str]]:
    """Return the paths of the data, and those of the labels.

    Args:
        bound: The bound inputs.
    """
    num_data = sum(bound.requires_grad)
    return bound.names[:num_data], bound.names[num_data:]


def arguments_of(paths: Iterable[str]) -> list[str]:
    """Return the names of the arguments that paths lead into.

    Args:
        paths: The paths of inputs.

    >>> arguments_of(["pair[0]", "pair[1]", "table.mask"])
    ['pair', 'table']
    """
    return list(dict.fromkeys(map(argument_of, paths)))


def sample_shapes(bound: Inputs) -> dict[str, list[int]]:
    """Return the shape of each bound input by path, without the dimension that counts samples.

    Args:
        bound: The bound inputs.
    """
    return {
        path: [size for index, size in enumerate(tensor.shape) if index != dim]
        for path, tensor, dim in zip(bound.names, bound.tensors, bound.dims, strict=True)
    }


def check_bound(bound: Inputs, found: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that inputs are the bound ones.

    Args:
        bound: The bound inputs.
        found: The inputs of a call with their paths.

    Raises:
        ValueError: If an input is unknown, has another shape, or is missing.
    """
    expected, given = dict(zip(bound.names, bound.tensors, strict=True)), dict(found)
    for path, tensor in given.items():
        if path not in expected:
            raise ValueError(f"`{path}` must be one of the inputs that are bound ({', '.join(expected)}).")
        if tensor.shape != expected[path].shape:
            raise ValueError(
                f"`{path}` must have the shape it was bound with, {tuple(expected[path].shape)}, got "
                f"{tuple(tensor.shape)}. Call `reshape` first to change shapes."
            )
    missing = [path for path in data_and_labels(bound)[0] if path not in given]
    if missing:
        raise ValueError(f"`batch` must hold the inputs that are bound, got none for {', '.join(missing)}.")


def _check_only_shapes_change(before: Inputs, found: Sequence[tuple[str, torch.Tensor]], num_data: int) -> None:
    """Check that described inputs, with data first, have the names and numbers of dimensions of the bound ones."""
    names = [path for path, _ in found]
    kinds = zip(("data", "labels"), data_and_labels(before), (names[:num_data], names[num_data:]), strict=True)
    for argument, old, new in kinds:
        # Labels may be left out of a call, and therefore of a description.
        if old != new and (argument == "data" or (old and new)):
            raise ValueError(f"`{argument}` must name the inputs that are bound, {old}, got {new}.")
    for (path, tensor), bound in zip(found, before.tensors, strict=False):
        if tensor.dim() != bound.dim():
            raise ValueError(
                f"`{path}` must keep its number of dimensions ({bound.dim()}), got shape {tuple(tensor.shape)}."
            )
