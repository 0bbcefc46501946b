"""Modes that show what a result depends on: memory that functions leave unwritten, chance, or another thread."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
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


MOST_PERMUTATIONS: Final = 1000
"""The number of permutations at most, of which code may draw others until one moves something."""


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch has no types here
    """Records what operators draw for all samples, and gives parts of the samples the same numbers.

    A permutation moves nothing, because that of a part would be another one.

    Args:
        interleaved: Where several rows are drawn per sample, whether all samples come once before any comes again, as
            where two views of a batch follow one another. By default the rows of a sample are neighbors.
        keeps: Whether dropout keeps everything, for parts that are padded to other lengths than all samples and so draw
            masks of other shapes.

    Attributes:
        in_half: Whether an operator has computed in half precision.
    """

    def __init__(self, *, interleaved: bool = False, keeps: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.in_half, self.keeps = False, keeps
        self._interleaved = interleaved
        self.forget()

    def forget(self) -> None:
        """Forget what was recorded, before other samples are computed."""
        self._drawn: list[tuple[str, torch.Tensor]] = []
        self._given: Iterator[tuple[str, torch.Tensor]] | None = None
        self._samples, self._size, self._permutations = range(0), 0, 0

    def start(self, samples: range) -> None:
        """Begin to compute some samples.

        Args:
            samples: Their indices. The first call is that for all samples, whose numbers are recorded.
        """
        self._given = iter(self._drawn) if self._size else None
        self._samples, self._size, self._permutations = samples, self._size or len(samples), 0

    def end(self) -> None:
        """Check that a part has drawn as often as all samples.

        Raises:
            RuntimeError: If it has drawn less, as in a loop that ends when all of its samples are accepted.
        """
        if self._given is not None and next(self._given, None) is not None:
            raise RuntimeError(OTHER_DRAWS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator, and overwrite what it has drawn.

        Raises:
            RuntimeError: If it is not known what a part of the samples draws.
        """
        name = func.overloadpacket.__name__
        made = func(*args, **(kwargs or {}))
        is_tensor = isinstance(made, torch.Tensor)
        self.in_half |= is_tensor and made.dtype in HALF_PRECISION
        if torch.Tag.nondeterministic_seeded not in func.tags or (is_tensor and made.is_meta):
            return made
        given = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | (kwargs or {})  # noqa: SLF001 - no public way
        if name == "native_dropout" and given.get("train") is not False:
            mask, chance = self._shared(name, made[1]), given["p"]
            return args[0] * mask * (1 / (1 - chance) if chance < 1 else 0.0), mask
        if is_tensor and name == "randperm":
            self._permutations += 1
            if self._permutations <= MOST_PERMUTATIONS:
                return made.copy_(torch.arange(len(made)))
        elif is_tensor and not name.startswith("rrelu"):
            return made.copy_(self._shared(name, made))
        elif not any(map(given.get, ("dropout_p", "dropout", "training"))):
            # A kernel that could draw, such as that of attention.
            return made
        raise RuntimeError(OTHER_DRAWS)

    def _shared(self, name: str, made: torch.Tensor) -> torch.Tensor:
        """Return what the samples get of what an operator has drawn for all of them."""
        if self.keeps and name.startswith(("bernoulli", "native_dropout")):
            return torch.ones_like(made)
        if self._given is None:
            self._drawn.append((name, made.clone()))
            return made
        drawn, whole = next(self._given, ("", made))
        cut = partial(rows_of, whole, made, self._samples, self._size, interleaved=self._interleaved)
        rows = whole if whole.shape == made.shape else cut()
        if drawn != name or rows is None:
            raise RuntimeError(OTHER_DRAWS)
        return rows


OTHER_DRAWS: Final = "What is drawn for some of the samples cannot be told from what is drawn for all."


def rows_of(
    whole: torch.Tensor, part: torch.Tensor, samples: range, size: int, *, interleaved: bool = False
) -> torch.Tensor | None:
    """Return the rows of some samples in a tensor of all of them; None if the tensor of the part does not tell them.

    Args:
        whole: A tensor of all samples, with k rows per sample along one dimension.
        part: The tensor of the part, with the same k.
        samples: The samples of the part.
        size: The number of all samples.
        interleaved: Whether the rows of a sample are as far apart as there are samples; by default, neighbors.

    >>> rows_of(torch.arange(8).view(1, 8), torch.zeros(1, 4), range(2, 4), 4)
    tensor([[4, 5, 6, 7]])
    """
    dims = [dim for dim, length in enumerate(whole.shape) if part.dim() == whole.dim() and length != part.size(dim)]
    if len(dims) != 1 or whole.size(dims[0]) % size or whole.size(dims[0]) // size * len(samples) != part.size(dims[0]):
        return None
    each = whole.size(dims[0]) // size
    rows = torch.arange(size * each, device=whole.device)
    index = rows.view(each, size)[:, list(samples)] if interleaved else rows.view(size, each)[list(samples)]
    return whole.index_select(dims[0], index.flatten())


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
