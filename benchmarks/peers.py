"""The training loops that lockstep is compared with, each written as in its own documentation."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import distributed, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from workloads import BATCH_SIZE, Workload

Update = Callable[[int], None]
HALVES = (slice(0, BATCH_SIZE // 2), slice(BATCH_SIZE // 2, BATCH_SIZE))


def plain_update(model: nn.Module, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> Update:
    """Return the update of a plain PyTorch loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def update(step: int) -> None:
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return update


def loop(workload: Workload, *, threads: int) -> Update:
    """Return the update of a single process with one replica."""
    torch.set_num_threads(threads)
    return plain_update(workload.model(), workload.batches(slice(None)))


def half(workload: Workload, rank: int) -> Update:
    """Return the update of one of two processes that do not communicate, on half of each batch: the limit."""
    # One thread each, because the two processes share two cores.
    torch.set_num_threads(1)
    return plain_update(workload.model(), workload.batches(HALVES[rank]))


def ddp(workload: Workload, rank: int, port: int) -> Update:
    """Return the update of one of two processes with DistributedDataParallel over gloo."""
    torch.set_num_threads(1)
    set_environment(port, rank)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    return plain_update(DistributedDataParallel(workload.model()), workload.batches(HALVES[rank]))


def accelerate(workload: Workload, rank: int, port: int) -> Update:
    """Return the update of one of two processes with Hugging Face Accelerate."""
    from accelerate import Accelerator  # noqa: PLC0415 - measured where installed

    set_environment(port, rank)
    accelerator = Accelerator(cpu=True)
    bare = workload.model()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = accelerator.prepare(bare, optimizer)
    return prepared_update(model, optimizer, workload.batches(HALVES[rank]), accelerator.backward)


def fabric(workload: Workload, rank: int, port: int) -> Update:
    """Return the update of one of two processes with Lightning Fabric."""
    from lightning_fabric import Fabric  # noqa: PLC0415 - measured where installed
    from lightning_fabric.plugins.environments import TorchElasticEnvironment  # noqa: PLC0415 - see above

    set_environment(port, rank)
    launched = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[TorchElasticEnvironment()])
    launched.launch()
    bare = workload.model()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = launched.setup(bare, optimizer)
    return prepared_update(model, optimizer, workload.batches(HALVES[rank]), launched.backward)


def prepared_update(
    model: Callable[[torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    backward: Callable[[torch.Tensor], object],
) -> Update:
    """Return the update of a loop whose model, optimizer and backward are wrapped by a library."""
    torch.set_num_threads(1)  # some libraries set another number when they start

    def update(step: int) -> None:
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        backward(cross_entropy(model(x), y))
        optimizer.step()

    return update


def set_environment(port: int, rank: int) -> None:
    """Set the environment variables of a process group of two ranks, as torchrun does."""
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ.update(addresses, **{name: str(value) for name, value in ranks.items()})


def installed_peers() -> dict[str, Callable[..., Update]]:
    """List the libraries that are installed; lockstep does not depend on any of them."""
    known = {
        "Accelerate": ("accelerate", accelerate),
        "Fabric": ("lightning_fabric", fabric),
    }
    return {name: build for name, (package, build) in known.items() if find_spec(package) is not None}
