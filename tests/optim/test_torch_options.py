"""The options of torch's SGD on the momentum optimizers, and its saved state loaded into them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.compat.nnabla import SGDW
from lockstep.errors import StateError

OPTIONS: list[dict[str, Any]] = [
    {"nesterov": True},
    {"dampening": 0.3},
    {"dampening": 0.3, "momentum": 0.0},
    {"maximize": True},
    {"maximize": True, "weight_decay": 0.1, "nesterov": True},
    {"dampening": 1.0, "weight_decay": 0.1, "maximize": True},
]


def weights() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in (3, 70)]


def run(optimizer: torch.optim.Optimizer, steps: int = 5, seed: int = 1) -> list[torch.Tensor]:
    """Step by random gradients; the second parameter has its first gradient only in the third step."""
    generator = torch.Generator().manual_seed(seed)
    parameters = optimizer.param_groups[0]["params"]
    for step in range(steps):
        for index, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient if step > 1 or index == 0 else None
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("fused", [False, True])
def test_steps_are_those_of_torch(options: dict[str, Any], fused: bool) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "fused": fused, **options}
    # Not fused: torch leaves the velocity of a parameter uninitialized that has its first gradient later.
    expected = run(torch.optim.SGD(weights(), **{**options, "fused": False}))
    found = run(ls.CorrectedMomentumSGD(weights(), **options))
    if fused:
        torch.testing.assert_close(found, expected)
    else:
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    del options["fused"]
    for correction in (False, True):
        own = run(ls.MomentumSGD(weights(), correction=correction, **options))
        torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("options", [{"nesterov": True}, {"dampening": 0.25}, {"weight_decay": 0.1}])
def test_correction_is_torchs_rule_when_the_rate_changes(options: dict[str, Any]) -> None:
    found = []
    for kind, more in ((torch.optim.SGD, {}), (ls.MomentumSGD, {"correction": True})):
        optimizer = kind(weights(), lr=0.1, momentum=0.9, **options, **more)
        run(optimizer)
        optimizer.param_groups[0]["lr"] = 0.02
        found.append(run(optimizer, seed=2))
    torch.testing.assert_close(*found)


def test_nesterov_needs_momentum_and_no_dampening() -> None:
    for options in ({"momentum": 0.0}, {"dampening": 0.1}):
        with pytest.raises(ValueError, match="`nesterov` must be used with a momentum"):
            ls.MomentumSGD(weights(), nesterov=True, **options)
    with pytest.raises(ValueError, match=r"`dampening` must lie in \[0, 1\], got 2"):
        ls.CorrectedMomentumSGD(weights(), dampening=2)


@pytest.mark.parametrize("kind", [ls.CorrectedMomentumSGD, ls.MomentumSGD])
@pytest.mark.parametrize("options", [{}, {"nesterov": True, "weight_decay": 0.1}, {"momentum": 0.0}])
def test_the_state_of_torchs_sgd_continues(kind: Any, options: dict[str, Any]) -> None:
    torchs = torch.optim.SGD(weights(), **{"lr": 0.1, "momentum": 0.9, **options})
    halfway = run(torchs, 1)
    state = copy.deepcopy(torchs.state_dict())
    expected = run(torchs, seed=2)
    optimizer = kind(weights(), lr=5.0, momentum=0.5, missing_grad="skip")
    for parameter, value in zip(optimizer.param_groups[0]["params"], halfway, strict=True):
        parameter.data.copy_(value)
    with pytest.warns(UserWarning, match=f"that of torch.optim.SGD.* velocities of this {kind.__name__}"):
        optimizer.load_state_dict(state)
    assert optimizer.lr == 0.1
    torch.testing.assert_close(run(optimizer, seed=2), expected)
    again = kind(weights())
    again.load_state_dict(optimizer.state_dict())


def test_a_scheduler_continues_on_the_converted_state() -> None:
    torchs = torch.optim.SGD(weights(), lr=0.1, momentum=0.9)
    rates = torch.optim.lr_scheduler.OneCycleLR(torchs, max_lr=0.5, total_steps=10)
    run(torchs, 1)
    rates.step()
    optimizer = ls.MomentumSGD(weights())
    own_rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.25, total_steps=10)
    # Twice, because torch changes the defaults of an optimizer that loads a state.
    for _ in range(2):
        with pytest.warns(UserWarning, match="torch.optim.SGD") as caught:
            optimizer.load_state_dict(torchs.state_dict())
        assert caught[0].filename == __file__
    own_rates.load_state_dict(rates.state_dict())
    for _ in range(3):
        for scheduler in (rates, own_rates):
            run(scheduler.optimizer, 1)
            scheduler.step()
        group, other = optimizer.param_groups[0], torchs.param_groups[0]
        assert (group["lr"], group["momentum"]) == (other["lr"], other["momentum"])


def test_correction_keeps_the_rate_of_the_converted_velocity() -> None:
    torchs = torch.optim.SGD(weights(), lr=0.1, momentum=0.9)
    run(torchs)
    optimizer = ls.MomentumSGD(weights(), correction=True)
    with pytest.warns(UserWarning, match="torch.optim.SGD"):
        optimizer.load_state_dict(torchs.state_dict())
    parameter = optimizer.param_groups[0]["params"][0]
    assert optimizer.state[parameter]["velocity_lr"] == 0.1


@pytest.mark.parametrize("kind", [ls.CorrectedMomentumSGD, ls.MomentumSGD])
def test_a_state_from_before_these_options_has_their_defaults(kind: Any) -> None:
    optimizer = kind(weights(), lr=0.1)
    run(optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    for option in ("dampening", "nesterov", "maximize"):
        del state["param_groups"][0][option]
    again = kind(weights(), nesterov=True)
    again.load_state_dict(state)
    assert again.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    state["param_groups"][0].pop("momentum")
    with pytest.raises(StateError, match=r"missing: 'momentum'"):
        again.load_state_dict(state)


def test_the_state_of_other_optimizers_is_refused() -> None:
    torchs = torch.optim.SGD(weights(), lr=0.1, momentum=0.9)
    run(torchs)
    with pytest.raises(StateError):
        SGDW(weights()).load_state_dict(torchs.state_dict())
    adam = torch.optim.Adam(weights())
    run(adam)
    with pytest.raises(StateError):
        ls.MomentumSGD(weights()).load_state_dict(adam.state_dict())
    small = ls.MomentumSGD(weights()[:1])
    with pytest.warns(UserWarning, match="torch.optim.SGD"), pytest.raises(StateError):
        small.load_state_dict(torchs.state_dict())
