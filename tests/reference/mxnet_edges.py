"""The numbers that MXNet's edges were tried with, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mxnet_nets import Net, mlp_softmax
from torch import nn
from traces import Case, cases

import lockstep as ls

EDGES = cases(
    "mxnet-nnabla/mxnet_edges.json",
    num_cases=75,
    given=["note", "case"],
    name=lambda content: content["case"],
)
REFUSED = "refused"


@dataclass(frozen=True)
class Numbers:
    """The numbers that the trace says its edges were tried with.

    Attributes:
        batch: Samples.
        ndev: Devices.
        din: Features of a sample.
        dh: Hidden features.
        dout: Classes.
        many: Devices where there are many.
        mbatch: Samples that a metric is told of.
        mloads: The loads of the devices that it is told by.
    """

    batch: int = 6
    ndev: int = 2
    din: int = 5
    dh: int = 4
    dout: int = 3
    many: int = 6
    mbatch: int = 7
    mloads: Sequence[float] = (1, 2)


FIRST: Case | None = EDGES[0].values[0]
N = Numbers() if FIRST is None else Numbers(**FIRST.shared["config"])
CPUS = ["cpu"] * N.ndev
SHAPES = {
    "fc1_weight": (N.dh, N.din),
    "fc1_bias": (N.dh,),
    "fc2_weight": (N.dout, N.dh),
    "fc2_bias": (N.dout,),
}
X = torch.arange(1.0 * N.batch * N.din).reshape(N.batch, N.din) / (N.batch * N.din)
LABEL = torch.arange(N.batch) % N.dout
ONES = torch.ones(N.batch, N.dout)
ROWS = torch.ones(N.ndev, 3)


class Mlp(Net):
    """The network of the other traces, with the original's names for its inputs."""

    def __init__(self, *, needs_label: bool = False) -> None:
        super().__init__(SHAPES, mlp_softmax)
        self.needs_label = needs_label
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, data: torch.Tensor, softmax_label: torch.Tensor | None = None) -> torch.Tensor:
        if self.needs_label and softmax_label is None:
            raise TypeError("the loss needs labels")
        return mlp_softmax(self, data, softmax_label)


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def outcome(call: Callable[[], Any]) -> Any:
    """Say what a call gives, or that it is refused."""
    try:
        return call()
    except (ls.LockstepError, KeyError, TypeError, ValueError):
        return REFUSED


def told(call: Callable[[], Any]) -> Any:
    """Say what a call gives, or how it is refused."""
    try:
        return call()
    except (ls.LockstepError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def parameters(**changed: Any) -> dict[str, Any]:
    return {**{name: torch.ones(shape) for name, shape in SHAPES.items()}, **changed}


def all_edges() -> list[Case]:
    return [parameter.values[0] for parameter in EDGES if parameter.values[0] is not None]
