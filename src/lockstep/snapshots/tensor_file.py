"""The bytes of a safetensors file.

A file begins with a header: its length as a little-endian integer of 8 bytes, then JSON with the dtype, the shape and
the place of every tensor, padded with spaces to a multiple of 8. The bytes of the tensors follow without gaps. The
header is that of the library safetensors with the metadata ``{"format": "pt"}``, byte for byte, except that the library
writes metadata with more than one key in random order.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple

import torch

from lockstep.digest import BLOCK, TensorDigest, join_blocks, little_endian

DTYPES: Final = {
    # In the order of the library: larger elements first, so that every tensor is aligned.
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "complex64": "C64",
    "float32": "F32",
    "uint32": "U32",
    "int32": "I32",
    "bfloat16": "BF16",
    "float16": "F16",
    "uint16": "U16",
    "int16": "I16",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""The dtypes that a file can hold, with their names in it."""

_ORDER: Final = {name: index for index, name in enumerate(DTYPES)}


class TensorInfo(NamedTuple):
    """The dtype and the shape of a tensor, and the hashes of its blocks where they are known.

    Attributes:
        dtype: The dtype without "torch.".
        shape: The sizes of the dimensions.
        hashes: The SHA-256 of each of its blocks. Format 1 has a single one for all of them.
    """

    dtype: str
    shape: tuple[int, ...]
    hashes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """The number of bytes of the elements."""
        size: int = getattr(torch, self.dtype).itemsize
        return size * math.prod(self.shape)

    @property
    def blocks(self) -> int:
        """The number of blocks that are hashed, at least 1."""
        return max(1, -(-self.bytes // BLOCK))

    @property
    def digest(self) -> TensorDigest:
        """What stands for the tensor in a digest."""
        return TensorDigest(self.dtype, self.shape, join_blocks(self.hashes))

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorInfo:
        """Return the dtype and the shape of a tensor."""
        return cls(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    def empty(self) -> torch.Tensor:
        """Return memory for the tensor."""
        return torch.empty(self.shape, dtype=getattr(torch, self.dtype))


def file_order(tensors: Mapping[str, TensorInfo]) -> list[str]:
    """List the names of tensors in the order in which their bytes follow each other in a file.

    >>> file_order({"a": TensorInfo("int8", ()), "c": TensorInfo("int64", ()), "b": TensorInfo("int64", ())})
    ['b', 'c', 'a']
    """
    return sorted(tensors, key=lambda name: (_ORDER[tensors[name].dtype], name))


def header(tensors: Mapping[str, TensorInfo]) -> bytes:
    """Return the header of a file, which depends on nothing but its tensors.

    Args:
        tensors: The tensors by name, in any order.

    >>> header({"w": TensorInfo("float32", (2,))})[8:]
    b'{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   '
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in file_order(tensors):
        info = tensors[name]
        end = start + info.bytes
        entries[name] = {"dtype": DTYPES[info.dtype], "shape": info.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor on the CPU, in the order of this machine.

    Args:
        tensor: The tensor. Writing to the result changes it.
    """
    # NumPy has no bfloat16, but it has its bytes.
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the bytes of a file, which are little-endian; the tensor itself on most machines.

    Args:
        tensor: A contiguous tensor on the CPU, with the bytes of this machine or of a file.
    """
    if sys.byteorder == "little":
        return tensor
    return little_endian(tensor).view(-1).view(tensor.dtype).view(tensor.shape)
