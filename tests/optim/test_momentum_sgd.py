"""Both momentum rules: bits against torch, options, saved state."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lockstep.errors import OrderError, StateError
from lockstep.optim import (
    CorrectedMomentumSGD,
    HookedOptimizer,
    MomentumSGD,
    fused_momentum_step,
    lr_momentum_step,
    momentum_step,
)
from tests.support.optimizers import SHAPES, bits, parameters, put_cut_grads

BOTH = pytest.mark.parametrize("cls", [CorrectedMomentumSGD, MomentumSGD])


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize(
    ("dtype", "fused"),
    [
        (torch.float32, False),
        (torch.float64, False),
        (torch.float32, True),
        (torch.float64, True),
    ],
)
def test_same_bits_as_torch_sgd(dtype: torch.dtype, momentum: float, fused: bool) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    implementation = {"fused": True} if fused else {"foreach": True}
    optimizer = CorrectedMomentumSGD(ours, lr=0.1, momentum=momentum, fused=fused)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, **implementation)
    for step in range(12):
        for each in (optimizer, reference):
            each.param_groups[0]["lr"] = 0.1 / (1 + step % 5)
        for weights in (ours, theirs):
            # From the second step on: torch's lists of velocities with gaps take other code or fail.
            put_cut_grads(weights, step, missing=(step % 7,) if step else ())
        optimizer.step()
        reference.step()
        assert bits(ours) == bits(theirs)
    if momentum:
        assert bits([optimizer.state[weight]["velocity"] for weight in ours]) == bits(
            [reference.state[weight]["momentum_buffer"] for weight in theirs]
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_follows_torch_sgd(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = CorrectedMomentumSGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=0.9)
    for step in range(12):
        for weights in (ours, theirs):
            put_cut_grads(weights, step)
        optimizer.step()
        reference.step()
    for weight, other in zip(ours, theirs, strict=True):
        # Each of 24 roundings is off by half a unit in the last place of numbers up to 4.
        torch.testing.assert_close(weight, other, rtol=0, atol=24 * 2 * torch.finfo(dtype).eps)


def test_velocity_form_equals_torch_sgd_of_scaled_gradients() -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    optimizer = MomentumSGD(ours, lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(theirs, lr=1.0, momentum=0.9)
    for step in range(6):
        put_cut_grads(ours, step)
        put_cut_grads(theirs, step)
        for weight in theirs:
            assert weight.grad is not None
            weight.grad *= optimizer.lr
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        # The scaled gradient is rounded once more on its way into the velocity.
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("step", [momentum_step, fused_momentum_step, lr_momentum_step])
def test_steps_of_no_tensors_do_nothing(step: Callable[..., None]) -> None:
    step([], [], [], lr=0.1, momentum=0.9)


def test_first_step_keeps_the_sign_of_zero() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    weight.grad = torch.tensor([-0.0, 0.0])
    optimizer = CorrectedMomentumSGD([weight])
    optimizer.step()
    assert torch.signbit(optimizer.state[weight]["velocity"]).tolist() == [True, False]


@BOTH
def test_momentum_zero_forgets_an_infinite_velocity(cls: type[HookedOptimizer]) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0]))
    optimizer = cls([weight], lr=0.0)
    weight.grad = torch.tensor([2.0])
    optimizer.step()
    optimizer.state[weight]["velocity"].fill_(math.inf)
    optimizer.lr, optimizer.momentum = 0.25, 0.0
    optimizer.step()
    assert weight.item() == 0.5


@BOTH
def test_groups_hold_their_own_options(cls: type[HookedOptimizer]) -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    optimizer = cls(
        [{"params": [first]}, {"params": [second], "lr": 0.5}, {"params": [third], "frozen": True}], lr=0.25
    )
    for weight in (first, second, third):
        weight.grad = torch.ones(2)
    optimizer.step()
    assert (first[0].item(), second[0].item(), third[0].item()) == (0.75, 0.5, 1.0)
    assert third not in optimizer.state
    assert optimizer.lr == 0.25
    optimizer.lr = 0.125
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.5, 0.25]


@BOTH
def test_missing_gradient_skips_or_counts_as_zeros(cls: type[HookedOptimizer]) -> None:
    skipping, moving = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    still = torch.nn.Parameter(torch.ones(1), requires_grad=False)
    optimizer = cls([{"params": [skipping]}, {"params": [moving, still], "missing_grad": "zero"}], lr=0.5, momentum=0.5)
    skipping.grad, moving.grad = torch.ones(1), torch.ones(1)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    assert (skipping.item(), moving.item(), still.item()) == (0.5, 0.25, 1.0)


@BOTH
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
@pytest.mark.parametrize("fused", [False, True])
def test_sparse_gradients_do_what_dense_ones_do(cls: type[HookedOptimizer], fused: bool) -> None:
    options = {"fused": fused} if cls is CorrectedMomentumSGD else {}
    dense, sparse = torch.nn.Parameter(torch.ones(4, 2)), torch.nn.Parameter(torch.ones(4, 2))
    optimizers = [cls([dense], lr=0.5, **options), cls([sparse], lr=0.5, **options)]
    for row in (1, 3, 1):
        dense.grad = torch.zeros(4, 2)
        dense.grad[row] = 1.0
        sparse.grad = dense.grad.to_sparse()
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(dense, sparse)


def test_closure_runs_with_gradients_and_its_loss_is_returned() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = CorrectedMomentumSGD([weight], lr=0.5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 2.0
    assert weight.tolist() == [0.0, 0.0]


@BOTH
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -0.1}, "`lr` must be finite and at least 0, got -0.1"),
        ({"lr": math.nan}, "`lr` must be finite and at least 0, got nan"),
        ({"momentum": 1.0}, r"`momentum` must be at least 0 and less than 1, got 1.0"),
        ({"missing_grad": "ignore"}, "`missing_grad` must be 'skip' or 'zero', got 'ignore'"),
    ],
)
def test_options_out_of_range_are_refused(cls: type[HookedOptimizer], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls([torch.nn.Parameter(torch.ones(1))], **options)
    optimizer = cls([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], **options})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_refuses_half_precision_on_a_cpu(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.ones(65, dtype=dtype))
    with pytest.raises(ValueError, match=f"`fused` must be False .*, got {dtype}"):
        CorrectedMomentumSGD([weight], fused=True)
    with pytest.raises(ValueError, match=f"`fused` must be False .*, got {dtype}"):
        fused_momentum_step([weight], [weight.detach()], [weight.detach()], lr=0.1, momentum=0.9)
    assert weight.eq(1).all()


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rows": lambda larger: larger[:4, :4].clone(),
    "transposed": lambda larger: larger[:4, :4].clone().t(),
    "columns": lambda larger: larger[:4, 2:6],
    "every other column": lambda larger: larger[:4, ::2],
    "negated": lambda larger: torch.complex(larger[:4, :4], larger[:4, :4]).conj().imag,
}


@pytest.mark.each_value
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("kept", [name for name in LAYOUTS if name != "negated"])
@pytest.mark.parametrize("given", LAYOUTS)
@pytest.mark.parametrize("laid", [name for name in LAYOUTS if name != "negated"])
def test_fused_steps_the_weight_and_nothing_else_however_it_lies(
    laid: str, given: str, kept: str, momentum: float
) -> None:
    stepped = []
    for step in (fused_momentum_step, momentum_step):
        generator = torch.Generator().manual_seed(0)
        larger = [torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
        weight, grad, velocity = (
            LAYOUTS[layout](each) for layout, each in zip((laid, given, kept), larger, strict=True)
        )
        neighbours = [each.clone() for each in larger]
        for _ in range(3):
            step([weight], [velocity], [grad], lr=0.1, momentum=momentum)
        for before, after, layout in zip(neighbours, larger, (laid, given, kept), strict=True):
            for each in (before, after):
                LAYOUTS[layout](each).zero_()
            assert torch.equal(before, after)
        stepped.append([weight, velocity])
    # The kernel rounds once where the plain step rounds twice.
    torch.testing.assert_close(*stepped, rtol=1e-13, atol=1e-14)


def test_a_fused_optimizer_leaves_the_neighbours_of_a_column_alone() -> None:
    larger = torch.arange(12.0).view(4, 3)
    weight = torch.nn.Parameter(larger[:, 0])
    optimizer = CorrectedMomentumSGD([weight], lr=0.5, momentum=0.5, fused=True)
    weight.grad = torch.ones(4)
    optimizer.step()
    assert larger[:, 1:].tolist() == torch.arange(12.0).view(4, 3)[:, 1:].tolist()
    assert weight.tolist() == [-0.5, 2.5, 5.5, 8.5]


def test_lr_and_momentum_are_checked_when_set() -> None:
    optimizer = CorrectedMomentumSGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="`lr` must"):
        optimizer.lr = -1.0
    with pytest.raises(ValueError, match="`momentum` must"):
        optimizer.momentum = 1.5
    assert (optimizer.lr, optimizer.momentum) == (0.01, 0.9)


def test_correction_wants_a_plain_number_as_rate() -> None:
    with pytest.raises(TypeError, match="`lr` must be a plain number with `correction`, got a tensor"):
        MomentumSGD([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1), correction=True)


@BOTH
def test_shallow_copy_shares_state_but_neither_hooks_nor_count(cls: type[HookedOptimizer]) -> None:
    weights = parameters()
    optimizer = cls(weights)
    calls = []
    optimizer.add_hook(calls.append, name="seen")
    twin = copy.copy(optimizer)
    put_cut_grads(weights, 0)
    twin.step()
    assert calls == []
    assert (optimizer.t, twin.t) == (0, 1)
    assert twin.state is optimizer.state
    assert len(optimizer.state) == len(SHAPES)


@BOTH
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])  # noqa: S301 - our own bytes
def test_deep_copy_and_pickle_keep_everything(cls: type[HookedOptimizer], clone: Any) -> None:
    weights = parameters()
    optimizer = cls(weights)
    optimizer.add_hook(print, timing="post")
    put_cut_grads(weights, 0)
    optimizer.call_hooks("pre")
    optimizer.advance()
    optimizer.t, optimizer.epoch = 5, 2
    twin = clone(optimizer)
    assert (twin.t, twin.epoch) == (5, 2)
    assert twin.state_dict()["hooks"] == optimizer.state_dict()["hooks"]
    twin.remove_hook("print")
    put_cut_grads(twin.param_groups[0]["params"], 1)
    twin.step()
    assert twin.t == 6


def test_epochs_belong_to_one_owner() -> None:
    optimizer = CorrectedMomentumSGD([torch.nn.Parameter(torch.ones(1))])
    optimizer.new_epoch()
    with pytest.raises(OrderError, match="must be called by you while `use_auto_new_epoch` is False"):
        optimizer.new_epoch(auto=True)
    optimizer.use_auto_new_epoch = True
    optimizer.new_epoch(auto=True)
    with pytest.raises(OrderError, match="must be called by the updater"):
        optimizer.new_epoch()
    assert optimizer.epoch == 2


@BOTH
@pytest.mark.parametrize("correction", [False, True])
def test_saved_state_goes_on_to_the_same_bits(cls: type[HookedOptimizer], correction: bool) -> None:
    if cls is CorrectedMomentumSGD:
        options: dict[str, Any] = {"fused": correction}
    else:
        options = {"correction": correction}
    straight = parameters()
    optimizer = cls(straight, lr=0.1, **options)
    for step in range(6):
        optimizer.lr = 0.1 / (1 + step)
        put_cut_grads(straight, step, missing=(step,))
        optimizer.step()
        optimizer.new_epoch()
        if step == 2:
            resumed = [torch.nn.Parameter(weight.detach().clone()) for weight in straight]
            saved = copy.deepcopy(optimizer.state_dict())
    other = cls(resumed)
    other.load_state_dict(saved)
    assert (other.t, other.epoch) == (3, 3)
    for step in range(3, 6):
        other.lr = 0.1 / (1 + step)
        put_cut_grads(resumed, step, missing=(step,))
        other.step()
        other.new_epoch()
    assert bits(straight) == bits(resumed)
    assert optimizer.state_dict().keys() == other.state_dict().keys()


@BOTH
def test_a_state_is_loaded_again_and_after_steps_in_parts(cls: type[HookedOptimizer]) -> None:
    weights = parameters()
    optimizer = cls(weights)
    put_cut_grads(weights, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step(advance=copy.copy(optimizer).advance)
    for _ in range(2):
        optimizer.load_state_dict(copy.deepcopy(saved))
        assert optimizer.t == 1
    assert str(optimizer.state_dict()) == str(saved)


def without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


STRANGERS = [
    (lambda saved: without(saved, "t"), r"must hold .*; missing: 't'"),
    (lambda saved: {**saved, "scaler": 1}, r"must hold .*; unknown: 'scaler'"),
    (
        lambda saved: {**saved, "param_groups": [without(saved["param_groups"][0], "momentum")]},
        r"The state of group 0 must hold .*; missing: 'momentum'",
    ),
    (
        lambda saved: {**saved, "state": {**saved["state"], 0: {"momentum_buffer": torch.ones(3, 5)}}},
        "The state of parameter 0 must hold 'velocity'; missing: 'velocity'",
    ),
    (
        lambda saved: {**saved, "state": {**saved["state"], 0: {"velocity": torch.ones(5, 3)}}},
        r"'velocity' of shape \(3, 5\), got \(5, 3\)",
    ),
    (lambda saved: {**saved, "state": {9: {"velocity": torch.ones(1)}}}, r"got \[9\] too"),
    (
        lambda saved: {**saved, "param_groups": [{**saved["param_groups"][0], "params": [0, 1]}]},
        r"as many parameters as in the saved state \(\[2\]\), got \[5\]",
    ),
    (
        lambda saved: {**saved, "hooks": [{"hook": "'clip' (pre, on the optimizer)", "state": {}}]},
        r"must be those of the saved state, in its order \('clip' \(pre, on the optimizer\)\), got none",
    ),
]


@pytest.mark.parametrize(("change", "message"), STRANGERS)
def test_strange_states_are_refused_before_anything_changes(change: Any, message: str) -> None:
    weights = parameters()
    optimizer = CorrectedMomentumSGD(weights)
    put_cut_grads(weights, 0)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(change(optimizer.state_dict()))
    after = optimizer.state_dict()
    assert str(before) == str(after)
