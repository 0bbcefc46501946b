"""What a model holds without registering it, what tensors carry, and what is looked up by identity."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.small_updater import updater_of

BATCHES = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


class Bounded(nn.Parameter):
    """A parameter with a method and an attribute, whose constructor wants more than a tensor."""

    def __new__(cls, data: torch.Tensor, bound: float) -> Bounded:
        made: Bounded = torch.Tensor._make_subclass(cls, data, True)
        made.bound = bound
        return made

    def bounded(self) -> torch.Tensor:
        return self.clamp(-self.bound, self.bound)


class OfSubclasses(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.gain = Bounded(torch.linspace(-2, 2, 3, dtype=torch.float64), 1.5)
        self.table = nn.Buffer(torch.ones(3, dtype=torch.float64))
        self.table.factor = 3.0
        self.layer.weight.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.table, nn.Buffer)
        return self.layer(x) * self.gain.bounded() * self.table * self.table.factor * self.layer.weight.factor


def change_attributes(model: Any) -> None:
    model.table.factor *= 0.5
    model.layer.weight.factor *= 0.75
    model.gain.bound *= 0.5


class Holder:
    def __init__(self, network: nn.Module) -> None:
        self.network = network


class WithTeacher(Layer):
    """Keeps a network where `nn.Module` does not see it."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        network = nn.Sequential(nn.BatchNorm1d(4), copy.deepcopy(self.layer)).double().eval().requires_grad_(False)
        if where == "attribute":
            object.__setattr__(self, "held", network)
        elif where == "closure":
            self.held = lambda: network
        else:
            self.held = {"list": [network], "dict": {"k": (network,)}, "object": Holder(network)}[where]

    def network(self) -> nn.Module:
        if self.where == "attribute":
            return self.held
        if self.where == "closure":
            return self.held()
        return {"list": lambda x: x[0], "dict": lambda x: x["k"][0], "object": lambda x: x.network}[self.where](
            self.held
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) - self.network()(x + 1)


@torch.no_grad()
def follow(model: WithTeacher, how: str) -> None:
    """Move the teacher towards the layer, in one of the ways that programs use."""
    norm, teacher = model.network()
    for mine, other in zip(teacher.parameters(), model.layer.parameters(), strict=True):
        if how == "in place":
            mine.lerp_(other, 0.5)
        elif how == "data":
            mine.data.mul_(0.5).add_(other.data, alpha=0.5)
        elif how == "other memory":
            mine.data = 0.5 * mine.data + 0.5 * other.data
    if how == "loaded":
        teacher.load_state_dict(model.layer.state_dict())
    norm.running_mean.data.add_(0.25)


def trained_plainly(model: Any, loss_fn: Callable[..., torch.Tensor], between: Callable[[Any], None]) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    for batch in BATCHES:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
        between(model)
    return list(model.parameters())


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "what tensors carry": (OfSubclasses, change_attributes),
    **{
        f"a teacher in a {where}, {how}": (partial(WithTeacher, where), partial(follow, how=how))
        for where, how in [
            ("list", "in place"),
            ("list", "data"),
            ("list", "other memory"),
            ("list", "loaded"),
            ("dict", "data"),
            ("object", "data"),
            ("attribute", "data"),
            ("closure", "data"),
        ]
    },
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_replicas_are_what_the_model_is(case: str, devices: int) -> None:
    build, between = CASES[case]
    expected, model = trained_plainly(build(), square, between), build()
    with updater_of(
        model, BATCHES.view(-1, 4), devices=devices, num_shards=4, batch_size=12, loss_fn=square
    ) as updater:
        for _ in BATCHES:
            updater.update()
            between(model)
    # Sums are in another order.
    torch.testing.assert_close(list(model.parameters()), expected, rtol=1e-13, atol=1e-13)


def test_a_forward_that_writes_to_an_unregistered_parameter_is_refused() -> None:
    class Following(WithTeacher):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.held[0][1].weight.add_(1.0)
            return super().forward(x)

    model = Following("list")
    before = ls.digest(model.network())
    with (
        updater_of(model, BATCHES[0], num_shards=2, loss_fn=square) as updater,
        pytest.raises(ValueError, match="must not write to its parameters"),
    ):
        updater.update()
    assert ls.digest(model.network()) == before


# Looking up by identity -------------------------------------------------------------------------------


def by_set(model: Layer) -> Any:
    chosen = {model.layer.weight}
    return lambda replica, x: square(replica, x) + sum(p.square().sum() for p in replica.parameters() if p in chosen)


def by_number(model: Layer) -> Any:
    chosen = [id(model.layer.weight)]
    return lambda replica, x: square(replica, x) + sum(p.sum() for p in replica.parameters() if id(p) in chosen)


def by_dict(model: Layer) -> Any:
    factors = dict.fromkeys(model.parameters(), 2.0)

    def penalty(replica: nn.Module) -> torch.Tensor:
        return sum((factors.get(p, 0.0) * p.square().sum() for p in replica.parameters()), torch.zeros(()))

    return lambda replica, x: square(replica, x) + penalty(replica)


def by_module(model: Layer) -> Any:
    heads = frozenset([model.layer])
    return lambda replica, x: square(replica, x) + sum(m.weight.sum() for m in replica.modules() if m in heads)


def by_comparing(model: Layer) -> Any:
    chosen = [model.layer.weight]
    return lambda replica, x: (
        square(replica, x) + sum(p.square().sum() for p in replica.parameters() if any(p is q for q in chosen))
    )


def by_comparing_modules(model: Layer) -> Any:
    head = model.layer
    return lambda replica, x: square(replica, x) + sum(m.weight.sum() for m in replica.modules() if m is head)


def by_a_list_of_modules(model: Layer) -> Any:
    heads = [model.layer]
    return lambda replica, x: square(replica, x) + sum(m.weight.sum() for m in replica.modules() if m in heads)


def by_names(model: Layer) -> Any:
    names = [name for name, _ in model.named_parameters()]

    def loss(replica: nn.Module, x: torch.Tensor, weight: Any = None) -> torch.Tensor:
        factor = 1 if weight is None else weight
        return factor * square(replica, x) + sum(p.sum() for name, p in replica.named_parameters() if name in names)

    return loss


class Task:
    def __init__(self, model: Layer) -> None:
        self.decayed, self.all = {model.layer.weight}, set(model.parameters())

    def loss(self, replica: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return square(replica, x) + sum(p.square().sum() for p in replica.parameters() if p in self.decayed)

    def other_loss(self, replica: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return square(replica, x)


OF_THE_ORIGINAL = [
    by_set,
    by_number,
    by_dict,
    by_module,
    by_comparing,
    by_comparing_modules,
    by_a_list_of_modules,
    lambda model: Task(model).loss,
]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("of", OF_THE_ORIGINAL)
def test_a_loss_that_looks_up_parameters_of_the_original_is_refused(of: Any, devices: int) -> None:
    model = Layer()
    with updater_of(model, BATCHES[0], devices=devices, num_shards=2, loss_fn=of(model)) as updater:
        before = ls.digest(updater.state_dict())
        with pytest.raises(ValueError, match=r"`loss_fn` must not look up parameters and modules by identity.*'layer"):
            updater.update()
        assert ls.digest(updater.state_dict()) == before


def test_what_a_loss_does_not_name_is_left_alone() -> None:
    model = Layer()
    for loss_fn in (Task(model).other_loss, by_names(model)):
        with updater_of(model, BATCHES[0], num_shards=2, loss_fn=loss_fn) as updater:
            assert updater.update().applied


def test_a_set_of_the_model_itself_is_copied_with_it_and_numbers_are_refused() -> None:
    class Choosing(Layer):
        def __init__(self, key: Callable[[Any], Any]) -> None:
            super().__init__()
            self.key, self.chosen = key, {key(self.layer.weight)}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + sum(p.square().sum() for p in self.parameters() if self.key(p) in self.chosen)

    def itself(parameter: Any) -> Any:
        return parameter

    expected, model = trained_plainly(Choosing(itself), square, lambda _: None), Choosing(itself)
    with updater_of(model, BATCHES.view(-1, 4), devices=2, num_shards=4, batch_size=12, loss_fn=square) as updater:
        for _ in BATCHES:
            updater.update()
    torch.testing.assert_close(list(model.parameters()), expected, rtol=1e-13, atol=1e-13)
    with (
        updater_of(Choosing(id), BATCHES[0], loss_fn=square) as updater,
        pytest.raises(ValueError, match=r"`model` must not look up .* by identity.*'layer.weight'"),
    ):
        updater.update()
