"""The generator that a thread draws from while it computes a shard."""

from __future__ import annotations

import threading

import torch


class ThreadStreams(threading.local):
    """What each thread draws from: one generator for each level of nested streams.

    Attributes:
        generator: The innermost open stream of the calling thread; None where none is open.
    """

    generator: torch.Generator | None = None

    def __init__(self) -> None:
        self._generators: list[torch.Generator] = []  # made once a level, then seeded anew
        self._depth = 0

    def push(self, seed: int) -> None:
        """Open a stream inside those that are open."""
        if self._depth == len(self._generators):
            self._generators.append(torch.Generator())
        generator = self._generators[self._depth]
        generator.manual_seed(seed)
        self._depth += 1
        self.generator = generator

    def pop(self) -> None:
        """Close the innermost stream and go back to the one around it."""
        self._depth -= 1
        self.generator = self._generators[self._depth - 1] if self._depth else None


# One for the process, because what reads it is: torch's kernels and the functions of `torch.random`.
THREAD = ThreadStreams()


def stream_is_open() -> bool:
    """Tell whether the calling thread is inside a `shard_stream`."""
    return THREAD.generator is not None
