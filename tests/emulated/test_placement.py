"""The placement law with memory, copies and streams as on GPUs: the CPU's digests on every kind of placement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.updaters.step import recomputation
from lockstep.updaters.step.recomputation import LEADS
from tests.support.emulated import observed
from tests.support.emulated.pool import on_emulated_devices
from tests.support.emulated.runs import NUM_UPDATES, ONE_CPU, PLACES, train_on, updater_on
from tests.support.runs import OPTIMIZERS, finalized, state_digest
from tests.support.workloads import CHECKPOINTED, CONVNET, MLP, REENTRANT, TRANSFORMER, WIDE, Workload

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODELS = [MLP, CONVNET, TRANSFORMER]
ALWAYS = {
    *(("mlp", "adamw", "fp32"), ("mlp", "fused", "bf16"), ("convnet", "adamw", "bf16"), ("convnet", "fused", "fp32")),
    ("transformer", "fused", "fp16"),
}
"""What each run of the tests has: each value of each option; `python3 dev.py slow` has the rest."""


def combinations(precisions: Sequence[tuple[str, str]]) -> list[Any]:
    """Return the models with each optimizer and precision, the less important ones marked as slow."""
    return [
        pytest.param(
            work,
            optimizer,
            precision,
            id=f"{work}-{optimizer}-{precision}",
            marks=[] if (work.name, optimizer, precision) in ALWAYS else pytest.mark.slow,
        )
        for work in MODELS
        for optimizer, precision in precisions
    ]


def options_of(precision: str) -> dict[str, Any]:
    """Return the arguments of a run; in float16 the first attempts overflow."""
    if precision == "fp32":
        return {}
    scale = {"loss_scale": ls.DynamicLossScale(factor=2.0**20), "max_tries": 30} if precision == "fp16" else {}
    return {"precision": f"{precision}-true", "dtype": DTYPES[precision], **scale}


@on_emulated_devices
@pytest.mark.parametrize(("work", "optimizer", "precision"), combinations(list(product(["adamw", "fused"], DTYPES))))
def test_updates_give_the_bits_of_the_cpu(work: Workload, optimizer: str, precision: str) -> None:
    options = options_of(precision)
    expected, _ = train_on(work, ONE_CPU, optimizer=optimizer, **options)
    found = {devices: train_on(work, devices, optimizer=optimizer, **options)[0] for devices in PLACES}
    assert set(found.values()) == {expected}, found


@on_emulated_devices
def test_the_float16_runs_do_overflow() -> None:
    with finalized(updater_on(MLP, PLACES[1], **options_of("fp16"))) as updater:
        assert updater.update().tries > 1


@on_emulated_devices
@pytest.mark.each_value
@pytest.mark.parametrize("work", [WIDE, CHECKPOINTED, REENTRANT], ids=repr)
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"split": "strided"}], ids=str)
def test_options_keep_the_bits_of_the_cpu(work: Workload, options: dict[str, Any]) -> None:
    expected, _ = train_on(work, ONE_CPU, updates=2, **options)
    found = {devices: train_on(work, devices, updates=2, **options)[0] for devices in PLACES[1::2]}
    assert set(found.values()) == {expected}, found


def trained_by_group(work: Workload, devices: tuple[str, ...], optimizer: str, dtype: torch.dtype) -> str:
    model = work.model().to(dtype).to(devices[0])
    made = OPTIMIZERS[optimizer](model)
    inputs, target = work.data(9)[:]
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    torch.manual_seed(11)
    with ls.ReplicaGroup(model, devices=list(devices), num_shards=3) as group:
        for _ in range(NUM_UPDATES):
            outputs = group.forward(inputs.to(devices[0]), training=True).detach().requires_grad_()
            nn.functional.cross_entropy(outputs, target.to(devices[0])).backward()
            group.backward(outputs.grad)
            made.step()
            group.zero_grad()
    return ls.digest(model, made)


def trained_by_module(work: Workload, devices: tuple[str, ...], optimizer: str, dtype: torch.dtype) -> str:
    net = ls.DataParallel(work.model().to(dtype), devices=list(devices), num_shards=3)
    made = OPTIMIZERS[optimizer](net)
    inputs, target = work.data(9)[:]
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    torch.manual_seed(11)
    for _ in range(NUM_UPDATES):
        made.zero_grad()
        nn.functional.cross_entropy(net(inputs.to(devices[0])), target.to(devices[0])).backward()
        made.step()
    net.release()
    return ls.digest(net, made)


@on_emulated_devices
@pytest.mark.each_value
@pytest.mark.parametrize(
    ("work", "optimizer", "precision"),
    # torch's fused SGD gives other bits from run to run for bfloat16 parameters on CPUs, whose kernel this is.
    combinations([("adamw", "fp32"), ("fused", "fp32"), ("adamw", "bf16")]),
)
@pytest.mark.parametrize("train", [trained_by_group, trained_by_module])
def test_groups_and_modules_give_the_bits_of_the_cpu(
    train: Any, work: Workload, optimizer: str, precision: str
) -> None:
    expected = train(work, ONE_CPU, optimizer, DTYPES[precision])
    with observed() as record:
        found = {devices: train(work, devices, optimizer, DTYPES[precision]) for devices in PLACES}
    assert set(found.values()) == {expected}, found
    assert not record.races, record.races


@on_emulated_devices
@pytest.mark.parametrize(
    "path", [(ONE_CPU, PLACES[1]), (PLACES[1], ONE_CPU), (PLACES[0], PLACES[4], PLACES[2])], ids=str
)
def test_states_move_between_types_of_devices(path: tuple[tuple[str, ...], ...]) -> None:
    with finalized(updater_on(CONVNET, ONE_CPU)) as whole:
        for _ in path:
            whole.update()
        expected = state_digest(whole)
    state = None
    for devices in path:
        with finalized(updater_on(CONVNET, devices)) as updater:
            if state is not None:
                updater.load_state_dict(state)
            updater.update()
            state, found = updater.state_dict(), state_digest(updater)
    assert found == expected


@on_emulated_devices
@pytest.mark.parametrize(("devices", "expected"), [(PLACES[1], len(LEADS)), (PLACES[2], 0)], ids=str)
def test_shards_are_computed_beside_each_other_on_different_devices_only(
    monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], expected: int
) -> None:
    # Replicas on one device compute in turn, so one of them would wait in vain for the other.
    made: list[int] = []
    before = recomputation.Turns
    monkeypatch.setattr(recomputation, "Turns", lambda *args: made.append(1) or before(*args))
    with ls.use_deterministic_kernels():
        train_on(MLP, devices, updates=4)
    assert len(made) == expected, made
