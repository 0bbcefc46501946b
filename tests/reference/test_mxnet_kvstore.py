"""MXNet's key-value store: by the sum and the optimizers of the core, and by its own name."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import pytest
import torch
from mxnet_rules import RULES, optimizer_of
from traces import Case, Tolerance, cases, tensor

from lockstep.communicators import Contribution, LocalCommunicator
from lockstep.compat.mxnet import KVStore
from lockstep.tree import PartialSum

FILE = "mxnet-nnabla/mxnet_kvstore.json"
GIVEN = ["type", "optimizer", "compression", "ops.*.op", "ops.*.key", "ops.*.value", "ops.*.values"]
# The traces' description: a sum is a gradient and, moved by it, a value is a parameter after training; and what is
# left of larger terms has their rounding errors.
NEAR = {"*": Tolerance(1e-5, floor=0.0, offset=1e-3, peak=1e-6)}


def name(store: Any) -> str:
    words = [
        store["type"],
        (store["optimizer"] or {}).get("name"),
        (store.get("compression") or {}).get("type"),
    ]
    return "_".join(word for word in words if word)


def stores(through: str) -> list[Any]:
    return cases(FILE, num_cases=5, key="stores", given=GIVEN, name=name, through=through)


class Store(Protocol):
    """What the operations of a trace are done with."""

    rank: int
    num_workers: int

    def init(self, key: Any, value: torch.Tensor) -> None: ...

    def push(self, key: Any, value: list[torch.Tensor]) -> None: ...

    def pull(self, key: Any, out: list[torch.Tensor]) -> None: ...


class Core:
    """A weight by key, moved by the sum that the core makes of what devices bring."""

    def __init__(self, rule: dict[str, Any] | None) -> None:
        self.rule = rule
        self.communicator = LocalCommunicator()
        self.rank, self.num_workers = self.communicator.rank, self.communicator.size
        self.weights: dict[Any, torch.nn.Parameter] = {}
        self.optimizers: dict[Any, torch.optim.Optimizer] = {}

    def init(self, key: Any, value: torch.Tensor) -> None:
        self.weights[key] = torch.nn.Parameter(value.clone())
        if self.rule is not None:
            self.optimizers[key] = optimizer_of(self.rule["name"], self.rule, [self.weights[key]])

    def push(self, key: Any, value: list[torch.Tensor]) -> None:
        weight = self.weights[key]
        partials = [PartialSum(device, [part.clone()]) for device, part in enumerate(value)]
        (summed,) = self.communicator.sum_partials(partials, [Contribution.of(partials)], [weight])
        assert summed is not None
        if self.rule is None:
            weight.data.copy_(summed)
            return
        weight.grad = summed * self.rule.get("rescale_grad", 1.0)
        self.optimizers[key].step()

    def pull(self, key: Any, out: list[torch.Tensor]) -> None:
        for target in out:
            target.copy_(self.weights[key].detach())


def by_name(case: Case) -> KVStore:
    """Make the store that a user of MXNet would."""
    store = KVStore(case["type"])
    rule = case["optimizer"]
    if rule is not None:
        make = partial(optimizer_of, rule["name"], rule)
        store.set_optimizer(make, rescale_grad=rule.get("rescale_grad", 1.0))
    if case.content.get("compression") is not None:
        store.set_gradient_compression(case["compression"])
    return store


def replay(case: Case, store: Store) -> dict[str, Any]:
    """Do the operations of a case, and write down what comes out.

    Operations without a key of their own are about one, but each broadcast, which is about a new one.
    """
    done = []
    for number, op in enumerate(case["ops"]):
        key = op.get("key", f"new {number}" if op["op"] == "broadcast" else "only")
        if op["op"] in {"init", "broadcast"}:
            store.init(key, tensor(op["value"]))
        if "values" in op:
            store.push(key, [tensor(each) for each in op["values"]])
        if "out" in op:
            out = [torch.full_like(tensor(each), torch.nan) for each in op["out"]]
            store.pull(key, out)
            done.append({"out": out})
        else:
            done.append({})
    said = {"rank": store.rank, "num_workers": store.num_workers}
    return {"ops": done, **{word: value for word, value in said.items() if word in case}}


@pytest.mark.parametrize("case", stores("core"))
def test_the_core(case: Case) -> None:
    rule = case["optimizer"]
    if rule is not None and rule["name"] not in RULES:
        case.check({"ops": "no such rule"})
    elif case.content.get("compression") is not None:
        case.check({"ops": "no such compression"})
    else:
        case.check(replay(case, Core(rule)), NEAR)


@pytest.mark.parametrize("case", stores("compat"))
def test_by_its_own_name(case: Case) -> None:
    rule = case["optimizer"]
    if rule is not None and rule["name"] not in RULES:
        case.check({"ops": "no such rule"})
    else:
        case.check(replay(case, by_name(case)), NEAR)
