"""Parameters end to end: one memory, kept so, for whoever steps them one by one or all at once."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lockstep as ls


def net(**options: object) -> ls.DataParallel:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    return ls.DataParallel(module, ["cpu"] * 2, num_shards=2, **options)  # type: ignore[arg-type]


def batch() -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def test_they_are_views_of_one_tensor_and_the_same_objects() -> None:
    model = net()
    before = list(model.parameters())
    expected = torch.cat([each.detach().flatten() for each in before])
    values, gradients = model.flat_parameters()
    assert torch.equal(values, expected)
    assert values.grad is gradients
    assert torch.equal(gradients, torch.zeros(23))
    for own, other in zip(model.parameters(), before, strict=True):
        assert own is other
        assert own.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
        assert own.grad.untyped_storage().data_ptr() == gradients.untyped_storage().data_ptr()
    assert model.flat_parameters().values is values


@pytest.mark.parametrize("parallel_backward", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("zeroed", ["parameters", "flat", "between"])
def test_an_optimizer_of_the_flat_tensor_does_what_one_of_the_parameters_does(
    zeroed: str, set_to_none: bool, parallel_backward: bool
) -> None:
    plain, flat = (
        net(parallel_backward=parallel_backward),
        net(parallel_backward=parallel_backward, flatten_parameters=True),
    )
    values, gradients = flat.flat_parameters()
    steppers = [torch.optim.SGD(plain.parameters(), lr=0.1), torch.optim.SGD([values], lr=0.1)]
    of_parameters = torch.optim.SGD(flat.parameters(), lr=0.1)
    for _ in range(3):
        for model, optimizer in zip((plain, flat), steppers, strict=True):
            zeroing = of_parameters if model is flat and zeroed == "parameters" else optimizer
            if zeroed != "between":
                zeroing.zero_grad(set_to_none=set_to_none)
            loss = model(batch()).square().sum()
            if zeroed == "between":
                zeroing.zero_grad(set_to_none=set_to_none)
            loss.backward()
            optimizer.step()
        assert values.grad is gradients
    assert ls.digest(plain) == ls.digest(flat)


def test_gradients_accumulate_there() -> None:
    model = net()
    model(batch()).sum().backward()
    early = [each.grad.clone() for each in model.parameters()]
    _, gradients = model.flat_parameters()
    assert torch.equal(gradients, torch.cat([each.flatten() for each in early]))
    model(batch()).sum().backward()
    assert torch.equal(gradients, 2 * torch.cat([each.flatten() for each in early]))


def test_what_moves_the_parameters_is_followed() -> None:
    model = net(flatten_parameters=True)
    first, _ = model.flat_parameters()
    model.double()
    model(batch().double())
    second, _ = model.flat_parameters()
    assert second.dtype == torch.float64
    assert second is not first
    state = {name: each.clone() + 1 for name, each in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    third, _ = model.flat_parameters()
    assert torch.equal(third, torch.cat([each.flatten() for each in state.values()]))
    model.load_state_dict({name: each - 1 for name, each in state.items()})
    assert model.flat_parameters().values is third


def test_a_frozen_parameter_keeps_its_values_and_has_no_gradient() -> None:
    model = net(flatten_parameters=True)
    model.module[0].weight.requires_grad_(False)
    model(batch()).sum().backward()
    assert model.module[0].weight.grad is None
    values, gradients = model.flat_parameters()
    assert values.shape == gradients.shape == (23,)
    assert torch.equal(gradients[:12], torch.zeros(12))


def test_a_copy_is_laid_out_anew() -> None:
    model = net(flatten_parameters=True)
    values, _ = model.flat_parameters()
    twin = copy.deepcopy(model)
    others, _ = twin.flat_parameters()
    assert torch.equal(values, others)
    assert values.data_ptr() != others.data_ptr()


def test_what_cannot_be_laid_end_to_end_is_refused() -> None:
    mixed = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2).double()])
    with pytest.raises(ValueError, match=r"parameters of one dtype on one device .*float32.*float64"):
        ls.DataParallel(mixed, "cpu").flat_parameters()
    with pytest.raises(ValueError, match="got none"):
        ls.DataParallel(nn.Tanh(), "cpu").flat_parameters()
