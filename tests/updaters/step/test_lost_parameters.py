"""Parameters that leave the model during a run keep no gradient, as in a loop that calls zero_grad()."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

import lockstep as ls
from tests.support.runs import finalized

X = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3
Change = Callable[[nn.Sequential, torch.optim.Optimizer], None]


def remove(model: nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[1] = nn.Identity()


def normalize(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    parametrizations.weight_norm(model[0])
    optimizer.add_param_group({"params": [*model[0].parametrizations.weight.parameters()]})


def trained(change: Change, kind: Any, clip: float | None, num_devices: int) -> torch.Tensor:
    """Return the weights after six steps, the last three of them with a changed model; without devices in a loop."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)).double()
    optimizer = kind(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(X), Y).backward()
        if clip:
            nn.utils.clip_grad_norm_([each for group in optimizer.param_groups for each in group["params"]], clip)
        optimizer.step()

    if num_devices:
        updater = ls.ParallelUpdater(
            [(X, Y)],
            optimizer,
            model,
            devices=["cpu"] * num_devices,
            num_shards=4,
            loss_fn=ls.supervised(functional.cross_entropy),
            clip_grad_norm=clip,
        )
        with finalized(updater):
            for update in range(6):
                if update == 3:
                    change(model, optimizer)
                updater.update()
    else:
        for update in range(6):
            if update == 3:
                change(model, optimizer)
            step()
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.each_value
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(
    ("change", "kind", "clip"),
    [
        (remove, partial(torch.optim.SGD, lr=0.5), 0.1),
        (normalize, partial(torch.optim.SGD, lr=0.1, momentum=0.9), None),
        (normalize, partial(torch.optim.Adam, lr=0.01), None),
    ],
    ids=["a layer removed", "a weight replaced", "a weight replaced, Adam"],
)
def test_the_weights_of_a_plain_loop(change: Change, kind: Any, clip: float | None, num_devices: int) -> None:
    torch.testing.assert_close(
        trained(change, kind, clip, num_devices), trained(change, kind, clip, 0), rtol=1e-12, atol=1e-14
    )
