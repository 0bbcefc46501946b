"""What is looked at for a short time, before a rank sleeps."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lockstep.communicators.transport.channel import SPIN_SECONDS_PAIR, spin_seconds_for, spin_wait

SECONDS = timedelta(seconds=60)


def joined() -> list[dist.ProcessGroupGloo]:
    """Make two ranks in two threads of this process."""
    store = dist.HashStore()

    def join(rank: int) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = SECONDS
        return dist.ProcessGroupGloo(store, rank, 2, options)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(join, range(2)))


def test_polling_ends_with_the_work_or_after_a_short_time() -> None:
    here, there = joined()
    tensor = torch.ones(3)
    work = here.allreduce([tensor])
    begin = time.perf_counter()
    spin_wait(work, SPIN_SECONDS_PAIR)
    assert time.perf_counter() - begin >= SPIN_SECONDS_PAIR
    assert not work.is_completed()
    other = there.allreduce([torch.full((3,), 2.0)])
    for each in (work, other):
        each.wait(SECONDS)
    begin = time.perf_counter()
    spin_wait(work, SECONDS.total_seconds())
    assert time.perf_counter() - begin < SECONDS.total_seconds()
    assert tensor.tolist() == [3.0, 3.0, 3.0]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not count usable cores")
def test_ranks_look_only_where_each_has_a_core() -> None:
    cores = len(os.sched_getaffinity(0))
    assert spin_seconds_for(cores) > 0.0
    assert spin_seconds_for(cores + 1) == 0.0
