"""Cut the inputs of a model into shards, each input along a dimension of its own, and bring them to devices.

An input is a tensor in the call of the model: ``model(x, mask=m)`` has the inputs ``x`` and ``mask``, and a
nested argument has one for each tensor in it, called by the path to it: ``pair[0]``, ``extra['mask']``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar

import torch

from lockstep import nest

BatchDim: TypeAlias = "int | Mapping[str, int | None] | None"
"""The dimension that counts samples: one for all inputs, or one for each, by name or path; None for an input
that is given whole to every shard."""

Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class ShardInputs:
    """What one shard is called with.

    Attributes:
        args: Arguments by position, on the shard's device.
        kwargs: Arguments by name.
        leaves: One entry an input: the piece that backward leaves a gradient in, None where none is wanted.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The call of a model with a whole batch, ready to be cut.

    Attributes:
        args: Arguments by position.
        kwargs: Arguments by name.
        names: The path of each input.
        tensors: Each input.
        dims: The dimension of each that counts samples, at least 0; None where it is given whole.
        wanted: Whether a gradient is wanted for each.
        num_samples: How many samples the batch holds.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str]
    tensors: list[torch.Tensor]
    dims: list[int | None]
    wanted: list[bool]
    num_samples: int
    attached: ClassVar[bool] = False
    """Whether pieces belong to the caller's graph."""

    def cut(self, samples: range, device: torch.device) -> ShardInputs:
        """Give the arguments for a run of samples, as views where they lie on this device already."""
        pieces: list[torch.Tensor] = []
        leaves: list[torch.Tensor | None] = []
        for tensor, dim, wanted in zip(self.tensors, self.dims, self.wanted, strict=True):
            piece = tensor.detach()
            if dim is not None and len(samples) != self.num_samples:
                piece = piece.narrow(dim, samples.start, len(samples))
            if piece.device != device:
                piece = piece.to(device)
            pieces.append(piece.requires_grad_() if wanted else piece)
            leaves.append(pieces[-1] if wanted else None)
        if not self.kwargs and all(map(torch.is_tensor, self.args)):
            return ShardInputs(tuple(pieces), {}, leaves)
        rest: Iterator[torch.Tensor] = iter(pieces)
        args, kwargs = nest.map_tensors(lambda _: next(rest), (self.args, self.kwargs))
        return ShardInputs(args, kwargs, leaves)


def read_inputs(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    found: Sequence[tuple[str, torch.Tensor]],
    batch_dim: BatchDim,
    *,
    wanted: Callable[[str, torch.Tensor], bool],
    absent: Collection[str] = (),
    argument: str = "batch",
) -> Inputs:
    """Find the inputs of a call, the dimension of each that counts samples, and the number of samples.

    Args:
        args: Arguments by position.
        kwargs: Arguments by name.
        found: The inputs among them with their paths, as `named_inputs` yields them.
        batch_dim: The dimensions.
        wanted: Says for the path of an input, and the input, whether a gradient is wanted.
        absent: Paths that `batch_dim` may name beside those of this call.
        argument: What errors call all inputs together.

    Raises:
        ValueError: No input is cut, one lacks its dimension, two differ in length, there is no sample, or
            `batch_dim` names an input that there is not.
    """
    paths, tensors = [], []
    for path, tensor in found:
        paths.append(path)
        tensors.append(tensor)
    dims = given_dims(batch_dim, [*paths, *absent], "batch_dim")[: len(paths)]
    for index, dim in enumerate(dims):
        if dim is not None:
            dims[index] = positive_dim(paths[index], tensors[index], dim)
    num_samples = count_samples(paths, tensors, dims, argument)
    asked = list(map(wanted, paths, tensors))
    return Inputs(tuple(args), dict(kwargs), paths, tensors, dims, asked, num_samples)


def named_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a call with its path."""
    for name, part in (*zip(names, args, strict=True), *kwargs.items()):
        yield from nest.named_tensors(part, name)


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read a batch as arguments: a tuple or list by position, a dict by name, anything else as the only one.

    >>> as_call({"x": 1}), as_call((1, 2))
    (((), {'x': 1}), ((1, 2), {}))
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {}


def argument_names(forward: Callable[..., Any], num_args: int) -> list[str]:
    """Name the positions of a call as the function does; those it takes as ``*args`` by their number."""
    return with_numbers(positional_names(forward), num_args)


def with_numbers(names: Sequence[str], num_args: int) -> list[str]:
    """Name so many positions; those past the names by their number.

    >>> with_numbers(["x"], 2)
    ['x', 'args[1]']
    """
    if num_args <= len(names):
        return list(names[:num_args])
    return [*names, *[f"args[{index}]" for index in range(len(names), num_args)]]


def positional_names(forward: Callable[..., Any]) -> list[str]:
    """List the names of the arguments that a function takes by position; none if it does not say."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # a function without a signature, such as one made in C
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def check_dims(dims: BatchDim, argument: str) -> None:
    """Refuse what names no dimension.

    Raises:
        TypeError: It is neither a whole number nor None nor a dict of such.
    """
    each = list(dims.values()) if isinstance(dims, Mapping) else [dims]
    if not all(dim is None or type(dim) is int for dim in each):
        raise TypeError(f"`{argument}` must be a whole number, None, or a dict of such by name, got {dims!r}.")


def given_dims(dims: BatchDim, paths: Sequence[str], argument: str) -> list[int | None]:
    """Look up the dimension of each path by the longest name that it is or begins with; 0 if there is none.

    Raises:
        ValueError: A name fits no path.

    >>> given_dims({"pair": 1, "pair[1]": None}, ["x", "pair[0]", "pair[1]"], "batch_dim")
    [0, 1, None]
    """
    if not isinstance(dims, Mapping):
        return [dims] * len(paths)
    return by_longest_name(dims, paths, argument, default=0)


def by_longest_name(given: Mapping[str, Given], paths: Sequence[str], argument: str, *, default: Given) -> list[Given]:
    """Look up each path by the longest name that it is or begins with.

    Raises:
        ValueError: A name fits no path.
    """
    for name in given:
        if not any(_belongs(path, name) for path in paths):
            raise ValueError(f"`{argument}` must name some of {', '.join(paths)}, got {name!r}.")
    fitting = [[name for name in given if _belongs(path, name)] for path in paths]
    return [given[max(names, key=len)] if names else default for names in fitting]


def _belongs(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}[", f"{name}."))


def positive_dim(path: str, tensor: torch.Tensor, dim: int) -> int:
    """Count a dimension from the front.

    Raises:
        ValueError: The tensor has no such dimension.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        shape = tuple(tensor.shape)
        raise ValueError(f"`{path}` must have a dimension {dim} to count samples by, got shape {shape}.")
    return dim % tensor.dim()


def count_samples(
    paths: Collection[str],
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int | None],
    argument: str = "batch",
) -> int:
    """Count the samples of inputs.

    Raises:
        ValueError: Two differ, none has a dimension that counts samples, or there is no sample.
    """
    first, length = "", -1
    for path, tensor, dim in zip(paths, tensors, dims, strict=True):
        if dim is None:
            continue
        if length < 0:
            first, length = path, tensor.shape[dim]
        elif tensor.shape[dim] != length:
            rule = f"must hold as many samples as `{first}` ({length})"
            raise ValueError(f"`{path}` {rule} along dimension {dim}, got {tensor.shape[dim]}.")
    if length < 0 and paths:
        raise ValueError(
            f"`{argument}` must hold an input that is split over devices, got all given whole. "
            "Name the dimension that counts its samples in `batch_dim`."
        )
    if length < 0:
        raise ValueError(f"`{argument}` must hold a tensor with a dimension that counts samples, got none.")
    if length == 0:
        raise ValueError(f"`{argument}` must hold at least one sample, got none.")
    return length
