"""Run a function on several ranks: real processes, gloo, the loopback."""

from __future__ import annotations

import os
import pickle
import tempfile
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lockstep import ProcessCommunicator
from lockstep.communicators.failures.watch import Watch


def run_on_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """Call `function(communicator, *arguments)` on every rank; give what the ranks returned.

    Nobody watches them: a rank that fails ends the others by `mp.spawn`.
    """
    # A store that a rank still has open when another failed would hide that failure behind its own removal.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        mp.spawn(_rank_main, (function, size, folder, arguments), nprocs=size, join=True)
        return [pickle.loads((Path(folder) / f"{rank}").read_bytes()) for rank in range(size)]  # noqa: S301 - our own


def _rank_main(rank: int, function: Callable[..., Any], size: int, folder: str, arguments: tuple[Any, ...]) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    group = weakref.ref(dist.group.WORLD)
    try:
        result = function(ProcessCommunicator(watch=Watch()), *arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    assert group() is None, "something still holds the group, whose threads Python's end would meet"
    (Path(folder) / f"{rank}").write_bytes(pickle.dumps(result))
