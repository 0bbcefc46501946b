"""Laws of the loss scale: no NaN in the weights, bounds, recovery; and GradScaler as the contrast."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.compat.nnabla import LAMB
from lockstep.precision import LossScaler, MasterWeights
from tests.support.runs import Placement, finalized, state_digest, updater_for
from tests.support.workloads import CONVNET, MLP, TRANSFORMER, Workload

NUM_UPDATES = 1000
BAD = [math.inf, -math.inf, math.nan]
SCALES: list[ls.LossScale] = [
    ls.DynamicLossScale(2.0**16, interval=10),
    ls.DynamicLossScale(8.0, interval=1, minimum=1.0, maximum=2.0**60),
    ls.DynamicLossScale(3.0, growth=1.7, backoff=0.3, interval=4, minimum=1e-3, maximum=1e6),
    ls.RampLossScale(interval=20),
]

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "fused momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, fused=True),
    "fused adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True),
    "corrected": lambda weights: ls.CorrectedMomentumSGD(weights, lr=1e-3),
    "lamb": lambda weights: LAMB(weights, lr=1e-3, weight_decay=0.01),
}


@cache
def gradients(seed: int, num_updates: int = NUM_UPDATES) -> list[torch.Tensor]:
    """Draw gradients, from far too small to far too large, in runs of good and of bad ones."""
    generator = torch.Generator().manual_seed(seed)
    drawn, bad = [], True
    for turn in torch.rand(num_updates, generator=generator).tolist():
        bad = bad != (turn < 0.1)
        exponents = torch.rand(8, generator=generator) * 34 - 30
        values = torch.randn(8, generator=generator) * 10**exponents
        if bad:
            where, what = torch.randint(0, 24, (2,), generator=generator).tolist()
            values[where % 8] = BAD[what % 3]
        drawn.append(values)
    return drawn


@pytest.mark.each_value
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whatever_comes_the_weights_stay_finite(scale: ls.LossScale, name: str, dtype: torch.dtype) -> None:
    bounds = scale.state_dict()
    weight = nn.Parameter(torch.zeros(8, dtype=dtype))
    optimizer = OPTIMIZERS[name]([weight]) if dtype == torch.float32 else None
    target = optimizer or MasterWeights(OPTIMIZERS[name]([weight]))
    scaler = LossScaler(scale)
    moved = []
    for gradient in gradients(seed=1):
        before = weight.detach().clone()
        # Scaled as a backward in this format would do it, so that large ones overflow by themselves.
        weight.grad = (gradient * scaler.factor).to(dtype)
        scaler.step(target)
        scaler.update()
        assert bool(weight.isfinite().all())
        assert bounds["minimum"] <= scaler.factor <= bounds["maximum"]
        moved.append(not torch.equal(before, weight))
    # There were good ones and bad ones, many of both.
    assert 100 < sum(moved) < NUM_UPDATES - 100


class Spoiled(nn.Module):
    """A loss whose gradient is the sample itself: finite, infinite or NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@pytest.mark.each_value
@pytest.mark.parametrize("on_overflow", ["retry", "next", "skip"])
@pytest.mark.parametrize("fused", [False, True])
def test_whatever_comes_the_weights_of_an_updater_stay_finite(on_overflow: str, fused: bool) -> None:
    scale = ls.DynamicLossScale(2.0**16, interval=5, minimum=2.0**-14, maximum=2.0**24)
    model = Spoiled()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=fused)
    drawn = gradients(seed=2)
    # What no scale saves are the bad samples themselves; the good ones are far from overflow at 2**24.
    samples = [draw.clamp(-1e30, 1e30) if bool(draw.isfinite().all()) else draw for draw in drawn]
    updater = ls.ParallelUpdater(
        ls.BatchIterator(samples, 1, repeat=False),
        optimizer,
        model,
        devices=["cpu"],
        loss_scale=scale,
        on_overflow=on_overflow,
        max_tries=3,
    )
    applied = 0
    with finalized(updater):
        assert (updater.why_it_waits is None) == (fused and on_overflow == "skip")
        while True:
            try:
                applied += updater.update().applied
            except StopIteration:
                break
            assert bool(model.weight.isfinite().all())
            assert scale.minimum <= updater.loss_scale.factor <= scale.maximum
        assert applied == updater.applied_updates
        finite = sum(bool(draw.isfinite().all()) for draw in drawn)
        assert 100 < finite < NUM_UPDATES - 100
        assert 0 < applied <= finite
        if on_overflow != "next":
            assert updater.iteration == NUM_UPDATES
            assert applied == finite


def test_the_contrast_beside_it_grad_scaler_on_the_same_gradients() -> None:
    """Both on the same 1,000 gradients: three in four are bad, for long runs."""
    finite = [number % 300 >= 225 for number in range(NUM_UPDATES)]
    factors: dict[str, list[float]] = {}
    weights: dict[str, float] = {}
    for name in ("GradScaler", "LossScaler"):
        weight = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1e-3)
        scaler = (
            torch.amp.GradScaler("cpu")
            if name == "GradScaler"
            else LossScaler(ls.DynamicLossScale(2.0**16, interval=10))
        )
        factors[name] = []
        for good in finite:
            optimizer.zero_grad()
            scaler.scale((weight * (1.0 if good else math.inf)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            factors[name].append(scaler.get_scale() if name == "GradScaler" else scaler.factor)
        weights[name] = weight.item()
    assert min(factors["GradScaler"]) == 0.0
    assert math.isnan(weights["GradScaler"])
    assert min(factors["LossScaler"]) == 2.0**-14
    assert weights["LossScaler"] == pytest.approx(1.0 - 1e-3 * sum(finite), abs=1e-4)  # float32, 1,000 steps
    # Recovery: after 10 good ones in a row it is above the floor again, and goes on doubling every 10.
    assert factors["LossScaler"][225 + 10 - 1] == 2.0**-13
    assert factors["LossScaler"][299] == 2.0 ** (-14 + 75 // 10)


def test_recovery_after_the_last_bad_one_takes_a_known_number_of_updates() -> None:
    """From any factor f the scale is back at F after interval · log2(F / f) finite updates."""
    start, interval = 2.0**16, 10
    for num_bad in (1, 5, 30, 1000):
        scaler = LossScaler(ls.DynamicLossScale(start, interval=interval))
        for _ in range(num_bad):
            scaler.update(nonfinite=torch.tensor(1.0))
        steps_down = round(math.log2(start / scaler.factor))
        assert steps_down == min(num_bad, 30)  # the floor is 2**-14
        for number in range(1, interval * steps_down + 1):
            assert scaler.factor < start
            scaler.update(nonfinite=torch.tensor(0.0))
            assert scaler.factor == start * 2.0 ** (number // interval - steps_down)


def test_the_contrast_a_first_overflow_leaves_a_fused_velocity_uninitialised() -> None:
    # In torch 2.13 the kernel leaves the step out, and the new buffers as the allocator gave them.
    found = {}
    for kind in ("GradScaler", "LossScaler"):
        torch.full((1000,), 1e30)  # what the allocator is likely to hand out next
        weight = nn.Parameter(torch.ones(1000))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=True)
        scaler = torch.amp.GradScaler("cpu") if kind == "GradScaler" else LossScaler(2.0**16)
        scaler.scale((weight * math.nan).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        found[kind] = "momentum_buffer" in optimizer.state[weight]
    assert found == {"GradScaler": True, "LossScaler": False}


def test_an_update_of_an_optimizer_is_an_update_of_the_standard_updater() -> None:
    digests = []
    x, target = MLP.data(8)[:]
    for own in (False, True):
        model = MLP.model()
        optimizer = ls.CorrectedMomentumSGD(model.parameters(), lr=0.05)
        if own:
            before = torch.get_num_threads()
            torch.set_num_threads(1)
            optimizer.loss_scaling(scale=1024.0)
            optimizer.update(lambda m=model: nn.functional.cross_entropy(m(x), target))
            torch.set_num_threads(before)
        else:
            updater = ls.StandardUpdater(
                ls.BatchIterator(MLP.data(8), 8),
                optimizer,
                model,
                loss_fn=ls.supervised(nn.functional.cross_entropy),
                loss_scale=1024.0,
            )
            with finalized(updater):
                assert updater.update().applied
        digests.append(ls.digest(model))
    assert digests[0] == digests[1]


def overflowing(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in a format whose largest number is 64, for what flows back."""
    output = model(x)
    output.register_hook(lambda grad: torch.where(grad.abs() > 64, math.inf, grad))
    return nn.functional.cross_entropy(output, target)


@pytest.mark.each_value
@pytest.mark.parametrize("work", [MLP, CONVNET, TRANSFORMER], ids=repr)
@pytest.mark.parametrize("num_devices", [1, 2])
def test_retrying_is_to_have_begun_at_the_lower_scale(work: Workload, num_devices: int) -> None:
    """With dropout and buffers; and at 3/4 of a power of two, where another scale gives other bits."""
    started, digests = 3.0 * 2.0**18, {}
    low = started
    for name in ("retried", "low", "other"):
        factor = {"retried": started, "low": low, "other": low * 2 / 3}[name]
        scale = ls.DynamicLossScale(factor, minimum=1e-3)
        options = {"num_shards": 3, "loss_fn": overflowing, "loss_scale": scale}
        with finalized(updater_for(work, Placement(num_devices), **options)) as updater:
            results = [updater.update() for _ in range(2)]
            digests[name] = state_digest(updater)
        assert all(result.applied for result in results)
        assert [result.tries > 1 for result in results] == [name == "retried", False]
        low = results[-1].loss_scale if name == "retried" else low
    assert digests["retried"] == digests["low"]
    assert digests["retried"] != digests["other"]
