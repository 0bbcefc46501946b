"""An accelerator without kernels, whose copies to the CPU arrive late unless somebody waits for them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

ACCELERATOR = torch.device("meta")
"""Stands for the accelerator: views of its tensors are computed, without values."""


class LateCopies(TorchDispatchMode):
    """Within it, tensors of `on_accelerator` can be cut there and be copied to the CPU.

    Attributes:
        waits: For each copy to the CPU, whether it was waited for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[bool] = []
        self._values: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] = []

    def on_accelerator(self, values: torch.Tensor) -> torch.Tensor:
        """Give a tensor there with these values."""
        return self._keep(values.to(ACCELERATOR), values)

    def _keep(self, there: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        self._values[id(there)] = values
        self._kept.append(there)  # so that no other tensor gets its id
        return there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device == ACCELERATOR:
            self.waits.append(not kwargs.get("non_blocking", False))
            values = self._values[id(args[0])]  # no copy of them: some kernels round by the address
            return values if self.waits[-1] else torch.full_like(values, -1)
        out = func(*args, **kwargs)
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if tensors and id(tensors[0]) in self._values and isinstance(out, torch.Tensor):
            own = tree_map_only(torch.Tensor, lambda each: self._values.get(id(each), each), args)
            self._keep(out, func(*own, **kwargs))
        return out
