"""Name a state by its bits: equal digests mean equal weights, on whatever machine and devices they lie."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def digest(*states: Any) -> str:
    """Give the SHA-256 over names, shapes, dtypes and bits of what is given.

    Args:
        *states: Modules (their parameters and persistent buffers), optimizers (their state and settings),
            anything else with a `state_dict`, and mappings, sequences, tensors, numbers, text and None.

    Returns:
        64 hexadecimal digits.

    Raises:
        TypeError: Something in it has no bits that mean the same everywhere.

    Determinism: independent of devices, of memory layout, of the order of mappings' keys and of the byte
    order of the machine's addresses; -0.0 and 0.0 differ, and so do NaNs of different bits.

    Example:
        >>> zeros = torch.zeros(2)
        >>> digest(zeros) == digest(zeros.clone()), digest(zeros) == digest(-zeros)
        (True, False)
    """
    sha = hashlib.sha256()
    for index, state in enumerate(states):
        for name, value in _leaves(_plain(state), str(index)):
            header = f"{name}\n{_kind(name, value)}\n"
            sha.update(header.encode())
            if isinstance(value, torch.Tensor):
                _update(sha, value)
    return sha.hexdigest()


def _plain(state: Any) -> Any:
    """Take the state of what has one."""
    if isinstance(state, nn.Module | Optimizer):
        return state.state_dict()
    if isinstance(state, Mapping | list | tuple | torch.Tensor | str | int | float | None):
        return state
    return state.state_dict()


def _leaves(state: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Walk to the values, mappings by sorted keys."""
    if isinstance(state, Mapping):
        for key in sorted(state, key=lambda key: (type(key).__name__, key)):
            yield from _leaves(state[key], f"{name}.{key}")
    elif isinstance(state, list | tuple):
        for index, part in enumerate(state):
            yield from _leaves(part, f"{name}.{index}")
    else:
        yield name, state


def _kind(name: str, value: Any) -> str:
    """Describe a value; for all but tensors the description says everything."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, float):
        return f"float {value.hex()}"
    if value is None or isinstance(value, bool | int | str):
        return f"{type(value).__name__} {value!r}"
    raise TypeError(
        f"`states` must hold tensors, numbers, text and None, got a {type(value).__name__} at {name}."
    )


def _update(sha: hashlib._Hash, tensor: torch.Tensor) -> None:
    """Feed a tensor's elements in order, without a copy where they lie so already."""
    flat = (
        tensor.detach().to_dense().cpu().contiguous()
        if tensor.is_sparse
        else tensor.detach().cpu().contiguous()
    )
    size = flat.numel() * flat.element_size()
    if size:
        sha.update((ctypes.c_char * size).from_address(flat.data_ptr()))
