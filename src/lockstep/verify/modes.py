"""Dispatch modes that see every operator that a shard or an optimizer calls."""

from __future__ import annotations

import inspect
import linecache
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lockstep.replicas import ALLOCATIONS, fill
from lockstep.verify.recorder import LOCAL, bits

BORDER: Final = "verify/instruments.py"
"""The end of the file below whose frames a shard or a step begins."""
NOT_THE_USERS: Final = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    "<",
)
"""Beginnings of the names of files that are not the user's."""

TRAINING: Final = frozenset(
    {
        *(functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d),
        *(functional.alpha_dropout, functional.feature_alpha_dropout, functional.batch_norm),
    }
)
"""Functions with an argument `training`, whose results differ from those in an evaluation if it is True."""

ALLOCATING: Final = frozenset(each.__name__ for each in ALLOCATIONS)
"""The operators that return memory without writing to it."""


class OperatorLog(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch's base class has no types
    """Writes down every operator that is called: its name, a hash of what it returns, and the line that called it.

    Args:
        fresh: The number that fresh memory is filled with before it is hashed; None for what it holds.

    Attributes:
        calls: The calls in order, as JSON values. ``"line"`` is empty where no code of the user is below the shard, as
            in backward.
    """

    def __init__(self, fresh: float | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self._fresh = fresh
        self.calls: list[dict[str, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and write it down."""
        made = func(*args, **(kwargs or {}))
        if self._fresh is not None and func.overloadpacket.__name__ in ALLOCATING and not made.is_meta:
            fill(made, self._fresh)
        found = [bits(each) for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        modules = LOCAL.modules
        self.calls.append(
            {"operator": str(func), "made": found, "line": users_line(), "module": modules[-1] if modules else ""}
        )
        return made


class TrainingCalls(TorchFunctionMode):
    """Writes down calls of functions of torch that draw a dropout or use batch statistics.

    Attributes:
        calls: The functions, each with the line that called it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and write it down."""
        if func in TRAINING:
            given = inspect.signature(func).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            if given.arguments["training"] and given.arguments.get("p", 1) > 0:
                self.calls.append(f"{func.__name__} at {users_line()}")
        return func(*args, **(kwargs or {}))


def users_line() -> str:
    """Return the innermost line of the user's code that leads to this call; empty if there is none in the shard."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - `inspect.stack` reads the source of every frame
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith(BORDER):
            return ""
        if not name.startswith(NOT_THE_USERS):
            text = linecache.getline(name, frame.f_lineno).strip()
            return f"{Path(name).name}:{frame.f_lineno} in {frame.f_code.co_name}: {text}"
        frame = frame.f_back
    return ""
