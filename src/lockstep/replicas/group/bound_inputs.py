"""The names and shapes that the inputs of a model must have, and checks of inputs against them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lockstep.replicas.batch import BatchDim, count_samples, dims_by_path, positive_dim

Description: TypeAlias = "tuple[str, Sequence[int]]"
"""The name or path of an input, and its shape for the whole batch."""


@dataclass(frozen=True, slots=True)
class BoundInputs:
    """The names and shapes that inputs must have.

    Attributes:
        data: The shape of each input, by path and in the order of the call.
        labels: The shapes of the inputs that follow, which have no gradient and may be left out of a call.
        num_samples: The number of samples in a batch.
        dims: For each input, with data before labels, the dimension that counts samples, or None if it is given whole.
    """

    data: dict[str, tuple[int, ...]]
    labels: dict[str, tuple[int, ...]]
    num_samples: int
    dims: tuple[int | None, ...]

    @property
    def paths(self) -> list[str]:
        """The paths of all inputs, with data before labels."""
        return [*self.data, *self.labels]

    @property
    def arguments(self) -> list[str]:
        """The names of the positional arguments of a call."""
        return list(dict.fromkeys(argument_of(path) for path in self.paths))

    @property
    def label_arguments(self) -> list[str]:
        """The names of the positional arguments that are labels."""
        return list(dict.fromkeys(argument_of(path) for path in self.labels))

    def differs(self, other: BoundInputs, path: str) -> bool:
        """Return whether an input has another shape in other bound inputs, apart from the number of samples.

        Args:
            other: The other bound inputs.
            path: The path of the input.
        """
        return self._sample_shape(path) != other._sample_shape(path)

    def _sample_shape(self, path: str) -> list[int]:
        shape = (self.data | self.labels)[path]
        dim = self.dims[self.paths.index(path)]
        return [size for index, size in enumerate(shape) if index != dim]

    def check(self, found: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Check that inputs are the bound ones.

        Args:
            found: The inputs of a call with their paths.

        Raises:
            ValueError: If an input is unknown, has another shape, or is missing.
        """
        shapes = {path: tuple(tensor.shape) for path, tensor in found}
        bound = self.data | self.labels
        for path, shape in shapes.items():
            if path not in bound:
                raise ValueError(f"`{path}` must be one of the inputs that are bound ({', '.join(bound)}).")
            if shape != bound[path]:
                raise ValueError(
                    f"`{path}` must have the shape it was bound with, {bound[path]}, got {shape}. "
                    "Call `reshape` first to change shapes."
                )
        missing = [path for path in self.data if path not in shapes]
        if missing:
            raise ValueError(f"`batch` must hold the inputs that are bound, got none for {', '.join(missing)}.")


Shapes: TypeAlias = "dict[str, tuple[int, ...]]"
"""The shapes of inputs by path, in the order of the call."""


def read_descriptions(data: Sequence[Description], labels: Sequence[Description] | None) -> tuple[Shapes, Shapes]:
    """Convert descriptions of inputs to shapes by path.

    Args:
        data: The descriptions of the inputs.
        labels: The descriptions of the labels, or None.

    Raises:
        TypeError: If a description is not a pair of a name and a shape.
        ValueError: If there is no data, a name occurs twice, or a shape has a negative length.
    """
    if not data:
        raise ValueError("`data` must describe at least one input, got none.")
    described = [_read_description(each, "data") for each in data]
    others = [_read_description(each, "labels") for each in labels or ()]
    names = [path for path, _ in described + others]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`data` and `labels` must name each input once, got {twice!r} twice.")
    return dict(described), dict(others)


def bound_inputs(data: Shapes, labels: Shapes, batch_dim: BatchDim) -> BoundInputs:
    """Return inputs of given shapes as bound inputs.

    Args:
        data: The shapes of the inputs.
        labels: The shapes of the labels.
        batch_dim: The dimension that counts samples, for all inputs or by name.

    Raises:
        ValueError: If a shape lacks the dimension that counts samples, the numbers of samples differ, or there is none.
    """
    shapes = data | labels
    dims = dims_by_path(batch_dim, list(shapes), "batch_dim")
    # Tensors on "meta" have a shape but no memory, so the checks for tensors can be used.
    tensors = [torch.empty(shape, device="meta") for shape in shapes.values()]
    positive = [
        None if dim is None else positive_dim(path, tensor, dim)
        for path, tensor, dim in zip(shapes, tensors, dims, strict=True)
    ]
    return BoundInputs(data, labels, count_samples(shapes, tensors, positive), tuple(positive))


def _read_description(description: Description, argument: str) -> tuple[str, tuple[int, ...]]:
    """Return the name and shape of one description."""
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
    return name, sizes


def check_same_inputs(old: BoundInputs, data: Shapes, labels: Shapes) -> None:
    """Check that only shapes change.

    Args:
        old: The inputs that are bound.
        data: The new shapes of the inputs.
        labels: The new shapes of the labels.

    Raises:
        ValueError: If an input has another name or another number of dimensions.
    """
    for argument, before, after in (("data", old.data, data), ("labels", old.labels, labels)):
        if list(before) != list(after):
            raise ValueError(f"`{argument}` must name the inputs that are bound, {list(before)}, got {list(after)}.")
        for path, shape in after.items():
            if len(shape) != len(before[path]):
                raise ValueError(
                    f"`{path}` must keep its number of dimensions ({len(before[path])}), got shape {shape}."
                )


def argument_of(path: str) -> str:
    """Return the name of the argument that a path leads into.

    Args:
        path: The path of an input.

    >>> argument_of("pair[0]"), argument_of("table.mask")
    ('pair', 'table')
    """
    return re.split(r"[\[.]", path, maxsplit=1)[0]
