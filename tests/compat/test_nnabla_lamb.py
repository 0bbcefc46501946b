"""LAMB: Adam's direction, as long as the norms of parameters say."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

from lockstep.compat.nnabla import LAMB
from lockstep.errors import StateError
from lockstep.optim import UpdateSchedule, hooks, schedule
from lockstep.precision import LossScaler
from tests.support.optimizers import parameters, put_grads, same_bits


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("norm_bounds", [(0.0, math.inf), (0.5, 1.5)])
def test_the_rule_as_it_is_written(bias_correction: bool, norm_bounds: tuple[float, float]) -> None:
    weights = parameters(torch.float64)
    options = {"norm_bounds": norm_bounds, "bias_correction": bias_correction}
    optimizer = LAMB(weights, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, **options)
    expected = [weight.detach().clone() for weight in weights]
    means, squares = ([torch.zeros_like(weight) for weight in weights] for _ in range(2))
    for step in range(6):
        optimizer.lr = lr = 0.2 / (1 + step)
        put_grads(weights, step)
        shares = (1 - 0.8 ** (step + 1), 1 - 0.95 ** (step + 1)) if bias_correction else (1.0, 1.0)
        for value, mean, square, weight in zip(expected, means, squares, weights, strict=True):
            mean.copy_(0.8 * mean + 0.2 * weight.grad)
            square.copy_(0.95 * square + 0.05 * weight.grad**2)
            update = (mean / shares[0]) / ((square / shares[1]).sqrt() + 1e-3) + 0.1 * value
            ratio = value.norm().clamp(*norm_bounds) / update.norm()
            value.sub_(lr * ratio * update)
        optimizer.step()
    for weight, value in zip(weights, expected, strict=True):
        # The corrections are taken out in another order of operations.
        torch.testing.assert_close(weight.detach(), value, rtol=1e-12, atol=1e-14)


def test_it_goes_where_torchs_adam_goes_and_as_far_as_the_norm_says() -> None:
    for step in range(4):
        ours, theirs = parameters(torch.float64)[:3], parameters(torch.float64)[:3]
        optimizer, adam = LAMB(ours, lr=0.01, eps=1e-8), torch.optim.Adam(theirs, lr=0.01)
        for number in range(step + 1):
            for each in (ours, theirs):
                put_grads(each, number)
            # Both from the same weights in the last step; what is remembered knows nothing of weights.
            before = [weight.detach().clone() for weight in ours]
            for weight, value in zip(theirs, before, strict=True):
                weight.data.copy_(value)
            optimizer.step()
            adam.step()
        for weight, other, value in zip(ours, theirs, before, strict=True):
            way, adams = weight.detach() - value, other.detach() - value
            torch.testing.assert_close(way.norm(), 0.01 * value.norm(), rtol=1e-12, atol=0.0)
            torch.testing.assert_close(way / way.norm(), adams / adams.norm(), rtol=1e-10, atol=0.0)


def test_a_parameter_of_zeros_takes_the_step_as_it_is() -> None:
    zeros, bounded = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = LAMB([{"params": [zeros]}, {"params": [bounded], "norm_bounds": (2.0, 4.0)}], lr=0.5)
    for weight in (zeros, bounded):
        weight.grad = torch.tensor([3.0, -4.0])
    optimizer.step()
    torch.testing.assert_close(zeros.detach(), torch.tensor([-0.5, 0.5]))
    # The bound is a norm to count with: 0.5 · 2 along a direction of (1, -1).
    torch.testing.assert_close(bounded.detach(), torch.tensor([-1.0, 1.0]) / math.sqrt(2))


def test_where_gradients_vanish_nothing_goes_its_whole_way() -> None:
    still, noise, free = (torch.nn.Parameter(torch.ones(4)) for _ in range(3))
    optimizer = LAMB([{"params": [still]}, {"params": [noise]}, {"params": [free], "threshold": 0.0}], lr=0.5)
    still.grad, noise.grad, free.grad = torch.zeros(4), torch.full((4,), 1e-14), torch.full((4,), 1e-14)
    optimizer.step()
    assert still.tolist() == [1.0] * 4
    assert noise.sub(1).abs().max() < 1e-7
    torch.testing.assert_close(free.detach(), torch.full((4,), 0.5))


def test_a_step_as_long_as_the_threshold_is_short() -> None:
    weights = [torch.nn.Parameter(torch.full((1,), 4.0)) for _ in range(2)]
    groups = [
        {"params": [weight], "threshold": threshold} for weight, threshold in zip(weights, (0.5, 0.25), strict=True)
    ]
    # Without a gradient u is λ·w, of a norm of 0.5.
    optimizer = LAMB(groups, lr=0.5, weight_decay=0.125)
    for weight in weights:
        weight.grad = torch.zeros(1)
    optimizer.step()
    assert [weight.item() for weight in weights] == [3.75, 2.0]


def test_what_does_not_move_is_not_counted() -> None:
    still, frozen, zero = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    frozen.grad = torch.ones(1)
    groups = [{"params": [still]}, {"params": [frozen], "frozen": True}]
    optimizer = LAMB([*groups, {"params": [zero], "missing_grad": "zero"}], lr=0.25)
    zero.grad = torch.ones(1)
    optimizer.step()
    zero.grad = None
    optimizer.step()
    assert (still.item(), frozen.item()) == (1.0, 1.0)
    assert still not in optimizer.state
    assert frozen not in optimizer.state
    assert optimizer.state[zero]["count"] == optimizer.t == 2
    assert zero.item() == pytest.approx(0.75**2)


def test_parameters_that_were_skipped_have_corrections_of_their_own() -> None:
    together, apart = parameters(), parameters()
    optimizer, others = LAMB(together), [LAMB([weight]) for weight in apart]
    for step in range(5):
        missing = (step % 3,)
        put_grads(together, step, missing)
        put_grads(apart, step, missing)
        optimizer.step()
        for each in others:
            each.step()
    assert same_bits(together, apart)
    assert [optimizer.state[weight]["count"] for weight in together] == [3, 3, 4, 5, 5]


def test_a_rate_in_a_tensor_and_one_of_a_schedule() -> None:
    made: list[list[torch.nn.Parameter]] = []
    for rate in (0.5, torch.tensor(0.5)):
        weights = parameters()
        optimizer = LAMB(weights, lr=rate)
        scheduler = UpdateSchedule(optimizer, schedule.steps([1, 2], gamma=0.5))
        for step in range(3):
            put_grads(weights, step)
            optimizer.step()
            scheduler.step()
        made.append(weights)
    assert same_bits(*made)


def test_saved_state_goes_on_to_the_same_bits() -> None:
    straight = parameters()
    optimizer = LAMB(straight, lr=0.5, weight_decay=0.1)
    optimizer.add_hook(hooks.GradientClipping(1.0))
    for step in range(6):
        put_grads(straight, step, missing=(step % 2,))
        optimizer.step()
        if step == 2:
            resumed = [torch.nn.Parameter(weight.detach().clone()) for weight in straight]
            saved = copy.deepcopy(optimizer.state_dict())
    other = LAMB(resumed, lr=0.125)
    other.add_hook(hooks.GradientClipping(1.0))
    other.load_state_dict(saved)
    for step in range(3, 6):
        put_grads(resumed, step, missing=(step % 2,))
        other.step()
    assert same_bits(straight, resumed)
    assert other.state_dict()["state"][0]["count"] == 3
    for key in ("betas", "eps", "weight_decay", "norm_bounds", "threshold", "bias_correction"):
        (group,) = saved["param_groups"]
        lacking = {**saved, "param_groups": [{name: each for name, each in group.items() if name != key}]}
        with pytest.raises(StateError, match=rf"missing: '{key}'"):
            other.load_state_dict(lacking)
    for key in ("mean", "mean_square", "count"):
        state = {name: each for name, each in saved["state"][0].items() if name != key}
        with pytest.raises(StateError, match=rf"missing: '{key}'"):
            other.load_state_dict({**saved, "state": {**saved["state"], 0: state}})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    made = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            generator = torch.Generator().manual_seed(0)
            # Above 32768 elements torch shares the work among threads, and the ends of shares are no vectors.
            weight = torch.nn.Parameter(torch.randn(100_003, generator=generator).to(dtype))
            optimizer = LAMB([weight], lr=0.1, weight_decay=0.7)
            for _ in range(6):
                weight.grad = torch.randn(100_003, generator=generator).to(dtype)
                optimizer.step()
            made.append([weight])
    finally:
        torch.set_num_threads(threads)
    assert same_bits(*made)


def test_lazy_parameters_are_taken_in_before_they_have_a_shape() -> None:
    weight = torch.nn.UninitializedParameter()
    optimizer = LAMB([weight], lr=0.5)
    weight.materialize((2,))
    with torch.no_grad():
        weight.copy_(torch.tensor([3.0, 4.0]))
    weight.grad = torch.tensor([0.0, 8.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([3.0, 1.5]))


def test_masters_move_in_float32() -> None:
    half = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    full = torch.nn.Parameter(torch.ones(8))
    optimizers = [LAMB([half], lr=2.0**-12), LAMB([full], lr=2.0**-12)]
    optimizers[0].use_fp32_update()
    for _ in range(20):
        for optimizer, weight in zip(optimizers, (half, full), strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert torch.equal(half, full.to(torch.bfloat16))
    # In bfloat16 alone a weight of 1 never feels a step that small.
    assert half.ne(1).all()
    assert optimizers[0].state[half]["mean"].dtype == torch.float32


def test_a_loss_scale_that_is_a_power_of_two_changes_no_bit() -> None:
    made = []
    for scale in (1.0, 2.0**12):
        weights = parameters()
        optimizer, scaler = LAMB(weights, weight_decay=0.1), LossScaler(scale)
        for step in range(4):
            put_grads(weights, step)
            for weight in weights:
                weight.grad *= scale
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
        made.append(weights)
    assert same_bits(*made)


def test_a_gradient_that_is_not_finite_moves_and_counts_nothing() -> None:
    weights = parameters()
    optimizer = LAMB(weights)
    optimizer.loss_scaling(scale=8.0)
    optimizer.update(lambda: sum((weight.sum() for weight in weights), torch.zeros(())))
    before = copy.deepcopy((optimizer.state_dict(), weights))
    optimizer.update(lambda: weights[0].sum() * math.inf)
    assert optimizer.state_dict()["state"][0]["count"] == optimizer.t == 1
    assert torch.equal(optimizer.state[weights[0]]["mean"], before[0]["state"][0]["mean"])
    assert same_bits(weights, before[1])


@pytest.mark.parametrize("first", [True, False])
def test_a_sparse_gradient_is_refused_before_anything_moves(first: bool) -> None:
    dense, table = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3, 2))
    groups = [{"params": [table]}, {"params": [dense]}]
    optimizer = LAMB(groups if first else groups[::-1])
    dense.grad = torch.ones(2)
    table.grad = torch.sparse_coo_tensor([[1]], [[1.0, 1.0]], (3, 2), check_invariants=True)
    with pytest.raises(TypeError, match=r"must be dense, got one of layout torch.sparse_coo .* shape \(3, 2\)"):
        optimizer.step()
    assert dense.tolist() == [1.0, 1.0]
    assert (len(optimizer.state), optimizer.t) == (0, 0)


def test_a_complex_parameter_is_refused() -> None:
    optimizer = LAMB([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match=r"`params` must be real, got one of torch\.complex64"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


def test_its_momentum_is_the_first_beta() -> None:
    optimizer = LAMB([torch.nn.Parameter(torch.ones(1))], betas=(0.75, 0.5))
    assert optimizer.momentum == 0.75
    optimizer.momentum = 0.25
    assert optimizer.param_groups[0]["betas"] == (0.25, 0.5)
    with pytest.raises(ValueError, match=r"`betas\[0\]` must be at least 0 and less than 1, got 1.0"):
        optimizer.momentum = 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "`lr` must be finite and at least 0, got -0.1"),
        ({"betas": (1.0, 0.5)}, r"`betas\[0\]` must be at least 0 and less than 1, got 1.0"),
        ({"betas": (0.5, -0.1)}, r"`betas\[1\]` must be at least 0 and less than 1, got -0.1"),
        ({"eps": 0.0}, "`eps` must be finite and above 0, got 0.0"),
        ({"eps": math.nan}, "`eps` must be finite and above 0, got nan"),
        ({"weight_decay": -1.0}, "`weight_decay` must be finite and at least 0, got -1.0"),
        ({"threshold": math.inf}, "`threshold` must be finite and at least 0, got inf"),
        ({"norm_bounds": (2.0, 1.0)}, r"`norm_bounds` must .* got \(2.0, 1.0\)"),
        ({"norm_bounds": (0.0, 0.0)}, r"`norm_bounds` must .* got \(0.0, 0.0\)"),
        ({"norm_bounds": (math.inf, math.inf)}, r"`norm_bounds` must .* got \(inf, inf\)"),
        ({"missing_grad": "none"}, "`missing_grad` must be 'skip' or 'zero', got 'none'"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LAMB([torch.nn.Parameter(torch.ones(1))], **options)
