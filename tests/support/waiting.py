"""Wait for what should come at once, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG = 60.0
"""Seconds that are waited for what should come at once; a busy machine may take some of them."""


def await_true(condition: Callable[[], bool], seconds: float = LONG) -> None:
    """Wait until a condition holds, and fail where that takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
