"""Count what the code goes through: calls, modules, changes of file, frames above the loss, lines.

    python -m tests.support.flow        prints all figures of the checkout it runs in

Calls are what the profiler of the interpreter calls so: of functions, and of comprehensions and generator
expressions where these have frames (all comprehensions up to Python 3.11, none since 3.12), and every entry
into a generator again. Only those in files of lockstep count, on all threads. A change of file is a call in
another file than the call before it on the same thread; the first call of a thread is one too, since it
enters a file. Counted by thread they do not depend on how the threads take turns.
"""

from __future__ import annotations

import ast
import io
import os
import sys
import threading
import time
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from tests.support.ranks import launch_on_ranks

SOURCE = Path(ls.__file__).parent
_PREFIX = f"{SOURCE}{os.sep}"
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>"}
WARM_UP = 30
"""Actions before the first that is counted: ranks have then measured each other, and guess what comes."""
ROUNDS = 5
"""How often each action is counted. The least counts: what else comes in between only ever adds calls."""
BATCHES = 100
"""Batches of an epoch: more than are ever taken here, so that no epoch begins in a counted update."""
COMPARED_EVERY = 4
"""Ranks compare a part of their states in one of so many updates."""
REST = 2e-3
"""Seconds between two counted updates, in which threads end what they still do after handing over."""


class Call(NamedTuple):
    """One call of a function of lockstep."""

    file: str
    name: str


@dataclass(frozen=True, order=True)
class Flow:
    """What one action goes through; ordered by the first figure, then the next.

    Attributes:
        calls: Of functions, comprehensions and generators.
        functions_called: The calls without comprehensions, generator expressions and lambdas.
        modules: Files that are entered.
        file_changes: How often the next call of a thread is in another file.
        frames: Of lockstep, from the first one down to the caller of the loss function of a shard.
    """

    calls: int
    functions_called: int
    modules: int
    file_changes: int
    frames: int

    def __str__(self) -> str:
        return (
            f"{self.calls:6} {self.functions_called:9} {self.modules:8} {self.file_changes:13} {self.frames or '-':>7}"
        )


HEADING = "calls  no compr.  modules  file changes  frames"


class Recorder:
    """Notes the calls of all threads while it is told to, and how deep the loss function is called."""

    def __init__(self) -> None:
        self._threads: dict[int, list[Call]] = defaultdict(list)
        self._depths: list[int] = []
        self._noting = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch this thread, and all that start inside of the ``with``."""
        before = sys.getprofile(), threading.getprofile()
        sys.setprofile(self._profile)
        threading.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(before[0])
            threading.setprofile(before[1])

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self._noting and event == "call" and code.co_filename.startswith(_PREFIX):
            call = Call(code.co_filename, code.co_name)
            self._threads[threading.get_ident()].append(call)

    def loss(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Compute a loss, and note how many frames of lockstep led here."""
        if self._noting:
            self._depths.append(frames_above())
        return nn.functional.cross_entropy(model(x), target)

    def steady(self, action: Callable[[], object], *, period: int = 1, main_thread_only: bool = False) -> Flow:
        """Do something again and again, and return what it goes through once it has settled.

        Args:
            action: Is done `WARM_UP` times, and then `ROUNDS` times `period` more.
            period: After how many actions the same is done again; of a longer one the largest counts.
            main_thread_only: Leave out what other threads do.
        """
        for _ in range(WARM_UP):
            action()
        rounds = [
            [self._count(action, main_thread_only=main_thread_only) for _ in range(period)] for _ in range(ROUNDS)
        ]
        return max(min(flows) for flows in zip(*rounds, strict=True))

    def _count(self, action: Callable[[], object], *, main_thread_only: bool) -> Flow:
        time.sleep(REST)
        self._threads.clear()
        self._depths.clear()
        self._noting = True
        action()
        time.sleep(REST)
        self._noting = False
        main = threading.get_ident()
        threads = [calls for ident, calls in self._threads.items() if ident == main or not main_thread_only]
        calls = [call for each in threads for call in each]
        return Flow(
            calls=len(calls),
            functions_called=sum(call.name not in COMPREHENSIONS for call in calls),
            modules=len({call.file for call in calls}),
            file_changes=sum(1 + sum(a.file != b.file for a, b in pairwise(each)) for each in threads),
            frames=max(self._depths, default=0),
        )


def frames_above() -> int:
    """Count the frames of lockstep above the caller."""
    frame = sys._getframe(1).f_back
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename.startswith(_PREFIX)
        frame = frame.f_back
    return count


# What is counted ---------------------------------------------------------------------------------------


def small_model() -> nn.Module:
    """A model that draws random numbers and has no buffers."""
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def update_flow(
    num_devices: int,
    num_shards: int,
    *,
    model: Callable[[], nn.Module] = small_model,
    direct_loss: bool = False,
    period: int = 1,
    main_thread_only: bool = False,
) -> Flow:
    """Count one `ParallelUpdater.update`, with its iterator, threads, random streams and optimizer.

    Args:
        num_devices: CPU devices of this process.
        num_shards: Of a batch.
        model: Makes the model.
        direct_loss: Whether the loss function is the recorder's own, which counts frames, in the place of
            `lockstep.supervised`.
        period: See `Recorder.steady`.
        main_thread_only: Likewise.
    """
    recorder = Recorder()
    network = model()
    generator = torch.Generator().manual_seed(0)  # the same data on every rank
    inputs = torch.randn(8 * BATCHES, 6, generator=generator)
    data = TensorDataset(inputs, torch.randint(3, (8 * BATCHES,), generator=generator))
    with recorder.installed():
        updater = ls.ParallelUpdater(
            ls.BatchIterator(data, 8, shuffle=True, seed=3),
            torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9),
            network,
            devices=["cpu"] * num_devices,
            num_shards=num_shards,
            loss_fn=recorder.loss if direct_loss else ls.supervised(nn.functional.cross_entropy),
        )
        try:
            return recorder.steady(updater.update, period=period, main_thread_only=main_thread_only)
        finally:
            updater.finalize()


def group_flow() -> Flow:
    """Count one `ReplicaGroup.forward` and `backward` on two devices."""
    recorder = Recorder()
    x, output_grads = torch.randn(8, 6), torch.randn(8, 3)
    with recorder.installed(), ls.ReplicaGroup(small_model(), devices=["cpu", "cpu"]) as group:

        def forward_and_backward() -> None:
            group.forward(x)
            group.backward(output_grads)

        return recorder.steady(forward_and_backward)


def module_flow() -> Flow:
    """Count one forward and backward of a `DataParallel` on two devices."""
    recorder = Recorder()
    x = torch.randn(8, 6)
    with recorder.installed():
        module = ls.DataParallel(small_model(), devices=["cpu", "cpu"])
        try:
            return recorder.steady(lambda: module(x).sum().backward())
        finally:
            module.release()


def rank_flow() -> Flow:
    """Count one update on the main thread of a rank, which has one device and one shard.

    It is one of those in which a part of the ranks' states is compared.
    """
    return update_flow(1, ls.find_communicator().size, period=COMPARED_EVERY, main_thread_only=True)


def ranks_flow() -> Flow:
    """Count one update on the main thread of rank 0 of two ranks."""
    first: Flow = launch_on_ranks(rank_flow, 2)[0]
    return first


def half_a_million() -> nn.Module:
    """A model whose gradients are summed in slices, by all threads."""
    return nn.Sequential(nn.Linear(6, 680), nn.ReLU(), nn.Linear(680, 730), nn.Dropout(0.1), nn.Linear(730, 3))


PATHS: dict[str, Callable[[], Flow]] = {
    "update, 2 devices, 2 shards": lambda: update_flow(2, 2),
    "update, 2 devices, 2 shards, a function as loss": lambda: update_flow(2, 2, direct_loss=True),
    "update, 2 devices, 8 shards": lambda: update_flow(2, 8),
    "update, 2 devices, 0.5 M parameters": lambda: update_flow(2, 2, model=half_a_million),
    "update, 1 device, 1 shard": lambda: update_flow(1, 1),
    "update, 1 device, 1 shard, a function as loss": lambda: update_flow(1, 1, direct_loss=True),
    "update, rank 0 of 2, main thread": ranks_flow,
    "ReplicaGroup.forward and backward, 2 devices": group_flow,
    "DataParallel forward and backward, 2 devices": module_flow,
}


# Lines -------------------------------------------------------------------------------------------------

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_Function: TypeAlias = "ast.FunctionDef | ast.AsyncFunctionDef"


class Body(NamedTuple):
    """A function and the lines of code of its body."""

    file: str
    name: str
    lines: int


def sources() -> dict[str, str]:
    """Read all modules of lockstep, by their path in it."""
    return {str(path.relative_to(SOURCE)): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def code_lines(text: str) -> set[int]:
    """Return the numbers of lines that are not blank, comment or docstring.

    A string that stands alone is a docstring wherever it is, as those behind attributes are.

    >>> text = "'Module.'\\n\\nx = 1  # one\\n'About x.'\\n# more\\ny = (\\n\\n    2,\\n)\\n"
    >>> sorted(code_lines(text))
    [3, 6, 8, 9]
    """
    code = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and _is_text(node.value):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return code


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def bodies(file: str, text: str) -> list[Body]:
    """List the functions of a module with the lines of code of their bodies.

    >>> text = "def f(\\n    a,\\n):\\n    '''Say.'''\\n    # why\\n    b = a\\n\\n    return b\\n"
    >>> bodies("f.py", text)
    [Body(file='f.py', name='f', lines=2)]
    """
    code = code_lines(text)
    functions: list[_Function] = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        Body(
            file,
            node.name,
            len(code.intersection(range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1))),
        )
        for node in functions
    ]


def all_bodies() -> list[Body]:
    """List all functions of lockstep, the longest first."""
    found: list[Any] = [body for file, text in sources().items() for body in bodies(file, text)]
    return sorted(found, key=lambda body: -body.lines)


def main() -> None:
    """Print every figure."""
    write = sys.stdout.write
    write(f"{SOURCE}, Python {sys.version.split()[0]}\n\n{'one':50} {HEADING}\n")
    torch.set_num_threads(1)
    for name, flow in PATHS.items():
        write(f"{name:50}{flow()}\n")
    texts = sources()
    longest = max(texts, key=lambda file: len(texts[file].splitlines()))
    write(f"\nlines of code: {sum(len(code_lines(text)) for text in texts.values())}\n")
    write(f"longest file: {longest}, {len(texts[longest].splitlines())} lines\n")
    write("longest bodies: " + ", ".join(f"{b.name} ({b.file}) {b.lines}" for b in all_bodies()[:5]) + "\n")


if __name__ == "__main__":
    # A rank imports what it calls by the name of its module, and on a rank `__main__` is another module.
    from tests.support import flow  # noqa: PLW0406 - this file runs as `__main__`

    flow.main()
