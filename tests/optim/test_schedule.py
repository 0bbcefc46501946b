"""Schedules: values, resuming anywhere and in any order, torch's own schedulers on our optimizers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

import lockstep as ls
from lockstep.errors import StateError
from lockstep.optim import CorrectedMomentumSGD, MomentumSGD, UpdateSchedule, hooks, large_batch_schedule, schedule

FACTORS: dict[str, schedule.Factor] = {
    "warmup": schedule.warmup(6, start=0.1),
    "steps": schedule.steps([3, 8], gamma=0.1),
    "every": schedule.every(4, gamma=0.5),
    "exponential": schedule.exponential(0.9),
    "cosine": schedule.cosine(10, final=0.01),
    "polynomial": schedule.polynomial(10, power=2.0),
    "inverse": schedule.inverse(0.3, power=0.75),
    "warmup then steps": schedule.product(schedule.warmup(4), schedule.steps([6, 9])),
    "warmup then cosine": schedule.product(schedule.warmup(4), schedule.delayed(schedule.cosine(6), 4)),
}
UPDATES = 12


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]


def make(factor: schedule.Factor) -> tuple[CorrectedMomentumSGD, UpdateSchedule]:
    first, second = parameters()
    optimizer = CorrectedMomentumSGD([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.2)
    return optimizer, UpdateSchedule(optimizer, factor)


def update(optimizer: CorrectedMomentumSGD, made: UpdateSchedule, number: int) -> list[float]:
    generator = torch.Generator().manual_seed(number)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.randn(weight.shape, generator=generator)
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.step()
    made.step()
    return rates


def values(optimizer: Optimizer) -> list[list[float]]:
    return [weight.tolist() for group in optimizer.param_groups for weight in group["params"]]


@pytest.mark.each_value
@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
@pytest.mark.parametrize("order", ["optimizer first", "schedule first", "schedule made after loading"])
@pytest.mark.parametrize("cut", [0, 1, 3, 5, 6, 7, 11])
def test_resume_anywhere_changes_no_bit(factor: schedule.Factor, order: str, cut: int) -> None:
    straight, made = make(factor)
    rates = [update(straight, made, number) for number in range(UPDATES)]

    optimizer, made = make(factor)
    for number in range(cut):
        update(optimizer, made, number)
    saved, saved_schedule = copy.deepcopy((optimizer.state_dict(), made.state_dict()))
    weights = values(optimizer)

    optimizer, made = make(factor)
    if order == "schedule first":
        made.load_state_dict(saved_schedule)
    optimizer.load_state_dict(saved)
    if order == "schedule made after loading":
        made = UpdateSchedule(optimizer, factor)
    if order != "schedule first":
        made.load_state_dict(saved_schedule)
    with torch.no_grad():
        resumed = [weight for group in optimizer.param_groups for weight in group["params"]]
        for weight, value in zip(resumed, weights, strict=True):
            weight.copy_(torch.tensor(value))
    assert made.get_last_lr() == rates[cut]
    assert [update(optimizer, made, number) for number in range(cut, UPDATES)] == rates[cut:]
    assert values(optimizer) == values(straight)


@pytest.mark.parametrize("factor", FACTORS.values(), ids=FACTORS)
def test_schedule_needs_only_its_count_to_set_the_rates(factor: schedule.Factor) -> None:
    optimizer, made = make(factor)
    for count in (0, 1, 7, 30):
        made.load_state_dict({"last_epoch": count, "base_lrs": [0.2, 0.5]})
        assert [group["lr"] for group in optimizer.param_groups] == [0.2 * factor(count), 0.5 * factor(count)]
        assert [group["initial_lr"] for group in optimizer.param_groups] == [0.2, 0.5]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"last_epoch": 3}, "must hold 'last_epoch', 'base_lrs'; missing: 'base_lrs'"),
        ({"last_epoch": 3, "base_lrs": [1.0]}, "a rate for each of 2 groups, got 1"),
    ],
)
def test_strange_states_of_a_schedule_are_refused(state: dict[str, Any], message: str) -> None:
    optimizer, made = make(schedule.warmup(4))
    with pytest.raises(StateError, match=message):
        made.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.0]


def test_a_rate_in_a_tensor_is_changed_in_place() -> None:
    lr = torch.tensor(0.5)
    optimizer = CorrectedMomentumSGD([torch.nn.Parameter(torch.ones(1))], lr=lr)
    made = UpdateSchedule(optimizer, schedule.warmup(2, start=0.5))
    optimizer.step()
    made.step()
    assert optimizer.lr is lr
    assert lr.item() == 0.375
    made.load_state_dict({"last_epoch": 5, "base_lrs": [0.5]})
    assert optimizer.lr is lr
    assert lr.item() == 0.5


def test_base_rates_for_all_groups_or_each() -> None:
    optimizer, _ = make(schedule.warmup(4))
    UpdateSchedule(optimizer, schedule.warmup(0), base_lr=0.75)
    assert [group["lr"] for group in optimizer.param_groups] == [0.75, 0.75]
    UpdateSchedule(optimizer, schedule.warmup(0), base_lr=[0.25, 1.0])
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 1.0]
    with pytest.raises(ValueError, match="`base_lr` must hold a rate for each of 2 groups, got 1"):
        UpdateSchedule(optimizer, schedule.warmup(0), base_lr=[0.25])


def test_large_batch_schedule_follows_the_paper() -> None:
    optimizer = CorrectedMomentumSGD(parameters())
    made = large_batch_schedule(
        optimizer,
        base_lr=0.1,
        batch_size=1024,
        base_batch_size=256,
        warmup=(2, "epoch"),
        milestones=[4, 6],
        gamma=0.1,
        updates_per_epoch=5,
    )
    rates = []
    for _ in range(40):
        rates.append(optimizer.lr)
        optimizer.step()
        made.step()
    rise = [0.1 + 0.3 * count / 10 for count in range(10)]
    expected = rise + [0.4] * 10 + [0.04] * 10 + [0.004] * 10
    assert rates == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("unit", ["update", "iteration"])
def test_large_batch_schedule_takes_updates_and_smaller_batches(unit: str) -> None:
    optimizer = torch.optim.SGD(parameters(), lr=9.0)
    made = large_batch_schedule(optimizer, 0.1, 128, warmup=(4, unit), milestones=[1.5], updates_per_epoch=4)
    assert [made.factor(count) for count in (0, 3, 5, 6)] == [1.0, 1.0, 1.0, 0.1]
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    ("factor", "values"),
    [
        (schedule.every(2, gamma=2.0), [1.0, 1.0, 2.0, 2.0, 4.0]),
        (schedule.every(2, gamma=2.0, final=3.0), [1.0, 1.0, 2.0, 2.0, 3.0]),
        (schedule.every(1, gamma=0.5, final=0.25), [1.0, 0.5, 0.25, 0.25, 0.25]),
        (schedule.every(2, gamma=1.0), [1.0] * 5),
        (schedule.every(2, gamma=0.0), [1.0, 1.0, 0.0, 0.0, 0.0]),
        (schedule.every(2, gamma=0.0, final=0.5), [1.0, 1.0, 0.5, 0.5, 0.5]),
        (schedule.exponential(2.0, final=3.0), [1.0, 2.0, 3.0, 3.0, 3.0]),
        (schedule.exponential(0.5, final=-1.0), [1.0, 0.5, 0.25, 0.125, 0.0625]),
        (schedule.steps([1, 3], gamma=2.0), [1.0, 2.0, 2.0, 4.0, 4.0]),
        (schedule.steps([1, 3], gamma=0.0), [1.0, 0.0, 0.0, 0.0, 0.0]),
        (schedule.polynomial(4, final=-3.0), [1.0, 0.0, -1.0, -2.0, -3.0]),
        (schedule.polynomial(2, final=-3.0, bound=0.0), [1.0, 0.0, 0.0, 0.0, 0.0]),
        (schedule.polynomial(4, final=-3.0, bound=-1.5), [1.0, 0.0, -1.0, -1.5, -1.5]),
        (schedule.polynomial(2, final=3.0), [1.0, 2.0, 3.0, 3.0, 3.0]),
        (schedule.cosine(2, final=-3.0), [1.0, -1.0, -3.0, -3.0, -3.0]),
        (schedule.cosine(2, final=3.0), [1.0, 2.0, 3.0, 3.0, 3.0]),
        (schedule.inverse(1.0, final=-2.0), [1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]),
        (schedule.warmup(2, start=3.0), [3.0, 2.0, 1.0, 1.0, 1.0]),
        (schedule.polynomial(4, power=-1, bound=3.0), [1.0, 4 / 3, 2.0, 3.0, 3.0]),
        (schedule.polynomial(2, power=-2, bound=math.inf), [1.0, 4.0, math.inf, math.inf, math.inf]),
        (schedule.polynomial(2, power=0), [1.0] * 5),
        (schedule.inverse(1.0, power=-1), [1.0, 2.0, 3.0, 4.0, 5.0]),
        (schedule.inverse(1.0, power=-2, final=10.0), [1.0, 4.0, 9.0, 10.0, 10.0]),
        (schedule.inverse(1.0, power=0), [1.0] * 5),
    ],
)
def test_factors_go_where_their_numbers_lead(factor: schedule.Factor, values: list[float]) -> None:
    assert [factor(count) for count in range(5)] == values


@pytest.mark.parametrize("factor", [schedule.every(1, gamma=2.0, final=3), schedule.exponential(2, final=3)])
def test_a_bound_holds_where_powers_have_left_the_format(factor: schedule.Factor) -> None:
    assert [factor(count) for count in (1, 2, 1023, 1024, 10**5)] == [2.0, 3.0, 3.0, 3.0, 3.0]


@pytest.mark.parametrize("factor", [schedule.every(1, gamma=2.0), schedule.steps([0] * 1025, gamma=2.0)])
def test_a_factor_beyond_the_format_is_infinite_as_in_torch(factor: schedule.Factor) -> None:
    assert factor(2000) == math.inf


def adam(option: str) -> Optimizer:
    first, second = parameters()
    other = {"weight_decay": 0.5} if option == "weight_decay" else {"betas": (0.5, 0.99)}
    return torch.optim.Adam([{"params": [first]}, {"params": [second], **other}], betas=(0.8, 0.999), weight_decay=0.1)


@pytest.mark.parametrize(
    ("option", "read", "bases"),
    [
        ("betas[0]", lambda group: group["betas"][0], [0.8, 0.5]),
        ("betas[1]", lambda group: group["betas"][1], [0.999, 0.99]),
        ("weight_decay", lambda group: group["weight_decay"], [0.1, 0.5]),
        ("eps", lambda group: group["eps"], [1e-8, 1e-8]),
    ],
)
@pytest.mark.parametrize("cut", [0, 3, 7])
def test_other_options_than_the_rate_are_set_and_resumed(
    option: str, read: Callable[[dict[str, Any]], float], bases: list[float], cut: int
) -> None:
    def start() -> tuple[Optimizer, UpdateSchedule, UpdateSchedule]:
        optimizer = adam(option)
        rates = UpdateSchedule(optimizer, schedule.cosine(5), base_lr=0.1)
        return optimizer, rates, UpdateSchedule(optimizer, schedule.exponential(0.5), option=option)

    optimizer, rates, made = start()
    for count in range(8):
        if count == cut:
            saved = copy.deepcopy((optimizer.state_dict(), rates.state_dict(), made.state_dict()))
            optimizer, rates, made = start()
            for part, state in zip((optimizer, rates, made), saved, strict=True):
                part.load_state_dict(state)
        assert [read(group) for group in optimizer.param_groups] == [base * 0.5**count for base in bases]
        assert optimizer.param_groups[0]["lr"] == 0.1 * schedule.cosine(5)(count)
        optimizer.step()
        rates.step()
        made.step()


def test_the_momentum_of_ours_and_its_base_value() -> None:
    optimizer = MomentumSGD(parameters(), lr=0.1, momentum=0.5)
    made = UpdateSchedule(optimizer, schedule.exponential(0.5), base_lr=0.8, option="momentum")
    optimizer.step()
    made.step()
    assert (optimizer.momentum, optimizer.lr) == (0.4, 0.1)
    MomentumSGD(parameters()).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("option", ["alpha", "betas", "betas[2]", "amsgrad", "params"])
def test_an_option_that_is_no_number_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match="`option` must name a number of each group"):
        UpdateSchedule(adam(option), schedule.exponential(0.5), option=option)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedule.every(2, gamma=-0.5), "`gamma` must be finite and at least 0, got -0.5"),
        (
            lambda: schedule.every(2, gamma=2.0, final=0.0),
            "`final` must be at least 1 where the factor grows, got 0.0 with gamma=2.0",
        ),
        (
            lambda: schedule.exponential(0.5, final=2.0),
            "`final` must be at most 1 where the factor does not grow, got 2.0 with rate=0.5",
        ),
        (lambda: schedule.exponential(0.5, final=math.nan), "`final` must be finite, got nan"),
        (lambda: schedule.cosine(1, final=math.inf), "`final` must be finite, got inf"),
        (lambda: schedule.polynomial(1, final=math.nan), "`final` must be finite, got nan"),
        (lambda: schedule.polynomial(1, bound=math.nan), "`bound` must be a number or None, got nan"),
        (lambda: schedule.inverse(1.0, final=1.5), "`final` must be at most 1 where the factor does not grow, got 1.5"),
        (lambda: schedule.inverse(1.0, power=-1, final=0.5), "`final` must be at least 1 where the factor grows, got"),
        (lambda: schedule.inverse(1.0, power=math.inf), "`power` must be finite, got inf"),
        (
            lambda: schedule.polynomial(1, power=-1),
            "`bound` must be given, and `final` must be 0, with a `power` below 0",
        ),
        (lambda: schedule.polynomial(1, power=-1, bound=2, final=0.5), "`final` must be 0, with a `power` below 0"),
        (lambda: schedule.inverse(1.0, final=-math.inf), "`final` must be finite, got -inf"),
        (lambda: schedule.warmup(-1), "`updates` must be finite and at least 0, got -1"),
        (lambda: schedule.warmup(1, start=-1), "`start` must be finite and at least 0, got -1"),
        (lambda: schedule.steps([3, 2]), r"`milestones` must be in ascending order, got \[3, 2\]"),
        (lambda: schedule.steps([3], gamma=-1), "`gamma` must be finite and at least 0, got -1"),
        (lambda: schedule.every(0), "`updates` must be finite and at least 1, got 0"),
        (lambda: schedule.exponential(-0.5), "`rate` must be finite and at least 0, got -0.5"),
        (lambda: schedule.cosine(0), "`updates` must be finite and at least 1, got 0"),
        (lambda: schedule.polynomial(0), "`updates` must be finite and at least 1, got 0"),
        (lambda: schedule.polynomial(1, power=math.nan), "`power` must be finite, got nan"),
        (lambda: schedule.inverse(-1), "`gamma` must be finite and at least 0, got -1"),
        (lambda: schedule.delayed(schedule.cosine(1), -1), "`updates` must be finite and at least 0, got -1"),
        (
            lambda: schedule.linear_scaling(0.1, batch_size=0, base_batch_size=1),
            "`batch_size` must be finite and at least 1, got 0",
        ),
        (lambda: recipe(base_lr=0), "`base_lr` must be above 0, got 0"),
        (lambda: recipe(updates_per_epoch=0), "`updates_per_epoch` must be at least 1, got 0"),
        (lambda: recipe(warmup=(5, "week")), "must be 'epoch', 'update' or 'iteration', got 'week'"),
    ],
)
def test_numbers_out_of_range_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def recipe(**changes: Any) -> UpdateSchedule:
    options = {"base_lr": 0.1, "batch_size": 512, "updates_per_epoch": 3, **changes}
    return large_batch_schedule(torch.optim.SGD(parameters(), lr=1.0), **options)


TORCHS: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda count: 1 / (1 + count)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.01, anneal_epochs=4),
    "UpdateSchedule": lambda o: UpdateSchedule(o, schedule.cosine(5)),
}


@pytest.mark.parametrize("make_scheduler", TORCHS.values(), ids=TORCHS)
def test_schedulers_do_to_ours_what_they_do_to_torchs(make_scheduler: Callable[[Optimizer], Any]) -> None:
    results = []
    for cls, name in ((CorrectedMomentumSGD, "lr"), (torch.optim.SGD, "lr"), (MomentumSGD, "lr")):
        weights = parameters()
        optimizer = cls(weights, lr=0.1, momentum=0.9)
        scheduler = make_scheduler(optimizer)
        rates = []
        for number in range(8):
            for weight in weights:
                weight.grad = torch.full_like(weight, 1.0 + number)
            optimizer.step()
            scheduler.step()
            rates.append((optimizer.param_groups[0][name], optimizer.param_groups[0]["momentum"]))
        results.append((rates, values(optimizer)))
    assert results[0] == results[1]
    assert results[2][0] == results[1][0]


@pytest.mark.parametrize("make_scheduler", TORCHS.values(), ids=TORCHS)
def test_an_updater_steps_them_as_a_loop_does(make_scheduler: Callable[[Optimizer], Any]) -> None:
    model, data = torch.nn.Linear(2, 1), [torch.ones(4, 2)]
    optimizer, other = (torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in (model.parameters(), parameters()))
    scheduler, expected = make_scheduler(optimizer), make_scheduler(other)
    updater = ls.ParallelUpdater(
        data * 8, optimizer, model, devices=1, num_shards=2, scheduler=scheduler, loss_fn=lambda m, x: m(x).mean()
    )
    for _ in range(8):
        other.step()
        expected.step()
        updater.update()
        assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    scheduler.step()
    with pytest.warns(UserWarning, match="so that it steps twice"):
        updater.update()


def test_plateau_scheduler_lowers_the_rate() -> None:
    optimizer = CorrectedMomentumSGD(parameters(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    for _ in range(4):
        optimizer.step()
        scheduler.step(1.0)
    assert optimizer.lr == pytest.approx(0.01)


def test_state_with_a_schedulers_keys_is_loaded() -> None:
    optimizer = CorrectedMomentumSGD(parameters(), lr=0.1)
    optimizer.add_hook(hooks.WeightDecay(0.1))
    lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)
    other = CorrectedMomentumSGD(parameters())
    other.add_hook(hooks.WeightDecay(0.1))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["max_lr"] == 0.5


def test_a_warmup_without_a_unit_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`warmup` must be \(number, unit\), got 5"):
        recipe(warmup=5)
