"""Options of parameter groups: refused where an optimizer has none of the name, obeyed where it has."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

from lockstep.compat import chainer
from lockstep.compat.nnabla import LAMB, SGDW
from lockstep.errors import StateError
from lockstep.optim import CorrectedMomentumSGD, HookedOptimizer, MomentumSGD, UpdateSchedule
from lockstep.optim.schedule import warmup
from tests.support.optimizers import bits, parameters, put_cut_grads

ALL = pytest.mark.parametrize("cls", [CorrectedMomentumSGD, MomentumSGD, SGDW, LAMB])
DECAYING = pytest.mark.parametrize(
    ("cls", "options"),
    [
        (CorrectedMomentumSGD, {}),
        (CorrectedMomentumSGD, {"fused": True}),
        (MomentumSGD, {}),
        (MomentumSGD, {"correction": True}),
    ],
)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


# Names -------------------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("option", ["amsgrad", "capturable", "rho", "momentun", "weight_decays"])
def test_an_option_that_an_optimizer_does_not_have_is_refused_by_name(cls: type[HookedOptimizer], option: str) -> None:
    message = f"only options of {cls.__name__} .*missing_grad.*, got '{option}'"
    with pytest.raises(ValueError, match=message):
        cls([{"params": [weight()]}, {"params": [weight()], option: 0.5}])
    optimizer = cls([weight()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weight()], option: 0.5})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(("cls", "option"), [(LAMB, "momentum"), (MomentumSGD, "fused"), (SGDW, "betas")])
def test_an_option_of_another_optimizer_is_refused(cls: type[HookedOptimizer], option: str) -> None:
    with pytest.raises(ValueError, match=f"got '{option}'"):
        cls([{"params": [weight()], option: 0.5}])


@ALL
def test_a_saved_option_that_the_optimizer_does_not_have_is_refused(cls: type[HookedOptimizer]) -> None:
    optimizer = cls([weight()])
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    saved["param_groups"][0]["amsgrad"] = True
    with pytest.raises(StateError, match=r"The state of group 0 must hold .*; unknown: 'amsgrad'"):
        optimizer.load_state_dict(saved)
    assert str(optimizer.state_dict()) == str(before)


@ALL
def test_what_torch_keeps_in_a_group_is_no_option(cls: type[HookedOptimizer]) -> None:
    def build() -> HookedOptimizer:
        model = nn.Linear(2, 1)
        optimizer = cls(model.named_parameters(), lr=0.1)
        UpdateSchedule(optimizer, warmup(3))
        SWALR(optimizer, swa_lr=0.05)
        optimizer.step()
        lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10, cycle_momentum=True)
        return optimizer

    first, second = build(), build()
    second.load_state_dict(first.state_dict())
    second.add_param_group({**second.param_groups[0], "params": [("other", weight())]})
    assert second.param_groups[1]["max_lr"] == 0.1


def test_chainers_optimizers_are_set_up_again_after_a_schedule() -> None:
    optimizer = chainer.MomentumSGD(lr=0.5).setup(nn.Linear(2, 1))
    UpdateSchedule(optimizer, warmup(3))
    assert len(optimizer.setup(nn.Linear(3, 1)).param_groups) == 1


# Decay -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_decay_has_the_bits_of_torch_sgd(fused: bool, dtype: torch.dtype, momentum: float, weight_decay: float) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer = CorrectedMomentumSGD(
        [{"params": ours, "weight_decay": weight_decay}], lr=0.1, momentum=momentum, fused=fused
    )
    options: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
    reference = torch.optim.SGD(theirs, lr=0.1, momentum=momentum, weight_decay=weight_decay, **options)
    for step in range(6):
        for weights in (ours, theirs):
            put_cut_grads(weights, step)
        given = bits([each.grad for each in ours if each.grad is not None])
        optimizer.step()
        reference.step()
        assert bits(ours) == bits(theirs)
        assert fused or bits([each.grad for each in ours if each.grad is not None]) == given


@pytest.mark.parametrize("correction", [False, True])
def test_decay_passes_through_a_velocity_that_has_the_rate_inside(correction: bool) -> None:
    ours, theirs = parameters(torch.float64), parameters(torch.float64)
    optimizer = MomentumSGD(ours, lr=0.1, weight_decay=0.3, correction=correction)
    reference = CorrectedMomentumSGD(theirs, lr=0.1, weight_decay=0.3)
    for step in range(6):
        for weights in (ours, theirs):
            put_cut_grads(weights, step)
        if correction:
            optimizer.lr = reference.lr = 0.1 / (1 + step)
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        # The rate is multiplied in before the sum here and after it there.
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-15)


@DECAYING
def test_groups_decay_by_rates_of_their_own(cls: type[HookedOptimizer], options: dict[str, Any]) -> None:
    decaying, still = weight(), weight()
    groups = [{"params": [decaying], "weight_decay": 0.5}, {"params": [still]}]
    optimizer = cls(groups, lr=0.5, momentum=0.0, **options)
    for each in (decaying, still):
        each.grad = torch.ones(2)
    optimizer.step()
    assert (decaying.tolist(), still.tolist()) == ([0.25, 0.25], [0.5, 0.5])


@DECAYING
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning")
def test_decay_of_a_sparse_gradient_reaches_every_row(cls: type[HookedOptimizer], options: dict[str, Any]) -> None:
    dense, sparse = nn.Parameter(torch.ones(4, 2)), nn.Parameter(torch.ones(4, 2))
    dense.grad = torch.zeros(4, 2)
    dense.grad[1] = 1.0
    sparse.grad = dense.grad.to_sparse()
    for each in (dense, sparse):
        cls([each], lr=0.5, weight_decay=0.25, **options).step()
    assert torch.equal(dense, sparse)
    assert dense[0].tolist() == [0.875, 0.875]


@DECAYING
def test_decay_is_saved(cls: type[HookedOptimizer], options: dict[str, Any]) -> None:
    saved = cls([weight()], weight_decay=0.25, **options).state_dict()
    other = cls([weight()], **options)
    other.load_state_dict(saved)
    assert other.param_groups[0]["weight_decay"] == 0.25


def test_sgdw_decays_beside_the_velocity_only() -> None:
    moved = weight()
    optimizer = SGDW([moved], lr=0.5, momentum=0.5, weight_decay=0.25)
    moved.grad = torch.zeros(2)
    optimizer.step()
    assert moved.tolist() == [0.75, 0.75]
    assert optimizer.state[moved]["velocity"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("cls", [CorrectedMomentumSGD, MomentumSGD])
@pytest.mark.parametrize("rate", [-0.1, float("inf"), float("nan")])
def test_a_decay_out_of_range_is_refused(cls: type[HookedOptimizer], rate: float) -> None:
    with pytest.raises(ValueError, match="`weight_decay` must be finite and at least 0, got"):
        cls([weight()], weight_decay=rate)


# Rates and shapes --------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("lr", [torch.tensor([0.1, 0.2]), torch.zeros(0), torch.full((2, 2), 0.1)])
def test_several_rates_are_refused(cls: type[HookedOptimizer], lr: torch.Tensor) -> None:
    message = r"`lr` must be a number or a tensor of one element, got a tensor of shape \("
    with pytest.raises(ValueError, match=message):
        cls([weight()], lr=lr)
    with pytest.raises(ValueError, match=message):
        cls([{"params": [weight()], "lr": lr}])
    optimizer = cls([weight()], lr=0.5)
    with pytest.raises(ValueError, match=message):
        optimizer.lr = lr
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weight()], "lr": lr})
    assert (optimizer.lr, len(optimizer.param_groups)) == (0.5, 1)


@pytest.mark.parametrize("cls", [MomentumSGD, SGDW])
def test_several_rates_are_refused_with_correction_too(cls: type[HookedOptimizer]) -> None:
    with pytest.raises(ValueError, match="`lr` must be a number or a tensor of one element"):
        cls([weight()], lr=torch.tensor([0.1, 0.2]), correction=True)


@ALL
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_tensor_of_one_rate_is_taken(cls: type[HookedOptimizer], shape: tuple[int, ...]) -> None:
    weights = [weight(), weight()]
    for each, lr in zip(weights, (0.5, torch.full(shape, 0.5)), strict=True):
        each.grad = torch.ones(2)
        cls([each], lr=lr).step()
    assert torch.equal(*weights)


@ALL
def test_a_parameter_without_a_shape_misses_no_gradient(cls: type[HookedOptimizer]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.LazyLinear(1))
    optimizer = cls(model.parameters(), lr=0.5, missing_grad="zero")
    seen: list[int] = []
    optimizer.add_hook(lambda each: seen.append(len(each.moving_parameters())), name="count")
    optimizer.step()
    model(torch.ones(1, 2))
    optimizer.step()
    assert seen == [2, 4]
    assert optimizer.state[model[1].weight]


def test_chainers_optimizers_step_before_the_first_forward_too() -> None:
    model = nn.LazyLinear(1)
    optimizer = chainer.MomentumSGD(lr=0.5).setup(model)
    optimizer.update()
    model(torch.ones(1, 2))
    optimizer.update()
    assert optimizer.t == 2


# Rules of your own -------------------------------------------------------------------------------


class SignSGD(HookedOptimizer):
    """A rule for lists of tensors, with one tensor of state."""

    _state_names = ("last",)

    def _advance_lists(self, group: dict[str, Any], *lists: list[torch.Tensor]) -> None:
        for moved, last, grad in zip(*lists, strict=True):
            last.copy_(grad.sign())
            moved.sub_(group["lr"] * last)


class OwnSGD(HookedOptimizer):
    """A rule that walks over the parameters itself and has no state."""

    def advance(self) -> None:
        for moved in self.moving_parameters():
            moved.sub_(self.lr * moved.grad.sign())  # type: ignore[union-attr]

    def state_keys(self, group: Any) -> frozenset[str]:  # noqa: ARG002
        return frozenset()


@pytest.mark.parametrize("cls", [SignSGD, OwnSGD])
def test_a_rule_is_written_for_lists_or_as_a_walk(cls: type[HookedOptimizer]) -> None:
    moved = weight()
    optimizer = cls([moved], {"lr": 0.5, "missing_grad": "zero", "frozen": False})
    moved.grad = torch.tensor([3.0, -4.0])
    optimizer.step()
    assert moved.tolist() == [0.5, 1.5]
    again = cls([weight()], optimizer.defaults)
    again.load_state_dict(optimizer.state_dict())
    assert again.t == 1
