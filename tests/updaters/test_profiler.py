"""torch.profiler sees all devices of an update where it is asked for all threads, as docs/updater.md says."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

import lockstep as ls


def updater() -> ls.ParallelUpdater:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ls.ParallelUpdater(
        [torch.ones(8, 4)],
        optimizer,
        model,
        devices=["cpu"] * 3,
        num_shards=6,
        loss_fn=lambda replica, inputs: replica(inputs).mean(),
    )


@pytest.mark.parametrize("all_threads", [False, True])
def test_the_profiler_sees_every_shard_with_all_threads(all_threads: bool) -> None:
    plain, profiled = updater(), updater()
    plain.update()
    plain.update()
    profiled.update()
    config = _ExperimentalConfig(profile_all_threads=True) if all_threads else None
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as found:
        profiled.update()
    profiled.finalize()
    events = [event for event in found.events() or () if event.name == "aten::linear"]
    assert len(events) == (6 if all_threads else 2) * 2  # two layers per shard, two shards per device
    assert [event.name for event in found.events() or () if "Optimizer" in event.name] == ["Optimizer.step#SGD.step"]
    assert len({event.thread for event in events}) == (3 if all_threads else 1)
    assert ls.digest(profiled.state_dict()) == ls.digest(plain.state_dict())
