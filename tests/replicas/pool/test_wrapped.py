"""Models that something else spreads over devices or processes are refused by name, wherever they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import lockstep as ls


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fully_sharded() -> nn.Module:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    return fsdp.FullyShardedDataParallel(nn.Linear(2, 1), device_id=torch.device("cpu"))


def sharded_in_place() -> nn.Module:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    return fsdp.fully_shard(nn.Linear(2, 1), mesh=init_device_mesh("cpu", (1,)))


KINDS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "DistributedDataParallel": (lambda: DistributedDataParallel(nn.Linear(2, 1)), "`model.module`"),
    "torch.nn.DataParallel": (lambda: nn.DataParallel(nn.Linear(2, 1)), "`model.module`"),
    "FullyShardedDataParallel": (fully_sharded, "as it was before FSDP"),
    "module sharded by fully_shard": (sharded_in_place, "as it was before FSDP"),
}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_wrapped_models_are_refused_by_name(kind: str, inside: bool) -> None:
    build, cure = KINDS[kind]
    model = build()
    if inside:
        model = nn.Sequential(nn.ReLU(), model)
    where = " at '1'" if inside else ""

    def updater() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ls.ParallelUpdater([torch.zeros(2, 2)], optimizer, model, devices=["cpu"])

    uses: list[tuple[str, Callable[[], object]]] = [
        ("model", lambda: ls.ReplicaGroup(model, devices=["cpu"])),
        ("module", lambda: ls.DataParallel(model, devices=["cpu"])),
        ("model", updater),
    ]
    for argument, use in uses:
        rule = f"`{argument}` must not be spread over devices or processes already, got a {kind}{where}."
        with pytest.raises(TypeError) as raised:
            use()
        assert str(raised.value).startswith(rule)
        assert cure in str(raised.value)
