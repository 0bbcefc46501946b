"""What a thread of an observed process is doing."""

from __future__ import annotations

import threading
from typing import Any


class Local(threading.local):
    """State of one thread.

    Attributes:
        shard: The shard that the thread computes, as (computation, shard); None outside of shards.
        experiment: Whether the shard is computed once more, to find out what it depends on.
        now: The time that the thread's user code sees; None for the real one.
        streams: The random streams of the shards that the thread computes.
        owner: The updater whose update runs.
        modes: The dispatch modes of a step.
        modules: The names of the modules whose forward runs, the innermost last.
    """

    shard: tuple[int, int] | None = None
    experiment: bool = False
    now: float | None = None
    streams: Any = None
    owner: Any = None
    modes: Any = None
    modules: tuple[str, ...] = ()


LOCAL = Local()
