"""Count what is read from tensors on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READING = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.allclose.default,
}
"""Operators whose answer, or its size, the host has to wait for: `item`, `bool` and their kin."""

PAST_OPERATORS = {torch.Tensor.tolist, torch.Tensor.numpy}
"""What reads the memory of a CPU tensor itself."""


class Reads:
    """Counts how often numbers of a tensor are asked for, in this thread.

    Attributes:
        count: So often.
    """

    def __init__(self) -> None:
        self.count = 0
        self._modes = _Operators(self), _Methods(self)

    def __enter__(self) -> Reads:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Operators(TorchDispatchMode):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._reads.count += func in READING
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __init__(self, reads: Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._reads.count += func in PAST_OPERATORS
        return func(*args, **(kwargs or {}))
