"""Files of arrays that are parts of a dataset: tokens, and tensors in safetensors files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from safetensors import safe_open

from lockstep.data.parts.part import Part
from lockstep.integers import check_integer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@final
class Tokens(Part):
    """Samples of consecutive tokens of a file, which is mapped into memory.

    Sample i has the `length` tokens from token i·`stride` on, as an int64 tensor. Tokens at the end that do not fill a
    sample are left out.

    Args:
        path: The path of an ``.npy`` file with one dimension, or of a file with nothing but tokens.
        length: The number of tokens per sample, at least 1. For a model that predicts the next token, one more than it
            reads.
        stride: The number of tokens from the start of a sample to that of the next one, at least 1; by default
            `length`.
        dtype: The type of the tokens of a file that is no ``.npy`` file, as NumPy names it, such as ``"uint16"``.
        block: The number of samples that are shuffled among themselves, at least 1.

    Raises:
        ValueError: When samples are counted, if an ``.npy`` file has more dimensions.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        length: int,
        *,
        stride: int | None = None,
        dtype: str = "uint16",
        block: int = 1024,
    ) -> None:
        check_integer("length", length, minimum=1)
        check_integer("block", block, minimum=1)
        if stride is not None:
            check_integer("stride", stride, minimum=1)
        self.path = os.fspath(path)
        self.length = length
        self.stride = length if stride is None else stride
        self.dtype = dtype
        self.block = block

    @property
    def name(self) -> str:
        """The path of the file."""
        return self.path

    def _tokens(self) -> npt.NDArray[np.integer[Any]]:
        """Map the file into memory."""
        import numpy as np  # noqa: PLC0415 - takes long, and most runs need no tokens

        if Path(self.path).suffix != ".npy":
            return np.memmap(self.path, self.dtype, "r")
        tokens: npt.NDArray[np.integer[Any]] = np.load(self.path, mmap_mode="r")
        if tokens.ndim != 1:
            raise ValueError(f"{self.path} must have one dimension, got shape {tokens.shape}.")
        return tokens

    @cached_property
    def lengths(self) -> Sequence[int]:
        """The number of samples of each block."""
        num_samples = max(0, (len(self._tokens()) - self.length) // self.stride + 1)
        return [min(self.block, num_samples - start) for start in range(0, num_samples, self.block)]

    def read(self, block: int) -> Sequence[torch.Tensor]:
        """Map a block of samples; what is not used of it is not read."""
        begin = block * self.block * self.stride
        end = begin + (self.lengths[block] - 1) * self.stride + self.length
        return _Windows(self._tokens()[begin:end], self.length, self.stride)


@final
class _Windows(Sequence[torch.Tensor]):
    """Samples of tokens, which are copied when they are read."""

    def __init__(self, tokens: npt.NDArray[np.integer[Any]], length: int, stride: int) -> None:
        self._tokens, self._length, self._stride = tokens, length, stride

    def __len__(self) -> int:
        return (len(self._tokens) - self._length) // self._stride + 1

    def __getitem__(self, index: Any) -> Any:
        # The range raises an IndexError beyond the end, where the sequence is iterated over.
        start = range(len(self))[index] * self._stride
        return torch.from_numpy(self._tokens[start : start + self._length].astype("int64"))


@final
class Safetensors(Part):
    """The tensors of a safetensors file, which all have the samples along their first dimension.

    A sample is a dict with the entry of each tensor.

    Args:
        path: The path of the file.
        block: The number of samples that are read at once, at least 1.

    Raises:
        ValueError: When samples are counted, if tensors have different numbers of samples, or if there are none.
    """

    def __init__(self, path: str | os.PathLike[str], *, block: int = 256) -> None:
        check_integer("block", block, minimum=1)
        self.path = os.fspath(path)
        self.block = block

    @property
    def name(self) -> str:
        """The path of the file."""
        return self.path

    @cached_property
    def lengths(self) -> Sequence[int]:
        """The number of samples of each block."""
        with safe_open(self.path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no dict
        sizes = {shape[:1] for shape in shapes.values()}
        if len(sizes) != 1 or sizes == {()}:
            raise ValueError(f"All tensors of {self.path} must have the same number of samples, got shapes {shapes}.")
        ((num_samples,),) = sizes
        return [min(self.block, num_samples - start) for start in range(0, num_samples, self.block)]

    def read(self, block: int) -> Sequence[dict[str, torch.Tensor]]:
        """Read a block of samples."""
        begin = block * self.block
        with safe_open(self.path, "pt") as file:
            tensors = {
                name: file.get_slice(name)[begin : begin + self.lengths[block]]
                for name in file.keys()  # noqa: SIM118 - no dict
            }
        return [
            dict(zip(tensors, entries, strict=True))
            for entries in zip(*map(torch.unbind, tensors.values()), strict=True)
        ]
