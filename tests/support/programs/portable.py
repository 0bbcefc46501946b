"""Train with portable kernels at several placements, and print what a test compares.

Its arguments are optimizers, "cases" for the digests of the cases that ship with lockstep, "larger" for
those of larger ones, or "rank" and an optimizer for a rank of a run.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import lockstep as ls

# Before the modules below, which may compute while they are imported.
ls.use_portable_kernels()

import torch  # noqa: E402
from torch import nn  # noqa: E402

from lockstep.communicators import kernel_class  # noqa: E402
from lockstep.optim import hooks  # noqa: E402
from lockstep.portable.cases import CASES  # noqa: E402
from lockstep.portable.golden import digests_of  # noqa: E402
from tests.support.portable_cases import LARGER  # noqa: E402
from tests.support.runs import OPTIMIZERS, Placement, finalized, state_digest, updater_for  # noqa: E402
from tests.support.workloads import CONVNET, MLP, RECURRENT, TRANSFORMER, Workload  # noqa: E402

UPDATES = 2
WORKLOADS = (MLP, CONVNET, RECURRENT, TRANSFORMER)


def lars(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = ls.MomentumSGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer.add_hook(hooks.GradientLARS())
    return optimizer


OPTIMIZERS["lars"] = lars


def trained(work: Workload, num_devices: int, optimizer: str) -> str:
    """Train on so many devices, and name the state."""
    with finalized(updater_for(work, Placement(num_devices), optimizer=optimizer, num_shards=5, seed=1)) as updater:
        for _ in range(UPDATES):
            updater.update()
        return state_digest(updater)


def rank(optimizer: str) -> dict[str, str]:
    """Train the workloads as a rank, on one device."""
    return {f"{work}": trained(work, 1, optimizer) for work in WORKLOADS}


def results(names: list[str]) -> dict[str, Any]:
    """Return the kernel class, and the digests of every workload at one to three devices."""
    digests = {
        f"{work} {name}": [trained(work, num_devices, name) for num_devices in (1, 2, 3)]
        for work in WORKLOADS
        for name in names
    }
    return {"class": kernel_class([torch.device("cpu")], {}), "digests": digests}


def main(arguments: list[str]) -> None:
    """Print the results as JSON."""
    if arguments == ["cases"]:
        found: dict[str, Any] = digests_of(CASES)
    elif arguments == ["larger"]:
        torch.manual_seed(0)  # models with dropout are among them
        found = digests_of(LARGER)
    elif arguments[0] == "rank":
        found = rank(arguments[1])
    else:
        found = results(arguments)
    sys.stdout.write(json.dumps(found) + "\n")
    if arguments[0] == "rank":
        sys.stdout.flush()
        # A rank that ends first would be lost to one that is slower.
        ls.find_communicator().barrier()
        # The emulator often hangs when a process ends that has threads of torch.distributed, here too.
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
