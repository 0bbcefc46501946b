"""Sums and strides, schedules and epochs, measured work loads, and errors after the weights have moved."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.updaters.compute.clock import TIMED_COMPUTATIONS, UNTIMED_COMPUTATIONS
from tests.support.faults import fail, interrupt
from tests.support.gan import run, snapshot
from tests.support.runs import DAILY, Placement, cross_entropy, digests, finalized, train, updater_for
from tests.support.small_updater import updater_of
from tests.support.workloads import CONVNET, MLP


def test_shards_may_be_dealt_round_robin() -> None:
    seen: dict[str, list[list[float]]] = {}

    def build(name: str, **options: Any) -> ls.ParallelUpdater:
        def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            seen.setdefault(name, []).append(x.flatten().tolist())
            assert x.is_contiguous()
            return model(x).mean()

        model = nn.Linear(1, 1)
        return ls.StandardUpdater(
            ls.BatchIterator(TensorDataset(torch.arange(7.0).unsqueeze(1)), 7),
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            loss_fn=loss_fn,
            audit_every=0,
            **options,
        )

    with finalized(build("samples", num_shards=3, split="strided")) as updater:
        updater.update()
    with finalized(build("tensors", num_shards=3, split="strided")) as updater:
        updater.compute_gradients((torch.arange(7.0).unsqueeze(1),))
    assert seen["samples"] == seen["tensors"] == [[0.0, 3.0, 6.0], [1.0, 4.0], [2.0, 5.0]]


@pytest.mark.parametrize("options", [{"split": "strided"}, {"reduction": "sum"}], ids=repr)
@DAILY
def test_devices_are_only_places(placements: list[Placement], options: dict[str, Any]) -> None:
    found = digests(CONVNET, placements, num_shards=5, **options)
    assert len(set(found.values())) == 1, found
    assert train(CONVNET, num_shards=5) not in found.values()


def test_a_batch_smaller_than_the_devices_leaves_some_idle() -> None:
    with updater_of(nn.Linear(1, 1), devices=5, batch_size=2, split="strided", reduction="sum") as updater:
        assert [report.shard for report in updater.update().reports] == [0, 1]


def test_the_place_of_dealt_samples_is_told() -> None:
    def loss_fn(*_: Any) -> torch.Tensor:
        raise RuntimeError("sprung")

    with (
        updater_of(nn.Linear(1, 1), num_shards=2, split="strided", loss_fn=loss_fn) as updater,
        pytest.raises(ls.ReplicaError, match=r"shard 0 \(samples 0\.\.2 in steps of 2 of batch 1 of this update\)"),
    ):
        updater.update()


@pytest.mark.parametrize("loss_scale", [None, 8.0])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_sum_is_that_of_the_shards_means(accumulate: int, loss_scale: float | None) -> None:
    model = nn.Linear(1, 1, bias=False)
    x = torch.arange(8.0).unsqueeze(1)
    with updater_of(
        model,
        x,
        batch_size=4,
        devices=2,
        num_shards=2,
        accumulate=accumulate,
        loss_scale=loss_scale,
        reduction="sum",
    ) as updater:
        result = updater.update()
    means = [0.5, 2.5, 4.5, 6.5][: 2 * accumulate]
    assert model.weight.grad is not None
    assert model.weight.grad.item() == sum(means)
    assert result.weight == 4 * accumulate


def test_the_scale_of_an_optimizer_is_where_the_updaters_begins() -> None:
    def optimizer_of(model: nn.Module, scale: Any) -> ls.MomentumSGD:
        optimizer = ls.MomentumSGD(model.parameters(), lr=1.0)
        optimizer.loss_scaling(scale=scale)
        return optimizer

    model = nn.Linear(1, 1)
    own = ls.DynamicLossScale(8.0, interval=1)
    for given, expected in ((None, own), (4.0, ls.StaticLossScale(4.0))):
        with updater_of(model, optimizer=optimizer_of(model, own), loss_scale=given) as updater:
            assert updater.loss_scale == expected
            assert updater.update().loss_scale == expected.factor
            assert updater.get_optimizer("main").loss_scale == own
    nets = {"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}
    for scales, message in (
        ((own, own), None),
        ((own, 2.0), "`loss_scale` must be given for optimizers with"),
    ):
        optimizers = {name: optimizer_of(nets[name], scale) for name, scale in zip(nets, scales, strict=True)}
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            updater = ls.ParallelUpdater(
                ls.BatchIterator(torch.ones(4, 1), 4), optimizers, nets, devices=["cpu"], loss_fn=len
            )
            assert updater.loss_scale == own
            updater.finalize()


def test_a_sum_with_buffers_has_the_buffers_of_a_mean() -> None:
    found = []
    for reduction in ("mean", "sum"):
        model = nn.BatchNorm1d(1)
        x = torch.arange(8.0).unsqueeze(1)
        with updater_of(model, x, batch_size=8, num_shards=3, reduction=reduction) as updater:
            updater.update()
        found.append(ls.digest([buffer for _, buffer in model.named_buffers()]))
    assert found[0] == found[1]


# Epochs and schedules --------------------------------------------------------------------------


def rate_by_count(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda count: 2.0**-count)


@pytest.mark.parametrize(("batch_size", "updates", "epochs"), [(2, 4, 2), (4, 3, 3), (3, 2, 1)])
def test_every_epoch_is_told_once(batch_size: int, updates: int, epochs: int) -> None:
    model = nn.Linear(1, 1)
    optimizer = ls.MomentumSGD(model.parameters(), lr=1.0)
    with updater_of(model, batch_size=batch_size, optimizer=optimizer) as updater:
        for _ in range(updates):
            updater.update()
        assert updater.epoch == epochs
        assert optimizer.epoch == epochs
        with pytest.raises(ls.OrderError, match="must be called by the updater"):
            optimizer.new_epoch()


def test_epochs_may_be_left_to_the_user() -> None:
    model = nn.Linear(1, 1)
    optimizer = ls.MomentumSGD(model.parameters(), lr=1.0)
    with updater_of(model, optimizer=optimizer, auto_new_epoch=False) as updater:
        updater.update()
        assert optimizer.epoch == 0
        optimizer.new_epoch()


def test_epochs_go_on_after_a_resume() -> None:
    def build() -> Any:
        model = nn.Linear(1, 1)
        optimizer = ls.MomentumSGD(model.parameters(), lr=1.0)
        return updater_of(model, optimizer=optimizer)

    with build() as first, build() as second:
        for _ in range(3):
            first.update()
        second.load_state_dict(first.state_dict())
        assert second.get_optimizer("main").epoch == 3
        for updater in (first, second):
            updater.update()
        assert snapshot(first) == snapshot(second)


def test_schedules_follow_applied_updates_only() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = torch.tensor([[1.0], [float("inf")], [1.0], [1.0]])
    with updater_of(
        model, x, batch_size=1, optimizer=optimizer, scheduler=[rate_by_count(optimizer)], on_exhausted="skip"
    ) as updater:
        assert [updater.update().applied for _ in range(4)] == [True, False, True, True]
        assert optimizer.param_groups[0]["lr"] == 2.0**-3
        assert updater.applied_updates == 3


# Work loads ------------------------------------------------------------------------------------


def test_work_loads_are_measured_and_change_no_bit(caplog: pytest.LogCaptureFixture) -> None:
    main_thread: list[bool] = []

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        begin = time.perf_counter()
        loss = cross_entropy(model, x, target)
        in_main = threading.current_thread() is threading.main_thread()
        main_thread.append(in_main)
        if in_main:  # on a busy machine longer still, for there the other thread takes long too
            time.sleep(max(0.01, 10 * (time.perf_counter() - begin)))
        return loss

    with caplog.at_level(logging.INFO, logger="lockstep"):
        measured = updater_for(MLP, Placement(2, "auto"), num_shards=8, loss_fn=loss_fn)
        run(measured, UNTIMED_COMPUTATIONS + TIMED_COMPUTATIONS + 3)
    first, second = measured._engine.replicas.workloads
    assert 0 < first < second
    assert "Measured speeds, in samples per second" in caplog.text
    assert len(set(main_thread)) == 2
    with finalized(updater_for(MLP, num_shards=8)) as plain:
        for _ in range(UNTIMED_COMPUTATIONS + TIMED_COMPUTATIONS + 3):
            plain.update()
        assert ls.digest(measured.get_all_models()["main"]) == ls.digest(plain.get_all_models()["main"])


# After the weights have moved --------------------------------------------------------------------


def late_hook(trap: Callable[..., None]) -> ls.ParallelUpdater:
    updater = updater_for(CONVNET, Placement(2), num_shards=5)
    updater.get_optimizer("main").register_step_post_hook(trap)
    return updater


def late_fused_hook(trap: Callable[..., None]) -> ls.ParallelUpdater:
    """A fused step leaves version counters as they are."""
    updater = updater_for(CONVNET, Placement(2), num_shards=5, optimizer="fused")
    updater.get_optimizer("main").register_step_post_hook(trap)
    return updater


def late_data_hook(trap: Callable[..., None]) -> ls.ParallelUpdater:
    """So does one that writes to `parameter.data`, as optimizers of old do."""

    class Old(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            assert closure is None
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.add_(parameter.grad.data, alpha=-group["lr"])

    model = CONVNET.model()
    optimizer = Old(model.parameters(), {"lr": 0.05})
    optimizer.register_step_post_hook(trap)
    data = ls.BatchIterator(CONVNET.data(), 9, shuffle=True, seed=3)
    return ls.ParallelUpdater(data, optimizer, model, devices=["cpu", "cpu"], num_shards=4, loss_fn=cross_entropy)


def late_own_fused_hook(trap: Callable[..., None]) -> ls.ParallelUpdater:
    model = CONVNET.model()
    optimizer = ls.CorrectedMomentumSGD(model.parameters(), lr=0.05, fused=True)
    optimizer.add_hook(trap, name="trap", timing="post")
    data = ls.BatchIterator(CONVNET.data(), 9, shuffle=True, seed=3)
    return ls.ParallelUpdater(data, optimizer, model, devices=["cpu", "cpu"], num_shards=4, loss_fn=cross_entropy)


def late_own_hook(trap: Callable[..., None]) -> ls.ParallelUpdater:
    updater = updater_for(CONVNET, Placement(2), num_shards=5, optimizer="corrected")
    optimizer = updater.get_optimizer("main")
    assert isinstance(optimizer, ls.CorrectedMomentumSGD)
    optimizer.add_hook(trap, name="trap", timing="post")
    return updater


def late_scheduler(trap: Callable[..., None]) -> ls.ParallelUpdater:
    class Trapped(LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            trap()

    model = CONVNET.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scheduler = rate_by_count(optimizer)
    scheduler.__class__ = Trapped
    return ls.ParallelUpdater(
        ls.BatchIterator(CONVNET.data(), 9, shuffle=True, seed=3),
        optimizer,
        model,
        devices=["cpu", "cpu"],
        num_shards=4,
        loss_fn=cross_entropy,
        scheduler=scheduler,
    )


def late_iterator(trap: Callable[..., None]) -> ls.ParallelUpdater:
    class Trapped(ls.BatchIterator):
        def advance(self, num_batches: int = 1) -> None:
            super().advance(num_batches)
            trap()

    updater = updater_for(CONVNET, Placement(2), num_shards=5)
    updater.get_iterator().__class__ = Trapped
    return updater


LATE = {
    "hook": late_hook,
    "fused hook": late_fused_hook,
    "data hook": late_data_hook,
    "own hook": late_own_hook,
    "own fused hook": late_own_fused_hook,
    "scheduler": late_scheduler,
    "iterator": late_iterator,
}


@pytest.mark.each_value
@pytest.mark.parametrize("action", [fail, interrupt])
@pytest.mark.parametrize("where", LATE)
def test_what_comes_after_the_weights_moved_waits_for_the_end(where: str, action: Callable[[], None]) -> None:
    armed = False

    def trap(*_: Any) -> None:
        nonlocal armed
        if armed:
            armed = False
            action()

    updater = LATE[where](trap)
    run(updater, 3)
    armed = True
    with pytest.raises(RuntimeError if action is fail else KeyboardInterrupt):
        updater.update()
    assert not armed
    assert updater.iteration == 4
    assert run(updater, 7) == run(LATE[where](trap), 7)


def test_an_error_in_the_middle_of_the_weights_is_told_from_others() -> None:
    class Halting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            assert closure is None
            with torch.no_grad():
                for group in self.param_groups:
                    group["params"][0].add_(1.0)
            fail()

    model = nn.Linear(1, 1)
    with (
        updater_of(model, optimizer=Halting(model.parameters(), lr=0.1)) as updater,
        pytest.raises(ls.LockstepError, match="between the first weight that moved and the last: sprung"),
    ):
        updater.update()


@pytest.mark.parametrize("where", ["before", "within"])
def test_an_error_of_a_fused_step_is_told_from_one_before_it(where: str) -> None:
    """No version counter tells whether a fused kernel has moved the first of two groups."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    groups = [{"params": layer.parameters()} for layer in model]
    optimizer = torch.optim.SGD(groups, lr=0.1, fused=True)

    def spoil(*_: Any) -> None:
        if where == "before":
            fail()
        optimizer.param_groups[1]["lr"] = "fast"  # the first group moves, the second raises

    optimizer.register_step_pre_hook(spoil)
    before = ls.digest(model)
    with (
        updater_of(model, optimizer=optimizer) as updater,
        pytest.raises(ls.LockstepError if where == "within" else RuntimeError, match=r"between|sprung"),
    ):
        updater.update()
    assert (ls.digest(model) == before) == (where == "before")


def test_an_optimizer_that_wraps_another_one_need_not_call_its_base_class() -> None:
    class Halved(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base, self.param_groups, self.state = base, base.param_groups, base.state
            self.defaults = base.defaults

        def step(self, closure: Any = None) -> Any:
            before = [each.detach().clone() for each in self.param_groups[0]["params"]]
            result = self.base.step(closure)
            with torch.no_grad():
                for each, old in zip(self.param_groups[0]["params"], before, strict=True):
                    each.lerp_(old, 0.5)
            return result

    def trained(optimizer_of: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        batch = torch.randn(6, 4), torch.arange(6) % 2
        loss_fn = ls.supervised(torch.nn.functional.cross_entropy)
        updater = ls.ParallelUpdater([batch], optimizer_of(model.parameters()), model, num_shards=2, loss_fn=loss_fn)
        updater.update()
        updater.finalize()
        return [each.detach() for each in model.parameters()]

    halved = trained(lambda parameters: Halved(torch.optim.SGD(parameters, lr=1.0)))
    expected = trained(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    assert all(map(torch.allclose, halved, expected))
