"""An update can be read: how much code of ours it goes through, and how long files and functions are.

`python -m tests.support.flow` prints the figures. Up to Python 3.11 comprehensions count as calls; later ones have no
frames for most of them, so the same bounds are a little wider there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from lockstep.nest import tensors
from lockstep.plan import cut
from tests.support import flow

# calls, modules, changes of file; None where nothing is held
BOUNDS: dict[str, tuple[int, int | None, int | None]] = {
    "update, 2 devices, 2 shards": (180, 35, 112),
    "update, 1 device, 1 shard": (110, 33, 80),
    "update, rank 0 of 2, main thread": (250, None, None),
    "ReplicaGroup.forward and backward, 2 devices": (260, None, None),
}
FRAMES_TO_THE_LOSS = 9
LINES_OF_CODE = 31_599
MODULES = 275
LINES_OF_A_BODY = 60
LINES_OF_A_FILE = 600


@pytest.mark.parametrize("path", BOUNDS)
def test_what_an_action_goes_through(path: str) -> None:
    found = flow.PATHS[path]()
    figures = (found.calls, found.modules, found.file_changes)
    bounds = BOUNDS[path]
    beyond = [
        f"{figure} {name} (at most {bound})"
        for figure, bound, name in zip(figures, bounds, ("calls", "modules", "changes of file"), strict=True)
        if bound is not None and figure > bound
    ]
    assert not beyond


def test_frames_between_an_update_and_the_loss() -> None:
    assert 1 < flow.PATHS["update, 2 devices, 2 shards, a function as loss"]().frames <= FRAMES_TO_THE_LOSS


def test_lines_of_code_and_modules() -> None:
    sources = flow.sources()
    assert sum(len(flow.code_lines(text)) for text in sources.values()) <= LINES_OF_CODE
    assert len(sources) <= MODULES


def test_bodies_are_short() -> None:
    assert [body for body in flow.all_bodies() if body.lines > LINES_OF_A_BODY] == []


def test_files_are_short() -> None:
    lengths = {file: len(text.splitlines()) for file, text in flow.sources().items()}
    assert {file: length for file, length in lengths.items() if length > LINES_OF_A_FILE} == {}


# The measuring itself ----------------------------------------------------------------------------------


NEST = [torch.zeros(1), {"a": torch.zeros(1)}]


def steady(action: Callable[[], object], **options: int) -> flow.Flow:
    recorder = flow.Recorder()
    with recorder.installed():
        return recorder.steady(action, **options)


def test_each_call_counts() -> None:
    one = steady(lambda: cut(10, 4))
    assert (one.modules, one.file_changes) == (1, 1)
    assert 0 < one.functions_called <= one.calls

    def further() -> None:
        cut(10, 4)
        cut(10, 4)

    two = steady(further)
    assert (two.calls, two.modules, two.file_changes) == (2 * one.calls, 1, 1)


def test_files_change_by_thread_and_all_threads_count() -> None:
    def elsewhere() -> None:
        thread = threading.Thread(target=cut, args=(10, 4))
        thread.start()
        thread.join()

    one, nests = steady(lambda: cut(10, 4)), steady(lambda: tensors(NEST))
    assert steady(elsewhere).calls == one.calls

    def both() -> None:
        tensors(NEST)
        elsewhere()
        tensors(NEST)

    found = steady(both)
    assert found.calls == one.calls + 2 * nests.calls
    assert found.file_changes == 1 + nests.file_changes


def test_what_comes_seldom_does_not_count_and_what_comes_in_turn_does() -> None:
    count = iter(range(10**6))

    def every_third() -> None:
        for _ in range(1 + (next(count) % 3 == 0)):
            cut(10, 4)

    assert 2 * steady(every_third).calls == steady(every_third, period=3).calls


FUNCTION = '''
def f():
    """Say.

    More.
    """
    x = """a

b"""

    # why
    return [
        x,
    ]
'''


def test_bodies_and_lines_are_counted_as_code() -> None:
    assert len(flow.code_lines(FUNCTION)) == 7
    assert flow.bodies("f.py", FUNCTION) == [flow.Body("f.py", "f", 6)]
