"""Look for the end of a short exchange, before sleeping until it comes."""

from __future__ import annotations

import os
import time
from typing import Final

import torch.distributed as dist

PAIR: Final = 2
"""Ranks that have only each other to send to."""
LONGEST: Final = 300e-6
"""Seconds. Between ranks that are all there, an exchange takes about as long."""
LONGEST_PAIR: Final = 20e-3
"""Seconds, for two ranks. Their message comes behind gradients that the transport's own threads add up; for
more ranks a thread of this process does, which needs Python for it."""


def looks_for(num_ranks: int) -> float:
    """Give the seconds for which looking is worth a core.

    Args:
        num_ranks: How many there are, on this machine or on any.

    Returns:
        0 where this process may not use a core for each, so that one that looks would take it from another;
        and where the system does not say (macOS).

    >>> looks_for(1_000_000)
    0.0
    """
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        return 0.0
    if cores < num_ranks:
        return 0.0
    return LONGEST_PAIR if num_ranks == PAIR else LONGEST


def poll(work: dist.Work, seconds: float) -> None:
    """Look again and again whether work on the host has ended, for a short time.

    A thread that sleeps is woken late, and its core may go to another rank meanwhile, with which it then
    takes turns of milliseconds. What else can run on the core, such as the transport's own threads, runs
    between two looks.

    Args:
        work: What is under way. It has not always ended when this returns, and may have failed.
        seconds: The longest that this takes.
    """
    until = time.perf_counter() + seconds
    while not work.is_completed() and time.perf_counter() < until:
        os.sched_yield()
