"""Compute in float64 and with equal draws, so that two gradients of the same samples differ by their meaning only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from lockstep.replicas import Draws, uncompiled
from lockstep.verify.modes import users_line

NARROW: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
CASTS: Final = frozenset({torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16})
PAIR: Final = 2


def widened(value: Any) -> Any:
    """Return a tensor, or a dtype, in float64 if it is in a narrower format; anything else as it is.

    Args:
        value: The value.

    >>> widened(torch.zeros(1)).dtype, widened(torch.half), widened(torch.zeros(1, dtype=torch.int64)).dtype
    (torch.float64, torch.float64, torch.int64)
    """
    if isinstance(value, torch.dtype):
        return torch.float64 if value in NARROW else value
    return value.to(torch.float64) if isinstance(value, torch.Tensor) and value.dtype in NARROW else value


class InFloat64(TorchFunctionMode):
    """Gives every function of torch its tensors in float64, also those that a closure holds, and its dtypes.

    Attributes:
        paired: The lines that combine a tensor of shape (n, 1) with one of shape (n,), which pairs all n samples.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paired: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        func = torch.Tensor.double if func in CASTS else func
        name = getattr(func, "__name__", "")
        shapes = [each.shape for each in args if isinstance(each, torch.Tensor)][:PAIR]
        if sorted(map(len, shapes)) == [1, PAIR] and name != "__get__":
            (length,), matrix = sorted(shapes, key=len)
            if matrix == (length, 1) and length > 1:
                self.paired.append(users_line())
        # What changes its tensor in place must get that tensor.
        in_place = name.startswith(("__i", "__setitem")) or (name.endswith("_") and not name.endswith("__"))
        kept = args[:1] if in_place else ()
        wide = tree_map(widened, args[len(kept) :])
        return func(*kept, *wide, **tree_map(widened, kwargs or {}))


@contextmanager
def in_float64(draws: Draws) -> Iterator[InFloat64]:
    """Compute in float64 and with the same draws; yield the mode, which knows which lines pair rows.

    Args:
        draws: Is told which samples are computed.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.enable_grad(), uncompiled(), draws, InFloat64() as mode:
            yield mode
    finally:
        torch.set_default_dtype(before)
