"""Tensors in plain attributes that share memory with parameters or buffers follow them, as in a loop of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.pool.replica_set import ReplicaSet
from tests.support.small_updater import mean_of_output, updater_of

X = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
OWNERS: dict[str, Callable[[ReplicaSet, int, torch.Tensor], bool]] = {
    "none": lambda *_: True,
    "others": lambda _, place, __: place == 0,
    "all": lambda *_: False,
}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "data": lambda net: net.linear.weight.data,
    "detached": lambda net: net.linear.weight.detach(),
    "slice": lambda net: net.linear.weight.data[1:3, ::2].T,
    "rows in a list": lambda net: {"rows": [list(net.linear.weight.data)]},
    "transposed parameter": lambda net: net.turned.data.T[1],
    "part of a part": lambda net: net.part.data[1:],
    "unregistered module": lambda net: net.layers[0].weight.data[0],
    "view of statistics": lambda net: net.norm.running_mean[1:],
    "statistics": lambda net: net.norm.running_var.data,
}


class Net(nn.Module):
    """Also computes with tensors that `look` has taken from it."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.turned = nn.Parameter(torch.randn(4, 3).T)
        self.part = nn.Parameter(torch.randn(9, dtype=torch.float64)[2:6])
        self.layers = [nn.Linear(4, 1).requires_grad_(False)]
        self.double().layers[0].double()
        self.seen = look(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x))
        seen, pending = torch.ones((), dtype=x.dtype), [self.seen]
        for each in pending:
            if isinstance(each, torch.Tensor):
                seen = seen + each.sin().sum()
            else:
                pending += each.values() if isinstance(each, dict) else each
        x = x * seen + self.part
        return (x @ self.turned.T).square().mean(1) + self.norm.running_mean.sum() * x.mean(1)


def trained_plainly(net: Net) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    for batch in X.split(4):
        optimizer.zero_grad()
        net(batch).mean().backward()
        optimizer.step()
        net.layers[0].weight.data.mul_(0.5)
    return [*net.state_dict().values()]


@pytest.mark.each_value
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("view", VIEWS)
def test_views_follow_what_they_are_views_of(view: str, owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplicaSet, "_shares_memory", OWNERS[owner])
    net = Net(VIEWS[view])
    with updater_of(net, X, devices=2, num_shards=1, loss_fn=mean_of_output) as updater:
        for _ in range(3):
            updater.update()
            net.layers[0].weight.data.mul_(0.5)
    torch.testing.assert_close([*net.state_dict().values()], trained_plainly(Net(VIEWS[view])), rtol=1e-9, atol=1e-12)


OUTSIDE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "larger": (lambda net: net.part.data.as_strided((6,), (1,), 1), r"\(6,\) and torch.float64 .* memory with 'part'"),
    "other dtype": (
        lambda net: net.linear.weight.data.view(torch.int64),
        r"torch.int64 .* memory with 'linear.weight'",
    ),
    "unlike a copy": (
        lambda net: net.norm.running_mean.view(torch.int32),
        r"torch.int32 .* memory with 'norm.running_mean'",
    ),
}


@pytest.mark.parametrize("view", OUTSIDE)
def test_views_that_no_copy_can_have_are_refused_by_name(view: str, monkeypatch: pytest.MonkeyPatch) -> None:
    look, named = OUTSIDE[view]
    net = Net(look)
    if view != "unlike a copy":
        # A view of a parameter that shares its memory may be any.
        assert ls.ReplicaGroup(net, ["cpu"]).replicas[0].seen.data_ptr() == net.seen.data_ptr()
        monkeypatch.setattr(ReplicaSet, "_shares_memory", OWNERS["all"])
    with pytest.raises(ValueError, match=rf"`model` must hold only views .* {named}\. Compute it in forward"):
        _ = ls.ReplicaGroup(net, ["cpu"]).replicas
