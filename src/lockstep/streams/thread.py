"""The generator that a thread draws from while it computes a shard."""

from __future__ import annotations

import threading

import torch


class ThreadStreams(threading.local):
    """What each thread draws from: one generator for each level of nested streams.

    Attributes:
        generator: The innermost open stream of the calling thread; None where none is open.
        generators: One for each level, open or not.
        depth: How many are open.
    """

    generator: torch.Generator | None = None

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []  # made once a level, then seeded anew
        self.depth = 0


# One for the process, because what reads it is: torch's kernels and the functions of `torch.random`.
THREAD = ThreadStreams()


def stream_is_open() -> bool:
    """Tell whether the calling thread is inside a `shard_stream`."""
    return THREAD.generator is not None
