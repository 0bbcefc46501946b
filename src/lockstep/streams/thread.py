"""The generator that a thread draws from while it computes a shard."""

from __future__ import annotations

import threading

import torch


class ThreadStreams(threading.local):
    """The open streams of each thread, with one generator per level of nesting.

    Attributes:
        generator: The innermost open stream of the calling thread, or None if no stream is open.
        generators: The generators of all levels, whether or not they are in use.
        depth: The number of open streams.
    """

    generator: torch.Generator | None = None

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []
        self.depth = 0


# One per process, because the kernels of torch and the functions of `torch.random`, which read it, are shared too.
THREAD_STREAMS = ThreadStreams()
