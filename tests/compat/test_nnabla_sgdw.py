"""SGDW: momentum with the decay beside the velocity, on the schedule of the rate."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from lockstep.compat.nnabla import SGDW
from lockstep.errors import StateError
from lockstep.optim import MomentumSGD, UpdateSchedule, hooks, schedule
from tests.support.optimizers import parameters, put_grads, same_bits


def test_the_rule_as_it_is_written() -> None:
    weights = parameters(torch.float64)
    optimizer = SGDW(weights, lr=0.2, momentum=0.9, weight_decay=0.1)
    expected = [weight.detach().clone() for weight in weights]
    velocities = [torch.zeros_like(weight) for weight in weights]
    for step in range(6):
        optimizer.lr = lr = 0.2 / (1 + step)
        put_grads(weights, step)
        for value, velocity, weight in zip(expected, velocities, weights, strict=True):
            velocity.copy_(0.9 * velocity + lr * weight.grad)
            value.copy_((1 - 0.1 * lr / 0.2) * value - velocity)
        optimizer.step()
    for weight, value in zip(weights, expected, strict=True):
        # The decay is taken off in another order of operations.
        torch.testing.assert_close(weight.detach(), value, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("correction", [False, True])
def test_without_decay_it_is_momentum_sgd_to_the_bit(correction: bool) -> None:
    ours, theirs = parameters(), parameters()
    optimizers = [
        SGDW(ours, lr=0.1, weight_decay=0.0, correction=correction),
        MomentumSGD(theirs, lr=0.1, correction=correction),
    ]
    for step in range(4):
        for weights, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.lr = 0.1 / (1 + step)
            put_grads(weights, step, missing=(step,))
            optimizer.step()
    assert same_bits(ours, theirs)


def test_decay_stays_out_of_the_velocity_where_the_hook_puts_it_in() -> None:
    weights = parameters()
    beside, inside = SGDW(weights, weight_decay=0.1), MomentumSGD(parameters())
    inside.add_hook(hooks.WeightDecay(0.1))
    velocities = []
    for optimizer in (beside, inside):
        first = optimizer.param_groups[0]["params"][0]
        first.grad = torch.zeros_like(first)
        optimizer.step()
        velocities.append(optimizer.state[first]["velocity"])
    assert velocities[0].eq(0).all()
    assert velocities[1].ne(0).all()


def test_what_does_not_move_does_not_decay() -> None:
    still, frozen, zero = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    frozen.grad = torch.ones(1)
    groups = [{"params": [still]}, {"params": [frozen], "frozen": True}]
    optimizer = SGDW([*groups, {"params": [zero], "missing_grad": "zero"}], weight_decay=0.25)
    optimizer.step()
    assert (still.item(), frozen.item(), zero.item()) == (1.0, 1.0, 0.75)


def test_a_group_has_a_decay_and_a_first_rate_of_its_own() -> None:
    first, second = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    groups = [{"params": [first]}, {"params": [second], "weight_decay": 0.5, "initial_lr": 0.25}]
    optimizer = SGDW(groups, lr=0.125, weight_decay=0.25)
    for weight in (first, second):
        weight.grad = torch.zeros(1)
    optimizer.step()
    assert (first.item(), second.item()) == (0.75, 0.75)


def test_a_rate_in_a_tensor_keeps_its_first_value() -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = SGDW([weight], lr=torch.tensor(0.5), weight_decay=0.5)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    weight.grad = torch.zeros(1)
    optimizer.step()
    assert weight.item() == 0.75


def test_decay_follows_a_schedule_of_torchs_and_of_ours() -> None:
    made: list[Any] = []
    for build in (
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        lambda optimizer: UpdateSchedule(optimizer, schedule.steps([1, 2], gamma=0.5)),
    ):
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = SGDW([weight], lr=0.5, weight_decay=0.5)
        scheduler = build(optimizer)
        for _ in range(3):
            weight.grad = torch.zeros(1)
            optimizer.step()
            scheduler.step()
        made.append(weight.item())
    assert made == [0.5 * 0.75 * 0.875] * 2


def test_saved_state_goes_on_to_the_same_bits_with_its_first_rate() -> None:
    straight = parameters()
    optimizer = SGDW(straight, lr=0.5, weight_decay=0.1)
    for step in range(6):
        optimizer.lr = 0.5 / (1 + step)
        put_grads(straight, step)
        optimizer.step()
        if step == 2:
            resumed = [torch.nn.Parameter(weight.detach().clone()) for weight in straight]
            saved = copy.deepcopy(optimizer.state_dict())
    other = SGDW(resumed, lr=0.125)
    other.load_state_dict(saved)
    for step in range(3, 6):
        other.lr = 0.5 / (1 + step)
        put_grads(resumed, step)
        other.step()
    assert same_bits(straight, resumed)
    for key in ("weight_decay", "initial_lr"):
        (group,) = saved["param_groups"]
        lacking = {**saved, "param_groups": [{name: each for name, each in group.items() if name != key}]}
        with pytest.raises(StateError, match=rf"missing: '{key}'"):
            other.load_state_dict(lacking)


def test_a_state_from_before_the_options_of_torchs_sgd_loads() -> None:
    weights = parameters()
    optimizer = SGDW(weights, weight_decay=0.1)
    put_grads(weights, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for option in ("dampening", "nesterov", "maximize"):
        del saved["param_groups"][0][option]
    other = SGDW(parameters())
    other.load_state_dict(saved)
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_masters_decay_in_float32() -> None:
    half = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    full = torch.nn.Parameter(torch.ones(8))
    optimizers = [SGDW([half], weight_decay=2.0**-12), SGDW([full], weight_decay=2.0**-12)]
    optimizers[0].use_fp32_update()
    for _ in range(20):
        for optimizer, weight in zip(optimizers, (half, full), strict=True):
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
    assert torch.equal(half, full.to(torch.bfloat16))
    # In bfloat16 alone a weight of 1 never feels a share that small.
    assert half.ne(1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay": -0.1}, "`weight_decay` must be finite and at least 0, got -0.1"),
        ({"weight_decay": 1.0}, r"`weight_decay` must be at least 0 and less than 1, got 1.0"),
        ({"lr": 0.0}, "`initial_lr` must be finite and above 0, got 0.0"),
        ({"lr": math.nan}, "`lr` must be finite and at least 0, got nan"),
        ({"momentum": 1.0}, r"`momentum` must be at least 0 and less than 1, got 1.0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGDW([torch.nn.Parameter(torch.ones(1))], **options)
