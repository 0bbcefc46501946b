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
from tests.support.ranks import launch_on_ranks


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


@pytest.mark.parametrize("inside", [False, True])
def test_batch_normalization_over_processes_is_refused_by_name(inside: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) if inside else nn.BatchNorm1d(3)
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    where = " at '1'" if inside else ""
    uses: list[tuple[str, Callable[[], object]]] = [
        ("model", lambda: ls.ReplicaGroup(synchronized, devices=["cpu"])),
        ("module", lambda: ls.DataParallel(synchronized, devices=["cpu"])),
        ("model", lambda: updater_of(synchronized)),
    ]
    for argument, use in uses:
        rule = rf"`{argument}` must not exchange batch statistics .* got a SyncBatchNorm{where}\. Use BatchNorm"
        with pytest.raises(TypeError, match=rule):
            use()


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.zeros(2, 2))])
def test_torchscript_is_refused_by_name(make: Callable[[nn.Module], nn.Module], inside: bool) -> None:
    model = make(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval())
    model, where = (nn.Sequential(nn.ReLU(), model), " at '1'") if inside else (model, "")
    uses: list[tuple[str, Callable[[], object]]] = [
        ("model", lambda: ls.ReplicaGroup(model, devices=["cpu"])),
        ("module", lambda: ls.DataParallel(model, devices=["cpu"])),
        ("model", lambda: updater_of(model)),
    ]
    for argument, use in uses:
        rule = rf"`{argument}` must hold no TorchScript modules, .* got a \w+{where}\. Pass the module that it was"
        with pytest.raises(TypeError, match=rule):
            use()
    assert ls.OnDevice(model, "cpu")(torch.zeros(2, 2)).shape == (2, 3)


def updater_of(model: nn.Module) -> ls.ParallelUpdater:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [(torch.randn(2), torch.randn(3)) for _ in range(8)]
    return ls.ParallelUpdater(
        ls.BatchIterator(data, 8),
        optimizer,
        model,
        devices=["cpu"],
        num_shards=1,
        loss_fn=ls.supervised(nn.functional.mse_loss),
    )


def refusal_on_a_rank() -> str:
    model = nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3))
    with pytest.raises(TypeError) as raised:
        updater_of(model)
    return str(raised.value)


def statistics_on_a_rank() -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    updater = updater_of(model)
    updater.update()
    updater.finalize()
    return ls.digest(model)


def test_it_is_refused_inside_of_ranks_and_what_is_named_instead_works_there() -> None:
    first, second = launch_on_ranks(refusal_on_a_rank, 2)
    assert first == second
    assert "got a SyncBatchNorm at '1'. Use BatchNorm" in first
    assert launch_on_ranks(statistics_on_a_rank, 2) == [statistics_on_a_rank()] * 2
