"""Fused optimizers, whose kernels read memory without looking at strides: the bits of a loop of one's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.group.gradients import GradientStore

Make = Callable[..., torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda weights, **options: torch.optim.AdamW(weights, lr=0.05, **options),
    "Adam": lambda weights, **options: torch.optim.Adam(weights, lr=0.05, **options),
    "SGD": lambda weights, **options: torch.optim.SGD(weights, lr=0.05, momentum=0.9, **options),
    "Adagrad": lambda weights, **options: torch.optim.Adagrad(weights, lr=0.05, **options),
    "CorrectedMomentumSGD": lambda weights, **options: ls.CorrectedMomentumSGD(weights, lr=0.05, **options),
}
FUSED = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)


class Net(nn.Module):
    """A network whose weights all lie otherwise in memory than row after row."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(8, 6, 3)
        self.last = nn.Linear(6 * 16, 5)
        self.to(memory_format=torch.channels_last)
        self.last.weight.data = self.last.weight.data.t().contiguous().t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.first.weight.dtype)
        return self.last(self.second(self.first(x).relu()).flatten(1))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 3, 8, 8, generator=generator), torch.randint(5, (6,), generator=generator)) for _ in range(4)
    ]


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    for x, target in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()
        optimizer.step()
    return ls.digest(model)


def updater_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> ls.ParallelUpdater:
    loss_fn = ls.supervised(nn.functional.cross_entropy)
    return ls.ParallelUpdater(batches(), optimizer, model, loss_fn=loss_fn, **options)


def trained(make: Make, *, fused: bool, dtype: torch.dtype = torch.float32, **options: Any) -> str:
    model = net(dtype)
    updater = updater_of(model, make(model.parameters(), fused=fused), **options)
    for _ in range(4):
        updater.update()
    updater.finalize()
    return ls.digest(model)


@FUSED
@pytest.mark.usefixtures("one_intra_op_thread")
def test_same_bits_as_a_loop_of_ones_own(make: Make) -> None:
    model = net()
    plain = loop(model, make(model.parameters(), fused=True))
    options = {"devices": 1, "num_shards": 1}
    assert trained(make, fused=True, **options) == plain


@FUSED
def test_state_follows_a_model_that_changes_its_memory_format(make: Make) -> None:
    found = []
    for fused in (True, False):
        model = net().double()
        options = {"fused": True} if fused else {}
        updater = updater_of(model, make(model.parameters(), **options), devices=1, num_shards=1)
        updater.update()
        for weight in model.parameters():
            weight.data = weight.data.contiguous()
        for _ in range(3):
            updater.update()
        updater.finalize()
        found.append([weight.detach() for weight in model.parameters()])
    for fused_weight, weight in zip(*found, strict=True):
        # Fused kernels round otherwise than the others, in float64 by far less than a step is long.
        torch.testing.assert_close(fused_weight, weight, rtol=1e-9, atol=1e-9)


def column(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, torch.Tensor]:
    """Make a model whose weight is every other column of a larger tensor."""
    torch.manual_seed(0)
    larger = torch.randn(3, 8, dtype=dtype)
    model = nn.Linear(4, 3, dtype=dtype)
    model.weight.data = larger[:, ::2]
    return model, larger


def column_updater(model: nn.Linear, optimizer: torch.optim.Optimizer, **options: Any) -> ls.ParallelUpdater:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 4, generator=generator).to(model.weight.dtype)
    loss_fn = ls.supervised(lambda output, target: (output * target).square().mean())
    data = [(x, torch.ones(6, 1).to(x.dtype))] * 4
    return ls.ParallelUpdater(data, optimizer, model, devices=1, loss_fn=loss_fn, **options)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "CorrectedMomentumSGD"])
def test_weights_that_are_not_dense_are_refused(name: str) -> None:
    model, _ = column()
    optimizer = OPTIMIZERS[name](model.parameters(), fused=True)
    with pytest.raises(ValueError, match=rf"`fused=False` .* a fused {name} and a weight of shape \(3, 4\)"):
        column_updater(model, optimizer)
    model.weight.data = torch.zeros(3, 1).expand(3, 4)
    with pytest.raises(ValueError, match=r"not dense in memory, .* strides \(1, 0\)"):
        column_updater(model, optimizer)


def test_a_weight_that_stops_being_dense_is_refused_before_anything_moves() -> None:
    model = nn.Linear(4, 3)
    updater = column_updater(model, torch.optim.AdamW(model.parameters(), fused=True))
    updater.update()
    model.weight.data = column()[0].weight.data
    before = ls.digest(model)
    with pytest.raises(ValueError, match="weights that are not dense in memory"):
        updater.update()
    updater.finalize()
    assert ls.digest(model) == before


@pytest.mark.parametrize(
    ("name", "precision", "fused"),
    [
        ("AdamW", "fp32", False),
        ("AdamW", "bf16-true", True),
        ("CorrectedMomentumSGD", "fp32", False),
        ("CorrectedMomentumSGD", "fp32", True),
    ],
)
def test_a_column_is_trained_without_its_neighbours(name: str, precision: str, fused: bool) -> None:
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    found = []
    for options in ({"fused": fused}, {}):
        model, larger = column(dtype)
        neighbours = larger[:, 1::2].clone()
        updater = column_updater(
            model,
            OPTIMIZERS[name](model.parameters(), **options),
            precision=precision,
        )
        for _ in range(3):
            updater.update()
        updater.finalize()
        assert torch.equal(larger[:, 1::2], neighbours)
        found.append(model.weight.detach())
    # Kernels that are fused round otherwise than those that are not, by a unit of the format.
    torch.testing.assert_close(*found, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_gradient_that_lies_otherwise_than_its_weight_is_laid_out_like_it(hooked: bool) -> None:
    weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    gradient = torch.arange(12.0).view(4, 3)
    if hooked:
        weight.register_hook(lambda grad: grad.contiguous())
    GradientStore().store(weight, gradient, [gradient], add=False)
    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride() == (1, 4)
    assert torch.equal(weight.grad, gradient)


@pytest.mark.parametrize("hooked", [False, True])
def test_an_update_lays_a_gradient_out_like_its_weight(hooked: bool) -> None:
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    if hooked:
        model.weight.register_hook(lambda grad: grad.contiguous())
    updater = ls.StandardUpdater(
        [(torch.ones(2, 3), torch.zeros(2, 4))],
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        loss_fn=ls.supervised(nn.functional.mse_loss),
    )
    updater.update()
    assert model.weight.grad is not None
    assert model.weight.grad.stride() == model.weight.stride() == (1, 4)
