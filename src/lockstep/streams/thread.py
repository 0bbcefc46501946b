"""The generator that a thread draws from while it computes a shard."""

from __future__ import annotations

import threading

import torch


class ThreadStreams(threading.local):
    """The open stream of each thread.

    Attributes:
        generator: The innermost open stream of the calling thread, or None if no stream is open.
    """

    generator: torch.Generator | None = None

    @property
    def current(self) -> torch.Generator:
        """The generator that the calling thread draws from: its stream, or the default generator."""
        return torch.default_generator if self.generator is None else self.generator


# One per process, because the kernels of torch and the functions of `torch.random`, which read it, are shared too.
THREAD_STREAMS = ThreadStreams()
