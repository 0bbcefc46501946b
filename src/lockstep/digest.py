"""Compute digests of states: equal digests mean equal bits, no matter on which machine and devices the state is.

The digest of a state is computed from the digests of its tensors. If you have those, you need not read the tensors
again.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch.nn.parameter import is_lazy

Path: TypeAlias = tuple[Any, ...]
"""The place of an entry: the index of the state it is in, then the keys and indices that lead to it."""

BLOCK: Final = 16 << 20
"""Bytes of a tensor that are hashed together, so that several threads or ranks can hash a large tensor.

If a tensor cannot be read in place, as many are copied at once.
"""

RULE: Final = "`states` must hold tensors, numbers, text and None"
"""The rule that errors about unsupported states begin with."""


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class Entry(NamedTuple):
    """One line of a digest: a tensor, another value, or a container.

    Attributes:
        path: The place of the entry.
        kind: The kind of the entry: "tensor", "value", "mapping", "sequence" or "quantized".
        about: The content. For a tensor it is ``(dtype, shape, SHA-256)``, with the dtype without "torch." and the
            hash from `tensor_digest`. For a value it is the name of the type and the value as text, for a mapping
            or a sequence the number of its items, and for a quantized tensor its scheme and dtype (its parts follow
            like those of a mapping).
    """

    path: Path
    kind: str
    about: Any


class TensorDigest(NamedTuple):
    """What stands for a tensor in a state whose tensors were hashed before.

    Attributes:
        dtype: The dtype without "torch.".
        shape: The sizes of the dimensions.
        sha256: The hash from `tensor_digest`.
    """

    dtype: str
    shape: tuple[int, ...]
    sha256: str


def digest(*states: Any) -> str:
    """Compute the SHA-256 over the names, shapes, dtypes and bits of states.

    The digest is `combine` of the `entries`, in which `tensor_digest` represents the bits of a tensor.

    Args:
        *states: The states: modules (their parameters and persistent buffers), optimizers (their state and
            settings), other objects with a `state_dict`, and mappings, sequences, tensors, numbers, text and None. A
            `TensorDigest` counts as the tensor that it stands for.

    Returns:
        The digest as 64 hexadecimal digits.

    Raises:
        TypeError: If a state holds something whose bits do not mean the same on every machine.

    Determinism: independent of devices, of memory layout, of the order of the keys of mappings and of the byte
    order of the machine. -0.0 and 0.0 have different digests, and so have NaNs with different bits.

    Example:
        >>> zeros = torch.zeros(2)
        >>> digest(zeros) == digest(zeros.clone()), digest(zeros) == digest(-zeros)
        (True, False)
    """
    return combine(entries(*states))


def tensor_digest(tensor: torch.Tensor) -> str:
    """Compute the SHA-256 over the elements of a tensor, without its shape and dtype.

    For a tensor of more than 16 MiB it is that of the hashes of its blocks, see `join_blocks`. The bytes are those of a
    safetensors file: the elements in row-major order without gaps, each of them in little-endian order. A complex
    element consists of its real and its imaginary part, a bool of one byte that is 0 or 1. A sparse tensor has the
    bytes of the dense one, and a conjugated or negated view those of its values. An empty tensor has none.

    Args:
        tensor: The tensor, on any device and in any layout. Elements that are not in order on the CPU are copied
            there in pieces of at most 16 MiB.

    Returns:
        The digest as 64 hexadecimal digits.

    Raises:
        TypeError: If the tensor has no elements to read (on the meta device), or if they do not fully describe it
            (a quantized tensor).

    Example:
        >>> two = torch.tensor([1, 256], dtype=torch.int16)
        >>> tensor_digest(two) == hashlib.sha256(bytes([1, 0, 0, 1])).hexdigest()
        True
    """
    _check_readable(tensor, "")
    return join_blocks([hashlib.sha256(block).hexdigest() for block in blocks_of(tensor)])


def join_blocks(hashes: Sequence[str]) -> str:
    """Return the hash of a tensor from those of its blocks, each of 16 MiB except for the last one.

    Args:
        hashes: The SHA-256 of each block as hexadecimal digits, at least one. That of a single block is the result;
            otherwise the result is the SHA-256 over the 32 bytes of each of them.
    """
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(bytes.fromhex("".join(hashes))).hexdigest()


def combine(found: Iterable[Entry]) -> str:
    """Compute the digest of a state from its entries.

    Each entry is a line of JSON, ``[path, kind, about]`` in ASCII without spaces, followed by a newline. The digest
    is the SHA-256 over the lines, sorted by their bytes. A single module with a weight of 2 x 3 zeros has two
    lines::

        [[0,"weight"],"tensor",["float32",[2,3],"9d908ecfb6b256def8b49a7c504e6c889c4b0e41fe6ce3e01863dd7b61a20aa0"]]
        [[0],"mapping",1]

    In a path, text, integers, booleans and None are written as in JSON. Any other key is an object with the name of
    its type and its `repr`. A number is written as by `float.hex`, text as it is, and any other value as its
    `repr`: ``["float","0x1.0p+0"]``, ``["str","sgd"]``, ``["int","3"]``, ``["NoneType","None"]``.

    Args:
        found: The entries, in any order.

    Returns:
        The digest as 64 hexadecimal digits.

    Raises:
        ValueError: If two entries have the same path.

    Example:
        >>> weight = torch.zeros(2, 3)
        >>> tensor = Entry((0, "weight"), "tensor", ("float32", (2, 3), tensor_digest(weight)))
        >>> combine([tensor, Entry((0,), "mapping", 1)]) == digest({"weight": weight})
        True
    """
    lines: dict[str, bytes] = {}
    for path, kind, about in found:
        where = _ENCODER.encode(list(map(_key, path)))
        if where in lines:
            raise ValueError(f"`found` must hold one entry per path, got two for {where}.")
        lines[where] = f'[{where},"{kind}",{_ENCODER.encode(about)}]\n'.encode("ascii")
    # The lines are sorted, so that the order in which mappings were filled does not count.
    return hashlib.sha256(b"".join(sorted(lines.values()))).hexdigest()


def entries(*states: Any) -> Iterator[Entry]:
    """Yield the entries of states: containers, values, and tensors with their digests.

    Args:
        *states: The states, as for `digest`.

    Raises:
        TypeError: If a state holds something whose bits do not mean the same on every machine.
    """
    for index, state in enumerate(states):
        if isinstance(state, str | PathLike | type):
            what = f"the class {state.__name__}" if isinstance(state, type) else repr(state)
            raise TypeError(
                f"`states` must be modules, optimizers, tensors or containers of these, got {what}. Pass the object "
                "itself. For the digests of a run's snapshots, call `lockstep snapshots PATH`."
            )
        yield from _walk(state.state_dict() if hasattr(state, "state_dict") else state, (index,))


def fingerprint(tensors: Iterable[torch.Tensor]) -> bytes:
    """Compute a digest of 128 bits over the bits of tensors, without their shapes, dtypes and boundaries.

    It costs less than `digest`. Compare it only between tensors that have the same sizes.

    Args:
        tensors: The tensors, on any devices.

    >>> fingerprint([torch.zeros(2)]) == fingerprint([torch.zeros(1), torch.zeros(1)])
    True
    """
    sha = hashlib.sha256()
    for tensor in tensors:
        for block in blocks_of(tensor):
            sha.update(block)
    return sha.digest()[:16]


def checksum(tensor: torch.Tensor) -> int:
    """Add up the bits of a tensor, read as words of 64 bits, modulo 2**64.

    It costs about as much as one pass over the memory, a fifteenth of `fingerprint`. It finds any change of one word,
    and one of several words unless their sum stays the same, as when two words change places.

    Args:
        tensor: The tensor, on any device; of a sparse one the values.

    >>> checksum(torch.ones(3)) == checksum(torch.ones(2)) + 0x3F800000
    True
    """
    return checksums([tensor])[0]


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the `checksum` of each of some tensors, after waiting once if they are on accelerators.

    Args:
        tensors: The tensors.
    """
    sums = list(map(_sum_of_words, tensors))
    on_device = [each for each in sums if isinstance(each, torch.Tensor)]
    read = iter(torch.stack([each.to(on_device[0].device) for each in on_device]).tolist() if on_device else ())
    return [(next(read) if isinstance(each, torch.Tensor) else each) % 2**64 for each in sums]


def _sum_of_words(tensor: torch.Tensor) -> int | torch.Tensor:
    """Return the sum of the words of a tensor; on an accelerator, where it may be negative, without waiting for it."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    values = tensor.detach().resolve_conj().resolve_neg()
    # A tensor of one element counts as contiguous, whatever its strides are.
    flat = values.reshape(-1).clone(memory_format=torch.contiguous_format) if values.numel() == 1 else values
    flat = flat.contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() & -8
    if flat.device.type == "cpu":
        # NumPy reads words at any address.
        data = flat.numpy()
        return int(data[:whole].view("<u8").sum()) + int.from_bytes(data[whole:].tobytes(), "little")
    words = flat[:whole] if flat.storage_offset() % 8 == 0 else flat[:whole].clone()
    total = words.view(torch.int64).sum()
    if whole == flat.numel():
        return total
    last = flat.new_zeros(8)
    last[: flat.numel() - whole] = flat[whole:]
    return total + last.view(torch.int64)[0]


def seal(tensor: torch.Tensor | None) -> str:
    """Return the checksum of the memory of a tensor; of a sparse one that of its indices and that of its values.

    Args:
        tensor: The tensor; None for one that is absent.
    """
    if tensor is None:
        return "absent"
    if not tensor.is_sparse:
        return str(checksum(tensor))
    # As they are stored: coalescing would change them.
    return f"{checksum(tensor._indices())} {checksum(tensor._values())}"  # noqa: SLF001 - see above


def _walk(state: Any, path: Path) -> Iterator[Entry]:
    """Yield the entry of a state or of a part of it, followed by the entries of its parts."""
    if isinstance(state, torch.Tensor):
        yield from _walk_tensor(state, path)
    elif isinstance(state, TensorDigest):
        yield Entry(path, "tensor", tuple(state))
    elif isinstance(state, Mapping):
        yield Entry(path, "mapping", len(state))
        for key, part in state.items():
            yield from _walk(part, (*path, key))
    elif isinstance(state, list | tuple):
        yield Entry(path, "sequence", len(state))
        for index, part in enumerate(state):
            yield from _walk(part, (*path, index))
    else:
        # A subclass of float, such as one of NumPy's, is the same number.
        kind = "float" if isinstance(state, float) else type(state).__name__
        yield Entry(path, "value", (kind, _text(state, path)))


def _walk_tensor(tensor: torch.Tensor, path: Path) -> Iterator[Entry]:
    """Yield the entry of a tensor, and for a quantized tensor the entries of its parts."""
    _check_readable(tensor, f" at {_dotted(path)}", quantized=True)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_quantized:
        yield Entry(path, "quantized", (str(tensor.qscheme()).removeprefix("torch."), dtype))
        for name, part in _quantized_parts(tensor).items():
            yield from _walk(part, (*path, name))
    else:
        yield Entry(path, "tensor", (dtype, tuple(tensor.shape), tensor_digest(tensor)))


def _quantized_parts(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the integers of a quantized tensor, and the numbers that define which values they represent."""
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
    """Check that the elements of a tensor can be read, and that they fully describe it.

    Args:
        tensor: The tensor to check.
        where: The place of the tensor, as an error names it.
        quantized: Whether a quantized tensor is allowed.
    """
    if is_lazy(tensor):
        raise TypeError(f"{RULE}, got a parameter without a shape{where}. Run the model once first.")
    if tensor.is_meta:
        raise TypeError(f"{RULE}, got a tensor on the meta device{where}, which has no values.")
    if tensor.is_nested:
        raise TypeError(f"{RULE}, got a nested tensor{where}. Pass its `unbind()`.")
    if tensor.is_quantized and not quantized:
        raise TypeError(f"{RULE}, got a quantized tensor{where}. Pass its `int_repr()`, scale and zero point.")


def _text(value: Any, path: Path) -> str:
    """Return a value as text that differs for different values."""
    if isinstance(value, float):
        # Hexadecimal digits are exact, while decimal ones would depend on rounding.
        return value.hex()
    if type(value) is str:
        return value
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    raise TypeError(f"{RULE}, got a {type(value).__name__} at {_dotted(path)}.")


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _key(key: Any) -> Any:
    """Return a key of a path as a JSON value."""
    # JSON would write an IntEnum like an int and a tuple like a list, so keys of such types are marked by their type.
    return key if key is None or type(key) in {str, int, bool} else {type(key).__name__: repr(key)}


def blocks_of(tensor: torch.Tensor, size: int = BLOCK) -> Iterator[memoryview]:
    r"""Yield the bytes of the elements in row-major order and little endian, in blocks, of which there is at least one.

    Args:
        tensor: The tensor, on any device and in any layout.
        size: The bytes of a block; the last one may be shorter.

    >>> [bytes(block) for block in blocks_of(torch.tensor([1, 2, 256], dtype=torch.int16), size=4)]
    [b'\x01\x00\x02\x00', b'\x00\x01']
    """
    tensor = tensor.detach()
    flat = (tensor if tensor.layout is torch.strided else tensor.to_dense()).reshape(-1)
    count = size // flat.element_size()
    for start in range(0, max(1, len(flat)), count):
        piece = flat[start : start + count]
        # The memory of a view that is marked as conjugate or negative holds other numbers. A tensor of one element
        # counts as contiguous, whatever its strides are.
        whole = piece.resolve_conj().resolve_neg().cpu().contiguous().as_strided(piece.shape, (1,))
        # As bytes, because NumPy has no arrays of bfloat16.
        data = little_endian(whole).reshape(-1) if sys.byteorder == "big" else whole.view(torch.uint8)
        yield data.numpy().data


def little_endian(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor with the bytes of every number in reverse order, one row per number.

    A complex number counts as two numbers.

    Args:
        tensor: A contiguous tensor.

    >>> little_endian(torch.tensor([1, 256], dtype=torch.int16)).tolist()
    [[0, 1], [1, 0]]
    """
    size = tensor.element_size() // (2 if tensor.is_complex() else 1)
    return tensor.reshape(-1).view(torch.uint8).reshape(-1, size).flip(1)
