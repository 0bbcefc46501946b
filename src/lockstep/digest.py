"""Name a state by its bits: equal digests mean equal weights, on whatever machine and devices they lie."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch


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
        for path, value in _walk(_plain(state), (index,)):
            # repr sets off names from what follows and 1 from "1"; the kind says how many bytes come next.
            sha.update(f"{path!r} {_kind(path, value)}\n".encode())
            if isinstance(value, torch.Tensor):
                _update(sha, value)
    return sha.hexdigest()


def fingerprint(tensors: Iterable[torch.Tensor]) -> bytes:
    """Give 128 bits over the bits of some tensors, quickly: nothing else of them counts.

    Args:
        tensors: On any devices; equal numbers of elements lie in equal order wherever this is compared.

    >>> fingerprint([torch.zeros(2)]) == fingerprint([torch.zeros(1), torch.zeros(1)])
    True
    """
    sha = hashlib.sha256()
    for tensor in tensors:
        _update(sha, tensor)
    return sha.digest()[:16]


@runtime_checkable
class _Stateful(Protocol):
    """What says its state as numbers and tensors, as modules, optimizers and schedulers do."""

    def state_dict(self) -> Mapping[str, Any]: ...


def _plain(state: Any) -> Any:
    """Take the state of what has one."""
    return state.state_dict() if isinstance(state, _Stateful) else state


def _walk(state: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield containers and values with the path that leads to them, mappings by sorted keys."""
    yield path, state
    if isinstance(state, Mapping):
        for key in sorted(state, key=lambda key: (type(key).__name__, key)):
            yield from _walk(state[key], (*path, key))
    elif isinstance(state, list | tuple):
        for index, part in enumerate(state):
            yield from _walk(part, (*path, index))


def _kind(path: tuple[Any, ...], value: Any) -> str:
    """Describe a value; for all but tensors the description says everything."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, float):
        return f"float {value.hex()}"
    if value is None or isinstance(value, bool | int | str):
        return f"{type(value).__name__} {value!r}"
    if isinstance(value, Mapping):
        return f"mapping of {len(value)}"
    if isinstance(value, list | tuple):
        return f"sequence of {len(value)}"
    name = ".".join(map(str, path))
    raise TypeError(
        f"`states` must hold tensors, numbers, text and None, got a {type(value).__name__} at {name}."
    )


def _update(sha: hashlib._Hash, tensor: torch.Tensor) -> None:
    """Feed a tensor's elements in order, without a copy where they lie so already."""
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    # A conjugate or a negative may be a mere flag on memory that holds something else.
    flat = dense.resolve_conj().resolve_neg().cpu().contiguous()
    size = flat.numel() * flat.element_size()
    if size:
        sha.update((ctypes.c_char * size).from_address(flat.data_ptr()))
