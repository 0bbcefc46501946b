"""LossScaler: the four lines, the order of steps, and what is read from the device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.compat.nnabla import LAMB
from lockstep.errors import OrderError, StateError
from lockstep.optim import CorrectedMomentumSGD, MomentumSGD
from lockstep.optim.hooks import (
    GradientClipping,
    GradientHardClipping,
    GradientHook,
    GradientLARS,
    GradientNoise,
    Lasso,
    WeightDecay,
)
from lockstep.precision import (
    DynamicLossScale,
    LossScaler,
    MasterWeights,
    RampLossScale,
    StaticLossScale,
    nonfinite_flag,
    unscale_,
)
from tests.support.optimizers import adagrad_takes_flags
from tests.support.reads import Reads

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "fused sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, fused=True),
    "fused momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, fused=True),
    "fused adamw": lambda weights: torch.optim.AdamW(weights, lr=0.1, fused=True),
    "fused adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1, fused=True),
    "adam": lambda weights: torch.optim.Adam(weights, lr=0.1),
    "corrected": lambda weights: CorrectedMomentumSGD(weights, lr=0.1),
    "plain momentum": lambda weights: MomentumSGD(weights, lr=0.1),
    "lamb": lambda weights: LAMB(weights, lr=0.1),
}
READING = {"sgd", "momentum", "adam", "corrected", "plain momentum", "lamb"}
if not adagrad_takes_flags():
    READING.add("fused adagrad")


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(5, 3, generator=generator).to(dtype)),
        nn.Parameter(torch.ones(7, dtype=dtype)),
    ]


def loss_of(weights: list[nn.Parameter], number: int, *, bad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + number)
    factors = [torch.randn(weight.shape, generator=generator).to(weight.dtype) for weight in weights]
    if bad:
        factors[0][0, 0] = math.inf
    return sum((weight * factor).sum() for weight, factor in zip(weights, factors, strict=True))


def train(
    make: Make, scaler: LossScaler | None, *, bad: tuple[int, ...] = (), dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    weights = parameters(dtype)
    optimizer = make(weights)
    for number in range(8):
        optimizer.zero_grad()
        if scaler is None:
            if number not in bad:
                loss_of(weights, number).backward()
                optimizer.step()
            continue
        scaler.scale(loss_of(weights, number, bad=number in bad)).backward()
        scaler.step(optimizer)
        scaler.update()
    return [weight.detach() for weight in weights]


def same(ours: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, others, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [2.0**-10, 1.0, 2.0**12])
def test_a_power_of_two_changes_no_bit(name: str, dtype: torch.dtype, factor: float) -> None:
    plain = train(OPTIMIZERS[name], None, dtype=dtype)
    assert same(train(OPTIMIZERS[name], LossScaler(factor), dtype=dtype), plain)


def test_the_law_is_not_empty_another_factor_changes_bits() -> None:
    plain = train(OPTIMIZERS["sgd"], None)
    assert not same(train(OPTIMIZERS["sgd"], LossScaler(3.0)), plain)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("bad", [(0,), (0, 1, 2), (3,), (2, 7)])
def test_a_left_out_update_is_as_if_it_had_not_been(name: str, bad: tuple[int, ...]) -> None:
    scaler = LossScaler(DynamicLossScale(factor=2.0**10))
    assert same(train(OPTIMIZERS[name], scaler, bad=bad), train(OPTIMIZERS[name], None, bad=bad))
    assert scaler.factor == 2.0 ** (10 - len(bad))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_is_read(name: str) -> None:
    weights = parameters()
    optimizer, scaler = OPTIMIZERS[name](weights), LossScaler()
    for number in range(3):
        optimizer.zero_grad()
        scaler.scale(loss_of(weights, number)).backward()
        on_device = scaler.skips_on_device(optimizer)
        assert on_device == (name not in READING and (name != "fused momentum" or number > 0))
        # Looking at the factor is free on a CPU, and is done on none but CPUs.
        scaler.unscale_(optimizer)
        with Reads() as in_step:
            scaler.step(optimizer)
        with Reads() as in_update:
            scaler.update()
        if on_device:
            bare = copy.deepcopy(optimizer)
            with Reads() as in_bare_step:
                bare.step()
            assert in_step.count == in_bare_step.count
        assert in_update.count == 0


@pytest.mark.gpu
def test_nothing_waits_for_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    weights = [nn.Parameter(weight.detach().cuda()) for weight in parameters()]
    optimizer = torch.optim.AdamW(weights, lr=0.1, fused=True)
    scaler = LossScaler()
    factors = [torch.ones_like(weight) for weight in weights]
    for number in range(3):
        if number:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.zero_grad()
            loss = sum((weight * factor).sum() for weight, factor in zip(weights, factors, strict=True))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert scaler.factor == 8.0


def test_hooks_and_clipping_see_true_gradients() -> None:
    seen = []
    for scaler in (LossScaler(1.0), LossScaler(2.0**10)):
        weights = parameters()
        optimizer = OPTIMIZERS["fused adamw"](weights)
        optimizer.register_step_pre_hook(GradientClipping(0.5))
        optimizer.register_step_pre_hook(lambda *_, w=weights: seen.append([each.grad.clone() for each in w]))
        scaler.scale(loss_of(weights, 0)).backward()
        scaler.step(optimizer)
    assert same(*seen)
    assert math.isclose(torch.cat([grad.flatten() for grad in seen[0]]).norm().item(), 0.5, rel_tol=1e-6)


@pytest.mark.parametrize("name", ["adam", "fused adamw"])
@pytest.mark.parametrize("timing", ["pre", "post"])
def test_no_hook_is_called_where_the_step_is_left_out(name: str, timing: str) -> None:
    calls = []
    weights = parameters()
    optimizer, scaler = OPTIMIZERS[name](weights), LossScaler()
    register = getattr(optimizer, f"register_step_{timing}_hook")
    register(lambda *_: calls.append(number))
    for number in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(weights, number, bad=number in {0, 2})).backward()
        assert not scaler.skips_on_device(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert calls == [1, 3]


@pytest.mark.parametrize(
    ("hook", "waits"),
    [
        (WeightDecay(0.1), False),
        (Lasso(0.1), False),
        (GradientClipping(0.1), False),
        (GradientHardClipping(-1.0, 1.0), False),
        (GradientLARS(), False),
        (GradientNoise(0.1), True),
    ],
)
def test_hooks_that_only_change_gradients_need_no_look_at_the_flag(hook: GradientHook, waits: bool) -> None:
    found = []
    for fused in (False, True):
        weights, scaler = parameters(), LossScaler()
        optimizer = torch.optim.AdamW(weights, lr=0.1, fused=fused)
        optimizer.register_step_pre_hook(copy.deepcopy(hook))
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(weights, number, bad=number == 1)).backward()
            assert scaler.skips_on_device(optimizer) == (fused and not waits)
            scaler.step(optimizer)
            scaler.update()
        found.append([weight.detach() for weight in weights])
        assert all(weight.isfinite().all() for weight in weights)
    for ours, others in zip(*found, strict=True):
        # A fused step rounds otherwise than one of several kernels.
        torch.testing.assert_close(ours, others)


def test_unscale_before_step_for_clipping_in_the_loop() -> None:
    weights = parameters()
    optimizer, scaler = torch.optim.SGD(weights, lr=1.0), LossScaler(64.0)
    before = [weight.detach().clone() for weight in weights]
    scaler.scale(loss_of(weights, 0)).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(weights, 1.0)
    scaler.step(optimizer)
    moved = torch.cat([(new - old).flatten() for new, old in zip(weights, before, strict=True)])
    assert math.isclose(moved.norm().item(), 1.0, rel_tol=1e-5)  # float32


def test_a_quotient_past_the_largest_number_is_left_out() -> None:
    weight = nn.Parameter(torch.zeros(1))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), LossScaler(2.0**-14)
    weight.grad = torch.tensor([1e38])
    scaler.step(optimizer)
    assert weight.item() == 0.0


def test_several_optimizers_step_by_their_own_gradients_and_share_the_scale() -> None:
    good, bad = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in (good, bad)]
    scaler = LossScaler(DynamicLossScale(8.0))
    good.grad, bad.grad = torch.tensor([8.0]), torch.tensor([math.nan])
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert (good.item(), bad.item(), scaler.factor) == (-1.0, 0.0, 4.0)


def test_the_loss_is_scaled_in_float32_at_least() -> None:
    loss = torch.tensor(3.0, dtype=torch.float16)
    scaled = LossScaler(2.0**20).scale(loss)
    assert (scaled.dtype, scaled.item()) == (torch.float32, 3.0 * 2**20)
    assert LossScaler(2.0).scale(loss.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1000.7, 2.0**10])
def test_a_loss_in_half_precision_is_divided_by_what_multiplied_it(dtype: torch.dtype, factor: float) -> None:
    weight = nn.Parameter(torch.tensor([3.0, 5.0]))
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), LossScaler(factor)
    for loss in ((weight * weight).sum().to(dtype), (weight * weight).sum()):
        weight.grad = None
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.testing.assert_close(weight.grad, 2 * weight.detach(), rtol=2.0**-23, atol=0.0)  # two roundings
        scaler.update(nonfinite=torch.zeros(()))


def test_several_losses_are_scaled_in_their_containers() -> None:
    scaler = LossScaler(8.0)
    one, two = torch.tensor(1.0), torch.tensor(2.0, dtype=torch.float16)
    assert scaler.scale([one, (two, {"three": 3 * one})]) == [8.0, (16.0, {"three": 24.0})]
    assert scaler.scale((one,)) == (8.0,)


@pytest.mark.parametrize("loss", [3.0, [], None, {"loss": 1.0}])
def test_what_holds_no_loss_is_refused(loss: Any) -> None:
    with pytest.raises(TypeError, match=f"a tensor or hold tensors, got a {type(loss).__name__} without"):
        LossScaler().scale(loss)


def test_an_optimizer_that_is_gone_is_not_taken_for_another() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    scaler = LossScaler(2.0)
    scaler.scale(weight.sum()).backward()
    for _ in range(20):
        scaler.step(torch.optim.SGD([weight], lr=0.0))  # dies at once, and leaves its address to the next


def test_calls_out_of_order_are_refused() -> None:
    weights = parameters()
    optimizer, scaler = torch.optim.SGD(weights), LossScaler()
    with pytest.raises(OrderError, match="`update` must follow"):
        scaler.update()
    loss_of(weights, 0).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(OrderError, match="`unscale_` must be called at most once"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(OrderError, match="`step` must be called once"):
        scaler.step(optimizer)


@pytest.mark.parametrize("scale", [DynamicLossScale(64.0, interval=2), RampLossScale(interval=2), StaticLossScale(4.0)])
@pytest.mark.parametrize("middle", range(9))
def test_a_save_and_a_load_in_the_middle_change_nothing(scale: Any, middle: int) -> None:
    events, found = [0.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0], []
    for stop in (None, middle):
        scaler, factors = LossScaler(scale), []
        for number, event in enumerate(events):
            if number == stop:
                saved = scaler.state_dict()
                scaler = LossScaler(scale)
                scaler.load_state_dict(saved)
            scaler.update(nonfinite=torch.tensor(event))
            factors.append(scaler.factor)
        found.append(factors)
    assert found[0] == found[1]


def test_a_state_of_another_kind_is_refused() -> None:
    scaler = LossScaler(8.0)
    with pytest.raises(StateError, match="must be that of a StaticLossScale, got 'DynamicLossScale'"):
        scaler.load_state_dict(LossScaler().state_dict())
    with pytest.raises(StateError, match="unknown: 'stage'"):
        scaler.load_state_dict({**scaler.state_dict(), "stage": 1})
    assert scaler.factor == 8.0


@pytest.mark.parametrize("factor", [2.0**-3, 16.0])
def test_sparse_gradients_are_those_of_the_plain_loop(factor: float) -> None:
    found = []
    for scaler in (None, LossScaler(factor)):
        torch.manual_seed(0)
        embedding = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
        loss = embedding(torch.tensor([1, 1, 3])).square().sum()  # row 1 gets a gradient in two parts
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
        found.append(embedding.weight.detach())
    assert same(*[[each] for each in found])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("factor", [0.25, 1.0, 3.0, 1024.0])
def test_one_bad_element_anywhere_is_found(dtype: torch.dtype, value: float, factor: float) -> None:
    for where in range(0, 70, 23):
        gradients = [torch.ones(70, dtype=dtype), torch.ones(3, dtype=torch.float32)]
        gradients[0][where] = value
        assert nonfinite_flag(gradients, torch.device("cpu")).item() == 1.0
        assert unscale_(gradients, torch.tensor(factor, dtype=torch.float64)).item() == 1.0
        # As torch divides by a number: in float32 at least, rounded once.
        assert torch.equal(gradients[1], torch.ones(3) / factor)


def test_masters_in_the_loop_are_unscaled_in_float32() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    masters = MasterWeights(torch.optim.SGD([weight], lr=1.0))
    scaler = LossScaler(2.0**14)
    weight.grad = torch.tensor([2.0**-8, 1.0], dtype=torch.float16)  # the first quotient is below float16
    scaler.step(masters)
    assert masters.of(weight).tolist() == [1 - 2.0**-22, 1 - 2.0**-14]
    weight.grad[0] = math.inf
    scaler.update()
    scaler.step(masters)
    assert masters.of(weight).tolist() == [1 - 2.0**-22, 1 - 2.0**-14]


def test_an_optimizer_with_masters_of_its_own_is_scaled_on_them() -> None:
    found = []
    for own in (False, True):
        weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
        optimizer = CorrectedMomentumSGD([weight], lr=1.0)
        optimizer.use_fp32_update()
        scaler = LossScaler(2.0**14)
        if own:
            optimizer.set_loss_scale(2.0**14)
        for value in (1.0, math.nan, 2.0):
            weight.grad = torch.tensor([2.0**-8, value], dtype=torch.float16)
            if own:
                optimizer.update()
            else:
                scaler.step(optimizer)
                scaler.update()
        found.append((optimizer.masters.of(weight).tolist(), optimizer.t, weight.tolist()))
    assert found[0] == found[1]
    # 2**-22 in the first step and, by momentum, 1.9 times that in the second; float16 has no such numbers.
    assert found[0][0][0] == torch.tensor(1 - 2.9 * 2.0**-22).item()
    assert found[0][1:] == (2, [1.0, 1.0])


def test_a_scheduler_sees_the_steps_taken_on_masters() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    masters, scaler = MasterWeights(optimizer), LossScaler(1.0)
    for _ in range(2):
        weight.grad = torch.full_like(weight, 2.0**-10)
        scaler.step(masters)
        scaler.update()
        scheduler.step()
    assert masters.of(weight).item() == 1 - 2.0**-10 - 2.0**-11


def test_a_scaler_that_is_not_enabled_changes_nothing() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = LossScaler(1024.0, enabled=False)
    loss = (weight * torch.inf).sum()
    assert scaler.scale(loss) is loss
    assert not scaler.is_enabled()
    assert scaler.factor == 1.0
    weight.grad = torch.ones(1)
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 3.0) == 3.0
    scaler.update()
    assert weight.item() == 0.5
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"anything": 1})


def test_a_new_scale_replaces_the_factor_and_keeps_the_rest() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = LossScaler(DynamicLossScale(factor=8.0, interval=3))
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(weight.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    before = scaler.loss_scale
    scaler.update(torch.tensor(64.0))
    assert scaler.loss_scale == replace(before, factor=64.0)
    scaler.update(16.0)
    assert scaler.factor == 16.0
    with pytest.raises(ValueError, match="factor"):
        scaler.update(-1.0)
    assert scaler.factor == 16.0


def test_arguments_reach_the_step_and_a_closure_is_refused() -> None:
    class Told(torch.optim.SGD):
        def step(self, closure: Any = None, *, told: str = "") -> Any:
            super().step(closure)
            return told

    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = Told([weight], lr=0.5)
    scaler = LossScaler(4.0)
    scaler.scale(weight.sum()).backward()
    with pytest.raises(ValueError, match="`closure` must not be given"):
        scaler.step(optimizer, lambda: 1.0)
    with pytest.raises(ValueError, match="`closure` must not be given"):
        scaler.step(optimizer, closure=lambda: 1.0)
    assert scaler.step(optimizer, None, told="yes") == "yes"
    assert weight.item() == 0.5
