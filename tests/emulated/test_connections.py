"""The first call that uses a device of a group is a collective one, as NCCL requires."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore

import lockstep as ls
from lockstep.communicators.failures.watch import Watch
from tests.support.emulated.pool import on_emulated_devices


@on_emulated_devices
def test_connections_of_a_device_are_opened_by_a_call_of_all_ranks() -> None:
    calls: list[tuple[str, str]] = []

    def recording(name: str, device_of: Any) -> Any:
        original = getattr(dist, name)

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append((name, str(device_of(arguments[0]))))
            return original(*arguments, **options)

        return call

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:  # noqa: ARG001 - the signature of torch
        return FakeProcessGroup._create_internal(rank, size)

    # Transfers of this group of torch's tests end at once, and move nothing.
    dist.Backend.register_backend("unconnected", create, devices=["emulated"])
    dist.init_process_group("unconnected", store=FakeStore(), rank=2, world_size=3)
    try:
        communicator = ls.ProcessCommunicator(watch=Watch())
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", recording("all_reduce", lambda tensor: tensor.device))
            patch.setattr(dist, "batch_isend_irecv", recording("batch_isend_irecv", lambda ops: ops[0].tensor.device))
            for device in ("emulated:0", "emulated:0", "emulated:1"):
                communicator.all_reduce([torch.ones(5, device=device)])
    finally:
        dist.destroy_process_group()
    collective = [call for call in calls if call[0] == "all_reduce"]
    assert collective == [("all_reduce", "emulated:0"), ("all_reduce", "emulated:1")]
    assert [call[0] for call in calls[:2]] == ["all_reduce", "batch_isend_irecv"]
    assert calls.index(("all_reduce", "emulated:1")) < calls.index(("batch_isend_irecv", "emulated:1"))
