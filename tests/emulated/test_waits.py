"""Which lines let the host wait for a device: every wait of an update is listed here."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

import lockstep as ls
from tests.support.emulated import observed
from tests.support.emulated.pool import on_emulated_devices
from tests.support.emulated.runs import updater_on
from tests.support.runs import cross_entropy, finalized
from tests.support.workloads import MLP, TRANSFORMER, Workload

VERDICT = "src/lockstep/precision/finite.py: copy to the CPU"
"""Whether gradients are finite, which the host reads once per attempt if it decides what follows."""
WEIGHT = "src/lockstep/updaters/loss.py: item"
"""The weight of a shard's loss, if the loss function returns it as a tensor."""
UPDATES = 3
PLACES = [("emulated:0",), ("emulated:0", "emulated:1"), ("emulated:1", "emulated:1")]


def waits_of(work: Workload, devices: tuple[str, ...], **options: Any) -> Counter[str]:
    """Count the waits of some updates after the first, which builds the replicas."""
    with finalized(updater_on(work, devices, num_shards=4, **options)) as updater:
        updater.update()
        with observed() as record:
            for _ in range(UPDATES):
                updater.update()
    assert not record.races, record.races
    return record.waits_by_file()


@on_emulated_devices
@pytest.mark.each_value
@pytest.mark.parametrize("work", [MLP, TRANSFORMER], ids=repr)
@pytest.mark.parametrize("devices", PLACES, ids=str)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_update_that_skips_by_a_fused_optimizer_waits_for_nothing(
    work: Workload, devices: tuple[str, ...], accumulate: int
) -> None:
    assert not waits_of(work, devices, optimizer="fused", on_overflow="skip", accumulate=accumulate)


@on_emulated_devices
@pytest.mark.each_value
@pytest.mark.parametrize("work", [MLP, TRANSFORMER], ids=repr)
@pytest.mark.parametrize("devices", PLACES, ids=str)
@pytest.mark.parametrize("optimizer", ["adamw", "fused"])
def test_an_update_that_may_try_again_waits_once_for_the_verdict(
    work: Workload, devices: tuple[str, ...], optimizer: str
) -> None:
    assert waits_of(work, devices, optimizer=optimizer, on_overflow="retry") == {VERDICT: UPDATES}


@on_emulated_devices
def test_a_weight_that_is_a_tensor_is_read_once_per_shard() -> None:
    def weighted(model: Any, inputs: torch.Tensor, target: torch.Tensor) -> ls.Loss:
        return ls.Loss(cross_entropy(model, inputs, target), weight=(target >= 0).sum())

    found = waits_of(MLP, ("emulated:0",), loss_fn=weighted, optimizer="fused", on_overflow="skip")
    assert found == {WEIGHT: 4 * UPDATES}


@on_emulated_devices
def test_groups_and_modules_wait_for_nothing() -> None:
    net = MLP.model().to("emulated:0")
    inputs = torch.randn(8, 6).to("emulated:0")
    for kind in (ls.ReplicaGroup, ls.DataParallel):
        parallel = kind(net, devices=["emulated:0", "emulated:1"], num_shards=4)
        for run in range(5):
            with observed() as record:
                if isinstance(parallel, ls.DataParallel):
                    parallel(inputs).square().mean().backward()
                else:
                    parallel.forward(inputs, training=True)
                    parallel.backward(torch.ones(8, 3, device="emulated:0"))
            # The first forward and the fourth one are checked.
            assert not (run in {1, 2, 4} and record.waits), record.waits_by_file()
            assert not record.races
        parallel.release()
