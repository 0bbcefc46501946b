"""Name a state by its bits: equal digests mean equal weights, on whatever machine and devices they lie.

A digest is made of the digests of its tensors, so who has those need not read the tensors again.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch
from torch.nn.parameter import is_lazy

Path: TypeAlias = tuple[Any, ...]
"""Where something is: the number of the state it is in, then the keys and indices that lead to it."""

PIECE: Final = 1 << 22
"""Bytes that are copied at once where a tensor cannot be read in its place."""

RULE: Final = "`states` must hold tensors, numbers, text and None"


class Entry(NamedTuple):
    """One line of a digest: a tensor, another value, or a container.

    Attributes:
        path: Where it is.
        kind: "tensor", "value", "mapping", "sequence" or "quantized".
        about: Of a tensor ``(dtype, shape, SHA-256)``, the first without "torch." and the last from
            `tensor_digest`; of a value the name of its type and the value as text; of a mapping or a sequence
            how many it holds; of a quantized tensor its scheme and dtype (its parts follow as a mapping's).
    """

    path: Path
    kind: str
    about: Any


def digest(*states: Any) -> str:
    """Compute the SHA-256 over names, shapes, dtypes and bits of what is given.

    It is `combine` of the `entries`, in which `tensor_digest` stands for the bits of a tensor.

    Args:
        *states: Modules (their parameters and persistent buffers), optimizers (their state and settings),
            anything else with a `state_dict`, and mappings, sequences, tensors, numbers, text and None.

    Returns:
        64 hexadecimal digits.

    Raises:
        TypeError: Something in it has no bits that mean the same everywhere.

    Determinism: independent of devices, of memory layout, of the order of mappings' keys and of the byte
    order of the machine; -0.0 and 0.0 differ, and so do NaNs of different bits.

    Example:
        >>> zeros = torch.zeros(2)
        >>> digest(zeros) == digest(zeros.clone()), digest(zeros) == digest(-zeros)
        (True, False)
    """
    return combine(entries(*states))


def tensor_digest(tensor: torch.Tensor) -> str:
    """Compute the SHA-256 over the elements of a tensor; neither its shape nor its dtype counts.

    The bytes are those of a safetensors file: the elements in row-major order without gaps, each of them
    in little-endian order. A complex element is its real and then its imaginary part, a bool one byte of
    0 or 1. A sparse tensor has the bytes of the dense one, a conjugated or negated view those of its values,
    an empty tensor none.

    Args:
        tensor: On any device and in any layout. What does not lie in order on the CPU is copied there
            in pieces of at most 4 MiB.

    Returns:
        64 hexadecimal digits.

    Raises:
        TypeError: The tensor has no elements to read, as on the meta device, or they do not say all of it.

    Example:
        >>> two = torch.tensor([1, 256], dtype=torch.int16)
        >>> tensor_digest(two) == hashlib.sha256(bytes([1, 0, 0, 1])).hexdigest()
        True
    """
    _check_readable(tensor, "")
    sha = hashlib.sha256()
    _update(sha, tensor)
    return sha.hexdigest()


def combine(found: Iterable[Entry]) -> str:
    """Compute the digest of a state from its entries.

    Each entry is a line of JSON, ``[path, kind, about]`` in ASCII without spaces, ended by a newline. The
    digest is the SHA-256 over the lines, sorted by their bytes. A module of one weight of 2 x 3 zeros,
    given alone, has two lines::

        [[0,"weight"],"tensor",["float32",[2,3],"9d908ecfb6b256def8b49a7c504e6c889c4b0e41fe6ce3e01863dd7b61a20aa0"]]
        [[0],"mapping",1]

    In a path, text, integers, booleans and None are as JSON has them; another key is an object of its
    type's name and its `repr`. The text of a value is that of `float.hex`, for text itself, and otherwise
    its `repr`: ``["float","0x1.0p+0"]``, ``["str","sgd"]``, ``["int","3"]``, ``["NoneType","None"]``.

    Args:
        found: In any order.

    Returns:
        64 hexadecimal digits.

    Raises:
        ValueError: Two entries have one path.

    Example:
        >>> weight = torch.zeros(2, 3)
        >>> tensor = Entry((0, "weight"), "tensor", ("float32", (2, 3), tensor_digest(weight)))
        >>> combine([tensor, Entry((0,), "mapping", 1)]) == digest({"weight": weight})
        True
    """
    lines: dict[str, bytes] = {}
    for path, kind, about in found:
        where = _json([_key(key) for key in path])
        if where in lines:
            raise ValueError(f"`found` must hold one entry a path, got two for {where}.")
        lines[where] = f"[{where},{_json(kind)},{_json(about)}]\n".encode("ascii")
    return hashlib.sha256(b"".join(sorted(lines.values()))).hexdigest()


def entries(*states: Any) -> Iterator[Entry]:
    """Yield containers and values with the path that leads to them, tensors by their digests.

    Args:
        *states: As `digest` takes them.

    Raises:
        TypeError: Something in them has no bits that mean the same everywhere.
    """
    for index, state in enumerate(states):
        yield from _walk(state.state_dict() if isinstance(state, _Stateful) else state, (index,))


def fingerprint(tensors: Iterable[torch.Tensor]) -> bytes:
    """Compute 128 bits over the bits of some tensors, quickly: nothing else of them counts.

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


def _walk(state: Any, path: Path) -> Iterator[Entry]:
    """Yield the entry of a part of a state, and those of its parts."""
    if isinstance(state, torch.Tensor):
        yield from _walk_tensor(state, path)
    elif isinstance(state, Mapping):
        yield Entry(path, "mapping", len(state))
        for key, part in state.items():
            yield from _walk(part, (*path, key))
    elif isinstance(state, list | tuple):
        yield Entry(path, "sequence", len(state))
        for index, part in enumerate(state):
            yield from _walk(part, (*path, index))
    else:
        yield Entry(path, "value", (_type_name(state), _text(state, path)))


def _walk_tensor(tensor: torch.Tensor, path: Path) -> Iterator[Entry]:
    """Yield the entry of a tensor, or of the parts that give its numbers their meaning."""
    _check_readable(tensor, f" at {_dotted(path)}", quantized=True)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized:
        yield Entry(path, "quantized", (str(tensor.qscheme()).removeprefix("torch."), dtype))
        for name, part in _quantized_parts(tensor).items():
            yield from _walk(part, (*path, name))
    else:
        yield Entry(path, "tensor", (dtype, tuple(tensor.shape), tensor_digest(tensor)))


def _quantized_parts(tensor: torch.Tensor) -> dict[str, Any]:
    """Take a quantized tensor apart: integers alone do not say which numbers they stand for."""
    integers = tensor.int_repr()
    if tensor.qscheme() in {torch.per_tensor_affine, torch.per_tensor_symmetric}:
        return {"int_repr": integers, "scale": tensor.q_scale(), "zero_point": tensor.q_zero_point()}
    return {
        "int_repr": integers,
        "axis": tensor.q_per_channel_axis(),
        "scales": tensor.q_per_channel_scales(),
        "zero_points": tensor.q_per_channel_zero_points(),
    }


def _check_readable(tensor: torch.Tensor, where: str, *, quantized: bool = False) -> None:
    """Refuse a tensor whose elements cannot be read, or do not say everything about it."""
    if is_lazy(tensor):
        raise TypeError(f"{RULE}, got a parameter without a shape{where}. Run the model once before.")
    if tensor.is_meta:
        raise TypeError(f"{RULE}, got a tensor on the meta device{where}, which has no values.")
    if tensor.is_nested:
        raise TypeError(f"{RULE}, got a nested tensor{where}. Give its `unbind()`.")
    if tensor.is_quantized and not quantized:
        raise TypeError(f"{RULE}, got a quantized tensor{where}. Give its `int_repr()`, scale and zero point.")


def _type_name(value: Any) -> str:
    return "float" if isinstance(value, float) else type(value).__name__


def _text(value: Any, path: Path) -> str:
    """Write down a value so that another text means another value."""
    if isinstance(value, float):
        return value.hex()
    if type(value) is str:
        return value
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    raise TypeError(f"{RULE}, got a {type(value).__name__} at {_dotted(path)}.")


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _key(key: Any) -> Any:
    """Give a key as JSON has it; others of JSON's own types would lose what sets them apart."""
    return key if key is None or type(key) in {str, int, bool} else {type(key).__name__: repr(key)}


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _update(sha: hashlib._Hash, tensor: torch.Tensor) -> None:
    """Feed a tensor's elements in row-major order, without a copy where they lie so already."""
    tensor = tensor.detach()
    for piece in _pieces(tensor if tensor.layout is torch.strided else tensor.to_dense()):
        size = piece.numel() * piece.element_size()
        if size:
            sha.update((ctypes.c_char * size).from_address(piece.data_ptr()))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements in row-major order as tensors on the CPU that are little-endian and have no gaps."""
    # A conjugate or a negative may be a mere flag on memory that holds something else.
    flagged = tensor.is_conj() or tensor.is_neg() or sys.byteorder == "big"
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not flagged:
        yield tensor
    elif tensor.numel() * tensor.element_size() <= PIECE:
        whole = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        yield little_endian(whole) if sys.byteorder == "big" else whole
    elif tensor.is_contiguous() and tensor.dim() > 1:
        yield from _pieces(tensor.view(-1))
    elif len(tensor) == 1:
        yield from _pieces(tensor[0])
    else:
        rows = max(1, PIECE // (tensor[0].numel() * tensor.element_size()))
        for start in range(0, len(tensor), rows):
            yield from _pieces(tensor[start : start + rows])


def little_endian(tensor: torch.Tensor) -> torch.Tensor:
    """Turn the bytes of every number around; a complex number is two of them.

    Args:
        tensor: Without gaps.

    >>> little_endian(torch.tensor([1, 256], dtype=torch.int16)).tolist()
    [[0, 1], [1, 0]]
    """
    size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    return tensor.reshape(-1).view(torch.uint8).reshape(-1, size).flip(1)
