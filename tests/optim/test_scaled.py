"""`update` of lockstep's optimizers: loss scaling and float32 masters as faces of one engine."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import StateError
from lockstep.optim import CorrectedMomentumSGD, HookedOptimizer, MomentumSGD, hooks
from lockstep.precision import DynamicLossScale, RampLossScale, StaticLossScale

CLASSES = [CorrectedMomentumSGD, MomentumSGD]


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [
        nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype)),
        nn.Parameter(torch.tensor([0.5], dtype=dtype)),
    ]


def loss_of(weights: list[nn.Parameter], number: int, *, bad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    loss = sum((weight * torch.randn(weight.shape, generator=generator)).float().sum() for weight in weights)
    return loss * math.inf if bad else loss


def values(weights: list[nn.Parameter]) -> list[list[float]]:
    return [weight.tolist() for weight in weights]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("scale", [None, 1024.0, DynamicLossScale()])
def test_update_is_the_plain_loop(cls: type[HookedOptimizer], scale: Any) -> None:
    plain, ours = parameters(), parameters()
    reference, optimizer = cls(plain, lr=0.1), cls(ours, lr=0.1)
    for each in (reference, optimizer):
        each.add_hook(hooks.GradientClipping(0.5))
        each.add_hook(hooks.WeightDecay(0.1))
    if scale is not None:
        optimizer.loss_scaling(scale=scale)
    for number in range(4):
        reference.zero_grad()
        loss = loss_of(plain, number)
        loss.backward()
        reference.step()
        assert optimizer.update(loss_of, ours, number) == loss
    assert values(ours) == values(plain)
    assert optimizer.t == 4


def test_update_uses_the_gradients_that_are_there() -> None:
    weights = parameters()
    optimizer = CorrectedMomentumSGD(weights, lr=1.0, momentum=0.0)
    optimizer.set_loss_scale(4.0)
    (weights[0].sum() * 4).backward()
    assert optimizer.update() is None
    assert weights[0].tolist() == [0.0, -3.0]


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("scale", [8.0, None])
@pytest.mark.parametrize("masters", [False, True])
def test_a_bad_gradient_changes_nothing_but_the_scale(
    cls: type[HookedOptimizer], scale: float | None, masters: bool
) -> None:
    weights = parameters(torch.float16 if masters else torch.float32)
    optimizer = cls(weights, lr=0.1)
    optimizer.loss_scaling(scale=scale)
    optimizer.use_fp32_update(masters)
    noise, calls = hooks.GradientNoise(0.1), []
    optimizer.add_hook(noise)
    optimizer.add_hook(lambda _: calls.append(1), name="post", timing="post")
    for number in range(3):
        optimizer.update(loss_of, weights, number)
    before, counts = values(weights), (optimizer.t, noise.t, len(calls))
    remembered = copy.deepcopy(optimizer.state_dict()["state"])
    factor = optimizer.loss_scale.factor
    optimizer.update(loss_of, weights, 3, bad=True)
    assert values(weights) == before
    assert counts == (optimizer.t, noise.t, len(calls)) == (3, 3, 3)
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[key]["velocity"], remembered[key]["velocity"]) for key in after)
    assert optimizer.loss_scale.factor == (factor if scale else factor / 2)


def test_the_kinds_of_scale() -> None:
    optimizer = MomentumSGD(parameters())
    assert optimizer.loss_scale is None
    optimizer.loss_scaling()
    assert optimizer.loss_scale == RampLossScale(interval=1000)
    optimizer.loss_scaling(interval=5)
    assert optimizer.loss_scale == RampLossScale(interval=5)
    optimizer.loss_scaling(scale=64.0)
    assert optimizer.loss_scale == StaticLossScale(64.0)
    optimizer.loss_scaling(scale=DynamicLossScale())
    optimizer.set_loss_scale(128.0)
    assert optimizer.loss_scale == StaticLossScale(128.0)
    for number in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="`loss_scale` must be finite and above 0"):
            optimizer.set_loss_scale(number)
    with pytest.raises(ValueError, match="`interval` must be at least 1, got 0"):
        optimizer.loss_scaling(interval=0)
    assert optimizer.loss_scale == StaticLossScale(128.0)


def test_asking_and_choosing_in_a_loop_of_ones_own() -> None:
    weights = parameters()
    optimizer = MomentumSGD(weights, lr=0.1)
    optimizer.update_loss_scale()  # without a scale there is nothing to choose
    assert optimizer.is_safe_to_update()
    optimizer.loss_scaling(scale=DynamicLossScale(interval=1))
    loss_of(weights, 0).backward()
    assert optimizer.is_safe_to_update()
    optimizer.update_loss_scale()
    assert optimizer.loss_scale.factor == 16.0
    weights[1].grad.fill_(math.nan)
    assert not optimizer.is_safe_to_update()
    optimizer.update_loss_scale()
    assert optimizer.loss_scale.factor == 8.0


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("through", ["update", "step"])
def test_masters_move_as_float32_parameters_would(cls: type[HookedOptimizer], dtype: torch.dtype, through: str) -> None:
    halves = parameters(dtype)
    floats = [nn.Parameter(weight.detach().float()) for weight in halves]
    ours, reference = cls(halves, lr=1e-3), cls(floats, lr=1e-3)
    for each in (ours, reference):
        each.add_hook(hooks.WeightDecay(0.1))
        each.add_hook(hooks.GradientLARS(), group=0)
    ours.use_fp32_update()
    for number in range(5):
        if through == "update":
            ours.update(loss_of, halves, number)
        else:
            ours.step(lambda number=number: ours.zero_grad() or loss_of(halves, number).backward())
        for half, each in zip(halves, floats, strict=True):
            each.grad = half.grad.float()
        reference.step()
    assert [ours.masters.of(half).tolist() for half in halves] == values(floats)
    assert all(torch.equal(half, each.to(dtype)) for half, each in zip(halves, floats, strict=True))
    assert ours.state[halves[0]]["velocity"].dtype == torch.float32


def test_turning_masters_off_and_on() -> None:
    weights = parameters(torch.float16)
    optimizer = MomentumSGD(weights, lr=0.1)
    optimizer.use_fp32_update(False)
    assert optimizer.masters is None
    optimizer.update(loss_of, weights, 0)
    optimizer.use_fp32_update()
    masters = optimizer.masters
    optimizer.use_fp32_update(True)
    assert optimizer.masters is masters
    assert optimizer.state[weights[0]]["velocity"].dtype == torch.float32
    optimizer.update(loss_of, weights, 1)
    optimizer.use_fp32_update(False)
    assert optimizer.masters is None
    assert optimizer.state[weights[0]]["velocity"].dtype == torch.float16
    optimizer.update(loss_of, weights, 2)


def mixed(dtype: torch.dtype = torch.float16) -> tuple[list[nn.Parameter], CorrectedMomentumSGD]:
    weights = parameters(dtype)
    optimizer = CorrectedMomentumSGD(weights, lr=1e-3)
    optimizer.add_hook(hooks.GradientNoise(0.01))
    optimizer.loss_scaling(interval=3)
    optimizer.use_fp32_update()
    return weights, optimizer


@pytest.mark.parametrize("middle", [0, 1, 4, 5])
@pytest.mark.parametrize("copier", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])  # noqa: S301 - our own bytes
def test_a_save_and_a_load_in_the_middle_change_no_bit(middle: int, copier: Callable[[Any], Any]) -> None:
    weights, optimizer = mixed()
    saved: list[Any] = []
    for number in range(8):
        if number == middle:
            saved = [copier(optimizer.state_dict()), copier([weight.detach() for weight in weights])]
        optimizer.update(loss_of, weights, number, bad=number == 4)
    others, other = mixed()
    other.load_state_dict(saved[0])
    for weight, value in zip(others, saved[1], strict=True):
        weight.data.copy_(value)
    for number in range(middle, 8):
        other.update(loss_of, others, number, bad=number == 4)
    assert values(others) == values(weights)
    assert [other.masters.of(each).tolist() for each in others] == [
        optimizer.masters.of(each).tolist() for each in weights
    ]
    assert other.loss_scale == optimizer.loss_scale
    assert other.t == optimizer.t == 7


def test_a_copy_goes_on_by_itself() -> None:
    weights, optimizer = mixed()
    optimizer.update(loss_of, weights, 0)
    twins, twin = copy.deepcopy((weights, optimizer))
    for each, some in ((optimizer, weights), (twin, twins)):
        each.update(loss_of, some, 1)
    assert values(weights) == values(twins)
    assert twin.masters.of(twins[0]).tolist() == optimizer.masters.of(weights[0]).tolist()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda optimizer: optimizer.loss_scaling(scale=8.0), "must be that of a StaticLossScale"),
        (lambda optimizer: optimizer.use_fp32_update(False), "Call `loss_scaling` or `use_fp32_update`"),
    ],
)
def test_a_state_of_another_arrangement_is_refused(prepare: Callable[[Any], None], message: str) -> None:
    weights, optimizer = mixed()
    optimizer.update(loss_of, weights, 0)
    _, other = mixed()
    prepare(other)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(StateError, match=message):
        other.load_state_dict(optimizer.state_dict())
    after = other.state_dict()
    assert all(after[key] == before[key] for key in after if key != "masters")
