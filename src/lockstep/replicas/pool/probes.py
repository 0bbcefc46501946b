"""Modes that show what a result depends on: memory that functions leave unwritten, chance, or another thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import nan
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.precision import HALF_PRECISION

ALLOCATIONS: Final = frozenset(
    {
        *(torch.empty, torch.empty_like, torch.empty_strided, torch.empty_permuted),
        *(torch.Tensor.new_empty, torch.Tensor.new_empty_strided),
    }
)
"""The functions that return memory without writing to it."""


class FreshMemory(TorchFunctionMode):
    """Fills the memory that functions leave unwritten.

    It sees calls from Python. A mode of the dispatcher would also see those within kernels, and change results: below
    it, kernels such as that of `affine_grid` call other operators without autocast.

    Args:
        value: The number to fill it with. In integers NaN becomes the largest one.
    """

    def __init__(self, value: float = nan) -> None:
        super().__init__()
        self.value = value

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function, and fill what it has allocated."""
        made = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS and not made.is_meta:
            # Not shown to modes of the dispatcher, which compare what is called.
            with torch._C._DisableTorchDispatch(), torch.no_grad():  # noqa: SLF001 - no public way
                fill(made, self.value)
        return made


def fill(tensor: torch.Tensor, value: float) -> None:
    """Fill a tensor with a number, and one of integers with 0 or the largest one.

    Args:
        tensor: Changed in place.
        value: The number.
    """
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(value)
    elif tensor.dtype == torch.bool:
        tensor.fill_(value != 0)
    elif not tensor.is_quantized:
        tensor.fill_(0 if value == 0 else torch.iinfo(tensor.dtype).max)


DRAWS: Final = (
    *("bernoulli", "rand", "uniform", "normal", "exponential", "geometric", "cauchy", "log_normal", "multinomial"),
    *("poisson", "binomial"),
)
"""Beginnings of the names of operators that draw. `native_dropout` has a value of its own."""


class Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types here
    """Replaces what operators draw by constants: dropout keeps every value, and a permutation moves nothing.

    Attributes:
        in_half: Whether an operator has computed in half precision.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.in_half = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and overwrite what it has drawn."""
        name = func.overloadpacket.__name__
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        made = func(*args, **(kwargs or {}))
        if not isinstance(made, torch.Tensor):
            return made
        self.in_half |= made.dtype in HALF_PRECISION
        if not name.startswith(DRAWS) or made.is_meta:
            return made
        if name in {"randperm", "bernoulli"}:
            return made.copy_(torch.arange(len(made)) if name == "randperm" else args[0])
        if name.startswith("bernoulli"):
            # Dropout divides by this probability.
            chance = args[1] if len(args) > 1 else 0.5
            return made.copy_(chance) if isinstance(chance, torch.Tensor) else made.fill_(chance)
        return made.fill_(0.5 if made.is_floating_point() and not name.startswith(("normal", "randn")) else 0)


def has_compiled() -> bool:
    """Return whether torch has compiled something in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["frames"])


def uncompiled() -> AbstractContextManager[Any]:
    """Return a context in which nothing is compiled, which would take long for other numbers of samples."""
    # Its import takes seconds, and without it nothing is compiled.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


PATIENCE: Final = 1.0
"""Seconds that a thread waits for its turn."""


class Turns:
    """Lets two threads continue in turn after each operation, so that what they do mixes in the same way every time.

    A thread that waits too long, because the other one needs something that it holds, lets both go on at the same time.

    Args:
        threads: The numbers of the threads.
        lead: The number of operations that the first one makes before the second one begins.
    """

    def __init__(self, threads: Sequence[int], lead: int) -> None:
        self._changed = threading.Condition()
        self._expected, self._left = set(threads), list(threads)
        self._lead = lead
        self._next: int | None = None
        """The thread that continues; None before both have begun, and where they take no turns any more."""

    def run(self, thread: int, work: Callable[[], None]) -> None:
        """Run the work of one thread.

        Args:
            thread: The number of the thread.
            work: The function to call.
        """
        with self._changed:
            self._expected.discard(thread)
            if not self._expected:
                self._next = self._left[0]
            self._wait(thread)
        try:
            with TakingTurns(self, thread):
                work()
        finally:
            with self._changed:
                self._left.remove(thread)
                self._next = self._left[0] if self._left and self._next is not None else None
                self._changed.notify_all()

    def take(self, thread: int) -> None:
        """Pass the turn to the other thread, and wait for the next one.

        Args:
            thread: The number of the calling thread.
        """
        with self._changed:
            if self._next is None:
                return
            if self._lead > 0 and thread == self._left[0]:
                self._lead -= 1
                return
            self._next = self._left[0] if thread == self._left[-1] else self._left[-1]
            self._wait(thread)

    def _wait(self, thread: int) -> None:
        self._changed.notify_all()
        if not self._changed.wait_for(lambda: self._next == thread, PATIENCE):
            self._next = None
            self._changed.notify_all()


class TakingTurns(TorchFunctionMode):
    """Calls each function in the turn of its thread.

    Args:
        turns: The threads.
        thread: The number of the calling thread.
    """

    def __init__(self, turns: Turns, thread: int) -> None:
        super().__init__()
        self._turns, self._thread = turns, thread

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function."""
        # The compiler inlines this method, and what it compiles runs in one turn.
        if not torch.compiler.is_compiling():
            self._turns.take(self._thread)
        return func(*args, **(kwargs or {}))
