"""Split the inputs of a model into shards, each input along a dimension of its own, and move them to devices.

An input is a tensor in a call of the model. ``model(x, mask=m)`` has the inputs ``x`` and ``mask``. A nested argument
has one input for each of its tensors, named by the path to it, such as ``pair[0]`` or ``extra['mask']``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import torch

from lockstep import nest

NESTS: Final = (Mapping, tuple, list)
"""The types of containers in a nest of dimensions."""

DimNest: TypeAlias = "int | tuple[DimNest, ...] | list[DimNest] | Mapping[Any, DimNest] | None"
"""The dimension that counts samples in the tensors of a nest: one for all of them, or a nest of the same structure, in
which None stands for a tensor that is given whole to every shard."""

BatchDim: TypeAlias = "int | Mapping[str, DimNest] | None"
"""The dimension that counts samples: one for all inputs, or one for each by name or path, or None for an input that is
given whole to every shard."""

Given = TypeVar("Given")


@dataclass(frozen=True, slots=True)
class ShardInputs:
    """The arguments for one shard.

    Attributes:
        args: The positional arguments, on the device of the shard.
        kwargs: The keyword arguments, on the device of the shard.
        leaves: For each input the tensor in which backward stores a gradient, or None if no gradient is wanted.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    leaves: list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments for a whole batch, ready to be split.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
        names: The path of each input.
        tensors: The inputs.
        dims: For each input the dimension that counts samples, at least 0, or None if it is given whole.
        requires_grad: Whether a gradient is wanted for each input.
        num_samples: The number of samples in the batch.
        attached: If the parts belong to the autograd graph of the caller, the inputs of each shard by its first sample.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str]
    tensors: list[torch.Tensor]
    dims: list[int | None]
    requires_grad: list[bool]
    num_samples: int
    attached: Mapping[int, Sequence[torch.Tensor]] | None = None

    def shard_inputs(self, samples: range, device: torch.device) -> ShardInputs:
        """Return the arguments for a run of samples, which are views of the inputs if they are on the device already.

        Args:
            samples: The samples of the shard.
            device: The device of the shard.
        """
        parts: list[torch.Tensor] = []
        leaves: list[torch.Tensor | None] = []
        tensors = self.tensors if self.attached is None else self.attached[samples.start]
        for tensor, dim, wanted in zip(tensors, self.dims, self.requires_grad, strict=True):
            # Detached, so that every shard has a graph of its own and backward ends at its leaves.
            part = tensor.detach() if self.attached is None else tensor
            if dim is not None and len(samples) != self.num_samples:
                part = part.narrow(dim, samples.start, len(samples))
            if part.device != device:
                part = part.to(device)
            parts.append(part.requires_grad_() if wanted else part)
            leaves.append(parts[-1] if wanted else None)
        # The usual call needs no traversal of nests.
        if not self.kwargs and all(map(torch.is_tensor, self.args)):
            return ShardInputs(tuple(parts), {}, leaves)
        rest: Iterator[torch.Tensor] = iter(parts)
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
    num_samples: int | None = None,
) -> Inputs:
    """Collect the inputs of a call, the dimension of each that counts samples, and the number of samples.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        found: The inputs in these arguments with their paths, as `named_inputs` yields them.
        batch_dim: The dimensions that count samples.
        wanted: A function that returns for the path of an input, and the input, whether a gradient is wanted.
        absent: Paths that `batch_dim` may name although they do not occur in this call.
        argument: The name of the batch in error messages.
        num_samples: The number of samples if no input is split, or None if one must be.

    Raises:
        ValueError: If no input is split, an input lacks its dimension, two inputs differ in length, there is no sample,
            or `batch_dim` names an input that does not exist.
    """
    paths, tensors = [], []
    for path, tensor in found:
        paths.append(path)
        tensors.append(tensor)
    dims = positive_dims(batch_dim, paths, tensors, "batch_dim", absent=absent)
    if num_samples is None or set(dims) != {None}:
        num_samples = count_samples(paths, tensors, dims, argument)
    wants_gradient = list(map(wanted, paths, tensors))
    return Inputs(tuple(args), dict(kwargs), paths, tensors, dims, wants_gradient, num_samples)


def named_inputs(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a call with its path.

    Args:
        args: The positional arguments.
        kwargs: The keyword arguments.
        names: The names of the positional arguments.
    """
    for name, part in (*zip(names, args, strict=True), *kwargs.items()):
        yield from nest.named_tensors(part, name)


def number_positions(names: Sequence[str], num_args: int) -> list[str]:
    """Return as many names as there are positions, where positions without a name are numbered.

    Args:
        names: The names of the first positions.
        num_args: The number of positions.

    >>> number_positions(["x"], 2)
    ['x', 'args[1]']
    """
    if num_args <= len(names):
        return list(names[:num_args])
    return [*names, *[f"args[{index}]" for index in range(len(names), num_args)]]


def parameters_of(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; none if it has no signature, as one that is implemented in C.

    Args:
        forward: The function.
    """
    try:
        return inspect.signature(forward).parameters
    except (TypeError, ValueError):
        return {}


def positional_names(forward: Callable[..., Any]) -> list[str]:
    """Return the names of the positional arguments of a function, or an empty list if it has no signature.

    Args:
        forward: The function.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, parameter in parameters_of(forward).items() if parameter.kind in kinds]


def check_dims(dims: Any, argument: str, *, by_position: bool = False) -> None:
    """Check that an argument names dimensions.

    Args:
        dims: The value to check.
        argument: The name of the argument in error messages.
        by_position: Whether it may also be a tuple or list.

    Raises:
        TypeError: If the value is neither an integer, nor None, nor a dict with such values or nests of them.
    """
    each = dims_by_name(dims if isinstance(dims, Mapping) else {argument: dims})
    allowed = NESTS if by_position or isinstance(dims, Mapping) else ()
    # `type(...) is int` also rejects booleans.
    are_dims = all(dim is None or type(dim) is int or isinstance(dim, allowed) for dim in each.values())
    if not are_dims or (by_position and not all(isinstance(name, str) for name in each)):
        nests = "a tuple, list or dict of these" if by_position else "a dict of these by name"
        raise TypeError(f"`{argument}` must be an integer, None, or {nests}, got {dims!r}.")


def dims_by_path(dims: BatchDim, paths: Sequence[str], argument: str) -> list[int | None]:
    """Return for each path the dimension of the longest name that matches it, or 0 if none does.

    Args:
        dims: One dimension for all paths, or dimensions by name.
        paths: The paths of the inputs or outputs.
        argument: The name of the argument in error messages.

    Raises:
        ValueError: If a name matches no path, or a nest of dimensions has no entry for a path in it.

    >>> dims_by_path({"pair": 1, "pair[1]": None}, ["x", "pair[0]", "pair[1]"], "batch_dim")
    [0, 1, None]
    >>> dims_by_path({"pair": (1, None)}, ["x", "pair[0]", "pair[1]"], "batch_dim")
    [0, 1, None]
    """
    if not isinstance(dims, Mapping):
        return [dims] * len(paths)
    found: list[int | None] = []
    for path, dim in zip(paths, by_longest_name(dims_by_name(dims), paths, argument, default=0), strict=True):
        if not (dim is None or isinstance(dim, int)):
            raise ValueError(f"`{argument}` must have an entry for `{path}`, got {dim!r}.")
        found.append(dim)
    return found


def dims_by_name(dims: Mapping[str, DimNest]) -> dict[str, DimNest]:
    """Return the dimension of each path that a mapping names, and each nest of dimensions under its own path.

    Args:
        dims: The dimensions by name.

    >>> dims_by_name({"x": 0, "pair": (1, None)})
    {'x': 0, 'pair': (1, None), 'pair[0]': 1, 'pair[1]': None}
    """
    found: dict[str, DimNest] = {}
    for name, part in dims.items():
        found[name] = part
        found |= dims_by_name(dict(nest.named_parts(part, name) or ()))
    return found


def by_longest_name(given: Mapping[str, Given], paths: Sequence[str], argument: str, *, default: Given) -> list[Given]:
    """Return for each path the value of the longest name that matches it: the path itself or a beginning of it.

    Args:
        given: The values by name.
        paths: The paths to look up.
        argument: The name of the argument in error messages.
        default: The value for a path that no name matches.

    Raises:
        ValueError: If a name matches no path.
    """
    for name in given:
        if not any(_names_path(path, name) for path in paths):
            raise ValueError(f"`{argument}` must name some of {', '.join(paths)}, got {name!r}.")
    return [default if name is None else given[name] for name in (longest_name(given, path) for path in paths)]


def argument_of(path: str) -> str:
    """Return the name of the argument that a path leads into.

    Args:
        path: The path of an input.

    >>> argument_of("pair[0]"), argument_of("table.mask"), argument_of("x")
    ('pair', 'table', 'x')
    """
    return re.split(r"[\[.]", path, maxsplit=1)[0]


def longest_name(names: Iterable[str], path: str) -> str | None:
    """Return the longest name that is a path or a beginning of it, or None if there is none.

    Args:
        names: The names.
        path: The path of a value in a batch.
    """
    return max((name for name in names if _names_path(path, name)), key=len, default=None)


def _names_path(path: str, name: str) -> bool:
    return path == name or path.startswith((f"{name}[", f"{name}."))


def positive_dim(path: str, tensor: torch.Tensor, dim: int) -> int:
    """Convert a dimension that may be negative to one that counts from the front.

    Args:
        path: The path of the tensor in error messages.
        tensor: The tensor.
        dim: The dimension.

    Raises:
        ValueError: If the tensor has no such dimension.
    """
    if not -tensor.dim() <= dim < tensor.dim():
        shape = tuple(tensor.shape)
        rule = f"must have a dimension {dim} to count samples by, got shape {shape}"
        raise ValueError(f"`{path}` {rule}. With None as its dimension, every shard gets it whole.")
    return dim % tensor.dim()


def positive_dims(
    dims: BatchDim,
    paths: Sequence[str],
    tensors: Sequence[torch.Tensor],
    argument: str,
    *,
    absent: Collection[str] = (),
) -> list[int | None]:
    """Return for each tensor the dimension that counts samples, counted from the first one, or None.

    Args:
        dims: The dimension of all tensors, or those of some by name.
        paths: The paths of the tensors.
        tensors: The tensors.
        argument: The name of `dims` in error messages.
        absent: Paths that `dims` may name although they are those of no tensor.

    Raises:
        ValueError: If a tensor lacks its dimension, or `dims` names one that does not exist.
    """
    found = dims_by_path(dims, [*paths, *absent], argument)[: len(paths)]
    for index, dim in enumerate(found):
        if dim is not None:
            found[index] = positive_dim(paths[index], tensors[index], dim)
    return found


def count_samples(
    paths: Collection[str], tensors: Sequence[torch.Tensor], dims: Sequence[int | None], argument: str = "batch"
) -> int:
    """Return the number of samples of inputs.

    Args:
        paths: The paths of the inputs.
        tensors: The inputs.
        dims: For each input the dimension that counts samples, or None if it is given whole.
        argument: The name of the batch in error messages.

    Raises:
        ValueError: If two inputs differ in length, no input has a dimension that counts samples, or there is no sample.
    """
    first, length = "", -1
    for path, tensor, dim in zip(paths, tensors, dims, strict=True):
        if dim is None:
            continue
        if length < 0:
            first, length = path, tensor.shape[dim]
        elif tensor.shape[dim] != length:
            rule = f"must hold as many samples as `{first}` ({length})"
            shape = f"got {tensor.shape[dim]} in a tensor of shape {tuple(tensor.shape)}"
            raise ValueError(
                f"`{path}` {rule} along dimension {dim}, {shape}. `batch_dim` says which one counts "
                "them, or `dim` of a DataParallel."
            )
    if length < 0 and paths:
        raise ValueError(
            f"`{argument}` must hold an input that is split over devices, got only inputs that are given whole. "
            "Specify the dimension that counts its samples in `batch_dim`."
        )
    if length < 0:
        raise ValueError(f"`{argument}` must hold a tensor with a dimension that counts samples, got none.")
    if length == 0:
        raise ValueError(f"`{argument}` must hold at least one sample, got none.")
    return length
