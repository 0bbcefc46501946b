"""Master weights inside the step of any optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.compat.nnabla import LAMB, SGDW
from lockstep.errors import StateError
from lockstep.optim import CorrectedMomentumSGD, MomentumSGD
from lockstep.precision import LossScaler, MasterWeights

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, weight_decay=0.01),
    "fused sgd": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, fused=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3),
    "fused adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3, fused=True),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=1e-3),
    "rmsprop": lambda weights: torch.optim.RMSprop(weights, lr=1e-3, momentum=0.9, centered=True),
    "nadam": lambda weights: torch.optim.NAdam(weights, lr=1e-3),
    "adamax": lambda weights: torch.optim.Adamax(weights, lr=1e-3),
    "rprop": lambda weights: torch.optim.Rprop(weights, lr=1e-3),
    "asgd": lambda weights: torch.optim.ASGD(weights, lr=1e-3),
    "corrected": lambda weights: CorrectedMomentumSGD(weights, lr=1e-3),
    "momentum": lambda weights: MomentumSGD(weights, lr=1e-3, correction=True),
    "sgdw": lambda weights: SGDW(weights, lr=1e-3),
    "lamb": lambda weights: LAMB(weights, lr=1e-3, weight_decay=0.01),
}
HALF = [torch.float16, torch.bfloat16]


class Net(nn.Module):
    """Two half-precision layers and a float32 scalar between them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Parameter(torch.randn(4, 3, generator=generator).to(dtype))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.last = nn.Parameter(torch.randn((), generator=generator).to(dtype))


def put_gradients(weights: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)


def run(masters: MasterWeights, model: nn.Module, updates: range) -> None:
    for number in updates:
        put_gradients(list(model.parameters()), number)
        masters.step()


def equal_states(ours: Any, others: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return ours.dtype == others.dtype and torch.equal(ours, others)
    if isinstance(ours, dict):
        return ours.keys() == others.keys() and all(equal_states(ours[key], others[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(others) and all(map(equal_states, ours, others))
    return bool(ours == others)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", HALF)
def test_masters_move_as_float32_parameters_would(name: str, dtype: torch.dtype) -> None:
    model = Net(dtype)
    halves = list(model.parameters())
    floats = [nn.Parameter(weight.detach().float().clone()) for weight in halves]
    masters, reference = MasterWeights(OPTIMIZERS[name](halves)), OPTIMIZERS[name](floats)
    for number in range(6):
        put_gradients(halves, number)
        for half, each in zip(halves, floats, strict=True):
            each.grad = half.grad.float()
        masters.step()
        reference.step()
    for half, each in zip(halves, floats, strict=True):
        assert torch.equal(half, each.to(half.dtype))
    assert all(torch.equal(masters.of(halves[index]), floats[index]) for index in (0, 2))
    assert equal_states(masters.state_dict()["optimizer"]["state"], reference.state_dict()["state"])
    assert [group["params"] for group in masters.optimizer.param_groups] == [halves]


@pytest.mark.parametrize("dtype", HALF)
def test_the_law_is_not_empty_without_masters_small_steps_are_lost(dtype: torch.dtype) -> None:
    for kept in (False, True):
        weight = nn.Parameter(torch.ones(3, dtype=dtype))
        optimizer = torch.optim.SGD([weight], lr=2.0**-13)
        masters = MasterWeights(optimizer) if kept else None
        for _ in range(256):
            weight.grad = torch.ones_like(weight)
            (masters or optimizer).step()
        assert weight.tolist() == [1 - 2.0**-5 if kept else 1.0] * 3


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("middle", [0, 1, 3])
def test_a_save_and_a_load_in_the_middle_change_no_bit(name: str, middle: int) -> None:
    model = Net(torch.bfloat16)
    masters = MasterWeights(OPTIMIZERS[name](list(model.parameters())))
    run(masters, model, range(middle))
    file = io.BytesIO()
    torch.save([model.state_dict(), masters.state_dict()], file)
    run(masters, model, range(middle, 5))

    file.seek(0)
    saved_model, saved = torch.load(file, weights_only=True)
    other = Net(torch.bfloat16)
    for parameter in other.parameters():
        parameter.data.zero_()
    others = MasterWeights(OPTIMIZERS[name](list(other.parameters())))
    others.load_state_dict(saved)
    other.load_state_dict(saved_model)
    run(others, other, range(middle, 5))
    assert equal_states(masters.state_dict(), others.state_dict())
    assert equal_states(dict(model.state_dict()), dict(other.state_dict()))


@pytest.mark.parametrize("write", ["in place", "data", "load_state_dict", "rebound data"])
def test_writes_from_outside_are_followed(write: str) -> None:
    model = Net(torch.float16)
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=2.0**-14))
    run(masters, model, range(3))
    kept = masters.of(model.first)[1].clone()
    assert not torch.equal(kept, kept.half().float())
    changed = model.first.detach().clone()
    changed[0] = 1.0
    if write == "in place":
        with torch.no_grad():
            model.first[0] = 1.0
    elif write == "data":
        model.first.data[0] = 1.0
    elif write == "load_state_dict":
        model.load_state_dict({**model.state_dict(), "first": changed})
    else:
        model.first.data = changed
    masters.refresh()
    assert masters.of(model.first)[0].tolist() == [1.0] * 3
    # What was not written keeps what half precision does not show.
    assert torch.equal(masters.of(model.first)[1], kept)


def test_groups_added_later_get_masters_and_removed_ones_lose_them() -> None:
    first, second = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = torch.optim.SGD([first], lr=2.0**-12)
    masters = MasterWeights(optimizer)
    optimizer.add_param_group({"params": [second], "lr": 2.0**-10})
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second)
    masters.step()
    assert masters.of(second).tolist() == [1 - 2.0**-10] * 2
    del optimizer.param_groups[0]
    masters.refresh()
    with pytest.raises(KeyError, match="`parameter` must be a half-precision parameter of the optimizer"):
        masters.of(first)


def test_names() -> None:
    model = Net(torch.bfloat16)
    masters = MasterWeights(torch.optim.SGD(model.parameters()))
    named = masters.named(model)
    assert list(named) == ["first", "last"]
    assert {each.dtype for each in named.values()} == {torch.float32}


def test_hooks_of_the_optimizer_see_masters_and_their_gradients() -> None:
    model = Net(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.extend((each.dtype, each.grad.dtype) for each in optimizer.param_groups[0]["params"])
    )
    run(MasterWeights(optimizer), model, range(1))
    assert seen == [(torch.float32, torch.float32)] * 3


def test_a_step_that_raises_leaves_the_parameters_in_the_groups() -> None:
    model = Net(torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())

    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    handle = optimizer.register_step_pre_hook(refuse)
    masters = MasterWeights(optimizer)
    with pytest.raises(RuntimeError, match="no"):
        run(masters, model, range(1))
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    assert equal_states(dict(before), dict(model.state_dict()))
    handle.remove()
    run(masters, model, range(1))


def test_a_closure_makes_the_gradients() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    masters = MasterWeights(torch.optim.SGD([weight], lr=2.0**-13))

    def closure() -> float:
        masters.zero_grad()
        loss = weight.sum()
        loss.backward()
        return loss.item()

    assert masters.step(closure) == 2.0
    assert masters.of(weight).tolist() == [1 - 2.0**-13] * 2


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
def test_an_optimizer_that_asks_for_a_closure_gets_gradients_at_its_masters(
    dtype: torch.dtype, line_search: str | None
) -> None:
    """The plain float32 optimizer, given the gradients of its weights rounded."""
    x = torch.linspace(-1, 1, 20, dtype=torch.float32).reshape(5, 4).to(dtype)

    def loss_at(weight: torch.Tensor) -> torch.Tensor:
        return ((x * weight).float().sum(1) - 1).square().mean()

    def lbfgs(weight: nn.Parameter) -> torch.optim.LBFGS:
        return torch.optim.LBFGS([weight], lr=0.3, max_iter=4, line_search_fn=line_search)

    half = nn.Parameter(torch.full((4,), 0.3).to(dtype))
    wide = nn.Parameter(half.detach().float())
    masters, plain = MasterWeights(lbfgs(half)), lbfgs(wide)

    def ours() -> torch.Tensor:
        masters.zero_grad()
        loss = loss_at(half)
        loss.backward()
        return loss

    def theirs() -> torch.Tensor:
        rounded = nn.Parameter(wide.detach().to(dtype))
        loss = loss_at(rounded)
        loss.backward()
        wide.grad = rounded.grad.float()
        return loss

    for _ in range(3):
        assert masters.step(ours).item() == plain.step(theirs).item()
        assert torch.equal(masters.of(half), wide)
        assert torch.equal(half, wide.to(dtype))
    assert not torch.equal(wide, wide.to(dtype).float())  # else nothing was rounded
    assert masters.optimizer.param_groups[0]["params"][0] is half


def test_a_closure_that_raises_leaves_the_parameters_in_the_groups() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float16))
    masters = MasterWeights(torch.optim.LBFGS([weight]))

    def closure() -> float:
        raise RuntimeError("no loss")

    with pytest.raises(RuntimeError, match="no loss"):
        masters.step(closure)
    assert masters.optimizer.param_groups[0]["params"][0] is weight
    assert not masters.active


@pytest.mark.parametrize("name", ["adamw", "fused adamw", "sgd", "fused sgd"])
def test_a_state_that_the_optimizer_itself_loads_is_followed(name: str) -> None:
    """Torch rounds it to the parameters' format; from there it goes on in float32."""
    model = Net(torch.bfloat16)
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    masters = MasterWeights(optimizer)
    run(masters, model, range(2))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert remembered(optimizer) == {torch.bfloat16, torch.float32}
    run(masters, model, range(2, 4))
    assert remembered(optimizer) == {torch.float32}


def remembered(optimizer: torch.optim.Optimizer) -> set[torch.dtype]:
    return {
        value.dtype
        for state in optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key != "step"
    }


def test_going_back_keeps_what_is_remembered_in_the_parameters_format() -> None:
    model = Net(torch.float16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    masters = MasterWeights(optimizer)
    run(masters, model, range(1))
    assert optimizer.state[model.first]["exp_avg"].dtype == torch.float32
    masters.remove()
    assert optimizer.state[model.first]["exp_avg"].dtype == torch.float16
    assert optimizer.state[model.last]["step"].dtype == torch.float32
    put_gradients(list(model.parameters()), 1)
    optimizer.step()
    MasterWeights(optimizer)
    assert optimizer.state[model.first]["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {"optimizer": state["optimizer"]}, "missing: 'masters'"),
        (lambda state: {**state, "scale": 1}, "unknown: 'scale'"),
        (lambda state: {**state, "masters": {}}, "The master weights must have the shapes"),
        (lambda state: {**state, "masters": {**state["masters"], 0: torch.ones(1)}}, "must have the shapes"),
    ],
)
def test_strangers_are_refused(change: Callable[[Any], Any], message: str) -> None:
    model = Net(torch.float16)
    masters = MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    run(masters, model, range(2))
    saved = copy.deepcopy(masters.state_dict())
    with pytest.raises(StateError, match=message):
        masters.load_state_dict(change(saved))
    assert equal_states(masters.state_dict(), saved)


@pytest.mark.parametrize("fused", [False, True])
def test_with_a_scaler_a_left_out_step_leaves_masters_alone(fused: bool) -> None:
    model = Net(torch.bfloat16)
    masters = MasterWeights(torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused))
    scaler = LossScaler()
    for bad in (False, True):
        before = copy.deepcopy(masters.state_dict())
        put_gradients(list(model.parameters()), 0)
        if bad:
            model.first.grad[0, 0] = float("nan")
        scaler.step(masters)
        scaler.update()
        assert equal_states(masters.state_dict(), before) == bad


def test_a_model_has_no_masters_without_its_optimizer() -> None:
    with pytest.raises(TypeError, match=r"`optimizer` must be a torch.optim.Optimizer, got a Linear"):
        MasterWeights(nn.Linear(1, 1))
