"""Make calls of torch.distributed return that wait for a rank that is gone."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

NOBODYS_TAG: Final = 0x4C53
"""A tag that no message has."""


def break_group(group: dist.ProcessGroup) -> None:
    """Let every call that waits in a process group raise, now and from now on.

    NCCL has a call for that. Gloo's `abort` leaves waiting calls as they are; but a receive that runs out of
    time closes all connections of its group, so one is begun that nobody will ever answer.
    """
    backends = dist.get_backend_config(group)
    if "nccl" in backends:
        group._get_backend(torch.device("cuda")).abort()  # noqa: SLF001 - the only way to it
    if "gloo" in backends:
        peer = (group.rank() + 1) % group.size()
        with suppress(RuntimeError):  # that it runs out of time is what it is for
            group.recv([torch.empty(1)], peer, NOBODYS_TAG).wait(timedelta(milliseconds=1))
