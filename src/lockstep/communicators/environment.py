"""Find the processes of a run."""

from __future__ import annotations

import torch.distributed as dist

from lockstep.communicators.communicator import Communicator
from lockstep.communicators.local import LocalCommunicator
from lockstep.communicators.process import ProcessCommunicator


def find_communicator() -> Communicator:
    """Give what joins the processes of this run; alone, the communicator of a process that is alone."""
    if dist.is_available() and dist.is_initialized():
        return ProcessCommunicator()
    return LocalCommunicator()
