"""Momentum correction: what a change of the learning rate does to each form of momentum.

Written out over all steps so far, with gradients g, rates η and momentum m, the two forms move by::

    free of η (equation 9):   w[t+1] = w[t] - η[t] · Σ_{k≤t} m^(t-k) · g[k]
    η inside (equation 10):   w[t+1] = w[t] - Σ_{k≤t} m^(t-k) · η[k] · g[k]

So gradient k is applied in step t at the rate of that step in the first form, at its own in the second,
and the weights of the second form are away from those of the first by::

    Σ_t Σ_{k≤t} m^(t-k) · (η[t] - η[k]) · g[k]

which is nothing while η stands still.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from lockstep.optim import CorrectedMomentumSGD, HookedOptimizer, MomentumSGD

# Rates from none to large, often the same twice; ratios of 1e6 between neighbours.
RATES = st.lists(st.sampled_from([0.0, 1e-6, 0.01, 0.1, 0.1, 0.3, 1.0]), min_size=1, max_size=12)


def run(optimizer: HookedOptimizer, rates: list[float], skips: list[int]) -> torch.Tensor:
    weights = optimizer.param_groups[0]["params"]
    for step, rate in enumerate(rates):
        optimizer.lr = rate
        for index, weight in enumerate(weights):
            weight.grad = gradient(step, index)
        if step in skips:
            weights[1].grad = None
        optimizer.step()
    return torch.cat([weight.detach() for weight in weights])


def gradient(step: int, index: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + index)
    return torch.randn(3, generator=generator, dtype=torch.float64)


def start() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]


@given(
    rates=RATES,
    momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    missing_grad=st.sampled_from(["skip", "zero"]),
    skips=st.lists(st.integers(0, 11)),
)
def test_corrected_velocity_follows_the_free_one_under_any_schedule(
    rates: list[float], momentum: float, missing_grad: str, skips: list[int]
) -> None:
    options = {"momentum": momentum, "missing_grad": missing_grad}
    free = run(CorrectedMomentumSGD(start(), **options), rates, skips)
    inside = run(MomentumSGD(start(), correction=True, **options), rates, skips)
    # Float64, some roundings in each of at most 12 steps of size at most 12.
    torch.testing.assert_close(inside, free, rtol=0, atol=1e-12)


@given(rates=RATES, momentum=st.sampled_from([0.0, 0.5, 0.9]))
def test_without_correction_the_forms_part_as_the_equations_say(rates: list[float], momentum: float) -> None:
    free = run(CorrectedMomentumSGD(start(), momentum=momentum), rates, [])
    inside = run(MomentumSGD(start(), momentum=momentum), rates, [])
    apart = torch.zeros(6, dtype=torch.float64)
    for t, rate in enumerate(rates):
        for k, old_rate in enumerate(rates[: t + 1]):
            gradients = torch.cat([gradient(k, index) for index in range(2)])
            apart += momentum ** (t - k) * (rate - old_rate) * gradients
    torch.testing.assert_close(inside - free, apart, rtol=0, atol=1e-12)


def test_after_a_drop_the_old_rate_lasts_as_long_as_the_momentum() -> None:
    """With gradients of 1 and a long past, the sum is (η' - η) · Σ_{t≥1} t·m^t = (η' - η)·m/(1-m)²."""
    weights = []
    for optimizer in (CorrectedMomentumSGD(start()), MomentumSGD(start())):
        for step in range(800):
            optimizer.lr = 1.0 if step < 400 else 0.1
            for weight in optimizer.param_groups[0]["params"]:
                weight.grad = torch.ones(3, dtype=torch.float64)
            optimizer.step()
        weights.append(optimizer.param_groups[0]["params"][0][0].item())
    free, inside = weights
    # 0.9 to the power of 400 is below 1e-18; the weights are about 4000, with 16 digits.
    assert inside - free == pytest.approx((0.1 - 1.0) * 0.9 / (1 - 0.9) ** 2, rel=1e-9)


def test_while_the_rate_stands_still_the_forms_are_one() -> None:
    rates = [0.1] * 10
    free = run(CorrectedMomentumSGD(start()), rates, [])
    for correction in (False, True):
        inside = run(MomentumSGD(start(), correction=correction), rates, [])
        torch.testing.assert_close(inside, free, rtol=0, atol=1e-14)


def test_correction_may_be_switched_on_later() -> None:
    optimizer, free = MomentumSGD(start()), CorrectedMomentumSGD(start())
    run(optimizer, [0.1] * 4, [])
    optimizer.param_groups[0]["correction"] = True
    inside = run(optimizer, [0.1, 0.3, 0.01], [])
    run(free, [0.1] * 4, [])
    torch.testing.assert_close(inside, run(free, [0.1, 0.3, 0.01], []), rtol=0, atol=1e-13)
