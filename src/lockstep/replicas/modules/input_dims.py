"""Find the dimension along which each input of a `DataParallel` is split."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import torch

from lockstep.replicas.batch import BatchDim, DimNest, dims_by_path, number_positions, positional_names

PATH_START: Final = re.compile(r"[^\[.]*")
"""The name of the argument with which a path starts."""


def input_dims(
    dim: DimNest, forward: Callable[..., Any], found: Sequence[tuple[str, torch.Tensor]], arguments: Sequence[str]
) -> BatchDim:
    """Return the dimension along which each input of a call is split, or None for an input that is given whole.

    A tensor without dimensions, or without elements along its dimension, is given whole.

    Args:
        dim: The dimension for all inputs, or one for each, as passed to `DataParallel`.
        forward: The forward method of the module.
        found: The inputs of the call with their paths.
        arguments: The names of the arguments that are passed.

    Raises:
        ValueError: If `dim` does not fit the inputs, or splits none of them.
    """
    if isinstance(dim, int):
        if all(_has_samples(tensor, dim) for _, tensor in found):
            return dim
        dims: list[int | None] = [dim] * len(found)
    else:
        paths = [path for path, _ in found]
        dims = dims_by_path(_dims_of_call(dim, forward, paths, arguments), paths, "dim")
    if found and all(each is None for each in dims):
        raise ValueError(f"`dim` must name the dimension that counts samples for at least one input, got {dim!r}.")
    split = [
        each if each is None or _has_samples(tensor, each) else None
        for (_, tensor), each in zip(found, dims, strict=True)
    ]
    # Without any input to split, the dimensions are kept, so that the error names them.
    chosen = dims if all(each is None for each in split) else split
    return {path: each for (path, _), each in zip(found, chosen, strict=True)}


@lru_cache(maxsize=64)
def names_of_arguments(forward: Callable[..., Any], num_args: int) -> list[str]:
    """Return the names of the positional arguments of a call. They are cached, because reading a signature is slow.

    Args:
        forward: The forward method of a module, with ``self``.
        num_args: The number of positional arguments, without ``self``.
    """
    return number_positions(positional_names(forward)[1:], num_args)


def _dims_of_call(
    dim: DimNest, forward: Callable[..., Any], paths: Sequence[str], arguments: Sequence[str]
) -> BatchDim:
    """Return dimensions by name, without those of arguments that the call leaves out or passes without a tensor.

    Raises:
        ValueError: If `dim` is a tuple or list without an entry for an argument.
    """
    if dim is None or isinstance(dim, int):
        return dim
    if not isinstance(dim, Mapping):
        by_name = dict(zip(names_of_arguments(forward, len(dim)), dim, strict=True))
        for name in arguments:
            if name not in by_name:
                raise ValueError(f"`dim` must have an entry for each argument, got {dim!r} without one for `{name}`.")
        dim = by_name
    passed, accepted = {PATH_START.match(path)[0] for path in paths}, _accepted_names(forward)  # type: ignore[index]  # it matches any text
    roots = {name: PATH_START.match(name)[0] for name in dim}  # type: ignore[index]  # as above
    return {name: dim[name] for name, root in roots.items() if root in passed or root not in accepted}


@lru_cache(maxsize=64)
def _accepted_names(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of all arguments of a function; none if it has no signature."""
    try:
        return frozenset(inspect.signature(forward).parameters)
    except (TypeError, ValueError):
        return frozenset()


def _has_samples(tensor: torch.Tensor, dim: int) -> bool:
    """Return whether a tensor is to be split or rejected, and not given whole to every shard."""
    inside = -tensor.dim() <= dim < tensor.dim()
    return tensor.shape[dim] > 0 if inside else tensor.dim() > 0
