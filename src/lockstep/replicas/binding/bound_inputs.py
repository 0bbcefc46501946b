"""The names and shapes that a model's inputs must have, and the checks of what differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lockstep.replicas.batch import BatchDim, count_samples, given_dims, positive_dim

Description: TypeAlias = "tuple[str, Sequence[int]]"
"""An input's name, or its path, and its shape with all samples."""


@dataclass(frozen=True, slots=True)
class BoundInputs:
    """The names and shapes that inputs must have.

    Attributes:
        data: The shape of each input, by path, in the order of the call.
        labels: Those of the inputs that follow, without a gradient; they may be left out of a call.
        num_samples: How many samples they hold.
        dims: The dimension of each, data first, that counts samples; None where it is given whole.
    """

    data: dict[str, tuple[int, ...]]
    labels: dict[str, tuple[int, ...]]
    num_samples: int
    dims: tuple[int | None, ...]

    @property
    def paths(self) -> list[str]:
        """All paths, data first."""
        return [*self.data, *self.labels]

    @property
    def arguments(self) -> list[str]:
        """What the positions of a call are called."""
        return list(dict.fromkeys(argument_of(path) for path in self.paths))

    @property
    def label_arguments(self) -> list[str]:
        """What the positions of labels are called."""
        return list(dict.fromkeys(argument_of(path) for path in self.labels))

    def differs(self, other: BoundInputs, path: str) -> bool:
        """Tell whether an input of the same name has another shape there, beside the number of samples."""
        return self._sample_shape(path) != other._sample_shape(path)

    def _sample_shape(self, path: str) -> list[int]:
        shape = (self.data | self.labels)[path]
        dim = self.dims[self.paths.index(path)]
        return [size for index, size in enumerate(shape) if index != dim]

    def check(self, found: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuse inputs that are not what was bound.

        Raises:
            ValueError: An input is unknown, has another shape, or is missing.
        """
        shapes = {path: tuple(tensor.shape) for path, tensor in found}
        bound = self.data | self.labels
        for path, shape in shapes.items():
            if path not in bound:
                raise ValueError(f"`{path}` must be one of the inputs that are bound ({', '.join(bound)}).")
            if shape != bound[path]:
                raise ValueError(
                    f"`{path}` must have the shape it was bound with, {bound[path]}, got {shape}. "
                    "Call reshape first where shapes change."
                )
        missing = [path for path in self.data if path not in shapes]
        if missing:
            raise ValueError(f"`batch` must hold the inputs that are bound, got none for {', '.join(missing)}.")


Described: TypeAlias = "dict[str, tuple[int, ...]]"
"""The shapes of inputs by path, in the order of the call."""


def read_descriptions(data: Sequence[Description], labels: Sequence[Description] | None) -> tuple[Described, Described]:
    """Read descriptions of inputs.

    Raises:
        TypeError: A description is not a name and a shape.
        ValueError: There is no data, a name comes twice, or a shape has a negative length.
    """
    if not data:
        raise ValueError("`data` must describe at least one input, got none.")
    described = [_read(each, "data") for each in data]
    others = [_read(each, "labels") for each in labels or ()]
    names = [path for path, _ in described + others]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`data` and `labels` must name each input once, got {twice!r} twice.")
    return dict(described), dict(others)


def bound_inputs(data: Described, labels: Described, batch_dim: BatchDim) -> BoundInputs:
    """Count the samples of inputs.

    Raises:
        ValueError: A shape lacks the dimension that counts samples, the numbers of samples differ, or none is
            given.
    """
    shapes = data | labels
    dims = given_dims(batch_dim, list(shapes), "batch_dim")
    tensors = [torch.empty(shape, device="meta") for shape in shapes.values()]
    positive = [
        None if dim is None else positive_dim(path, tensor, dim)
        for path, tensor, dim in zip(shapes, tensors, dims, strict=True)
    ]
    return BoundInputs(data, labels, count_samples(shapes, tensors, positive), tuple(positive))


def _read(description: Description, argument: str) -> tuple[str, tuple[int, ...]]:
    """Read one description."""
    try:
        name, shape = description
        sizes = tuple(shape)
    except (TypeError, ValueError):
        name, sizes = None, ()
    if not isinstance(name, str) or not all(type(size) is int for size in sizes):
        raise TypeError(f"`{argument}` must hold pairs of a name and a shape, got {description!r}.")
    if min(sizes, default=0) < 0:
        raise ValueError(f"`{argument}` must hold lengths of at least 0, got {sizes} for {name!r}.")
    return name, sizes


def check_names(paths: Iterable[str], batch_dim: BatchDim, arguments: Sequence[str]) -> None:
    """Refuse a name that the model does not have where `batch_dim` has one that it does, and nobody else.

    Args:
        paths: Of the inputs that are described.
        batch_dim: As given to the group.
        arguments: The names of the model's arguments.

    Raises:
        ValueError: The name that is wrong is told.
    """
    described = [argument_of(path) for path in paths]
    expected = [argument_of(name) for name in batch_dim] if isinstance(batch_dim, Mapping) else []
    missing = [name for name in expected if name in arguments and name not in described]
    wrong = [name for name in described if name not in arguments]
    if missing and wrong:
        raise ValueError(
            f"`data` and `labels` must name {missing[0]!r}, which `batch_dim` and the model have, got "
            f"{wrong[0]!r}, which they have not."
        )


def check_same_inputs(old: BoundInputs, data: Described, labels: Described) -> None:
    """Refuse to change anything but shapes.

    Raises:
        ValueError: An input has another name, or another number of dimensions.
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
    """Give the argument that a path leads into.

    >>> argument_of("pair[0]"), argument_of("table.mask")
    ('pair', 'table')
    """
    return re.split(r"[\[.]", path, maxsplit=1)[0]
