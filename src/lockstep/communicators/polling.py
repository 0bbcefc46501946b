"""Look for the end of a short exchange, before sleeping until it comes."""

from __future__ import annotations

import os
import time
from typing import Final

import torch.distributed as dist

LONGEST: Final = 300e-6
"""Seconds. Between two ranks that are both there, an exchange takes about as long."""


def may_poll(num_ranks: int) -> bool:
    """Tell whether ranks that look instead of sleeping take no core from another rank.

    Args:
        num_ranks: How many there are, on this machine or on any.

    Returns:
        Whether this process may use a core for each; False where the system does not say (macOS).

    >>> may_poll(1_000_000)
    False
    """
    try:
        return len(os.sched_getaffinity(0)) >= num_ranks
    except AttributeError:
        return False


def poll(work: dist.Work) -> None:
    """Look again and again whether work on the host has ended, for a short time.

    A thread that sleeps is woken late, and its core may go to another rank meanwhile, with which it then
    takes turns of milliseconds. What else can run on the core, such as the transport's own threads, runs
    between two looks.

    Args:
        work: What is under way. It has not always ended when this returns, and may have failed.
    """
    until = time.perf_counter() + LONGEST
    while not work.is_completed() and time.perf_counter() < until:
        os.sched_yield()
