"""The loops that lockstep is compared with, each as its own documentation writes it."""

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
    """Make the update of a loop as everybody writes it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def update(step: int) -> None:
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()

    return update


def loop(workload: Workload, *, threads: int) -> Update:
    """One process, one replica."""
    torch.set_num_threads(threads)
    return plain_update(workload.model(), workload.batches(slice(None)))


def half(workload: Workload, rank: int) -> Update:
    """One of two processes that never talk, on half of each batch: the limit."""
    torch.set_num_threads(1)
    return plain_update(workload.model(), workload.batches(HALVES[rank]))


def ddp(workload: Workload, rank: int, port: int) -> Update:
    """One of two processes under DistributedDataParallel over gloo."""
    torch.set_num_threads(1)
    meet_at(port, rank)
    distributed.init_process_group("gloo", rank=rank, world_size=2)
    return plain_update(DistributedDataParallel(workload.model()), workload.batches(HALVES[rank]))


def accelerate(workload: Workload, rank: int, port: int) -> Update:
    """One of two processes under Hugging Face Accelerate."""
    from accelerate import Accelerator  # noqa: PLC0415 - measured where installed

    meet_at(port, rank)
    accelerator = Accelerator(cpu=True)
    bare = workload.model()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = accelerator.prepare(bare, optimizer)
    return prepared_update(model, optimizer, workload.batches(HALVES[rank]), accelerator.backward)


def fabric(workload: Workload, rank: int, port: int) -> Update:
    """One of two processes under Lightning Fabric."""
    from lightning_fabric import Fabric  # noqa: PLC0415 - measured where installed
    from lightning_fabric.plugins.environments import TorchElasticEnvironment  # noqa: PLC0415 - so too

    meet_at(port, rank)
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
    """Make the update of a loop whose model, optimizer and backward a library has taken over."""
    torch.set_num_threads(1)  # some set another number when they begin

    def update(step: int) -> None:
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        backward(cross_entropy(model(x), y))
        optimizer.step()

    return update


def meet_at(port: int, rank: int) -> None:
    """Say in the environment, as torchrun does, where two processes meet."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    places = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    os.environ.update(where, **{name: str(place) for name, place in places.items()})


def installed_peers() -> dict[str, Callable[..., Update]]:
    """Name the libraries that are there; none is asked for by lockstep itself."""
    known = {
        "Accelerate": ("accelerate", accelerate),
        "Fabric": ("lightning_fabric", fabric),
    }
    return {name: build for name, (package, build) in known.items() if find_spec(package) is not None}
