"""Find the communicator of this process."""

from __future__ import annotations

import os

import torch.distributed as dist

from lockstep.communicators.communicator import Communicator
from lockstep.communicators.environment import read_environment, timeout_for
from lockstep.communicators.local import LocalCommunicator
from lockstep.communicators.orphan import end_with_agent
from lockstep.communicators.process import ProcessCommunicator


def find_communicator(*, timeout: float | None = None) -> Communicator:
    """Join the processes of this run; alone, there is nothing to join.

    A process group that is initialised already is taken as it is. Otherwise the environment of torchrun,
    `lockstep run` or srun says who the others are, and the default group of torch.distributed is opened over
    gloo, and NCCL where there are GPUs. It stays open until the process ends.

    Args:
        timeout: Seconds that a rank waits for another, more than 0. None for what ``LOCKSTEP_TIMEOUT`` says
            (`lockstep run --timeout` sets it), else 60.

    Raises:
        ValueError: The environment is incomplete or contradicts itself.
        PeerError: A rank did not come in time.
        OrderError: The launcher has started the ranks again, with a store of addresses that still holds those
            of the dead; the message says what cures it. Or that launcher has ended.
    """
    end_with_agent(os.environ)
    seconds = timeout_for(timeout, os.environ)
    if dist.is_available() and dist.is_initialized():
        alone = dist.get_world_size() == 1
    else:
        found = read_environment(os.environ)
        alone = found is None or found.size == 1
    return LocalCommunicator() if alone else ProcessCommunicator(timeout=seconds)
