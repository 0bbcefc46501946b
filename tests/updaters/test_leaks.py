"""A loss computed with the model itself, beside the replica, is refused: only replicas are summed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.ranks import run_on_ranks
from tests.support.runs import finalized
from tests.support.small_updater import updater_of

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Calling(nn.Module):
    """Keeps a function in an object of its own that calls the module it was made in."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        self.other = SimpleNamespace(read=lambda x: self.head(x).tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other.read(self.body(x)).mean()


def with_penalty(model: nn.Module) -> Callable[..., Any]:
    """Bind the model of the script, as a loss function written beside it does."""
    return lambda replica, x: replica(x).mean() + sum(each.square().sum() for each in model.parameters())


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "penalty of the model itself": (lambda: nn.Linear(4, 1), with_penalty, "weight"),
    "a function kept in the model": (Calling, lambda _: None, "head.weight"),
    "the model alone": (lambda: nn.Linear(4, 1), lambda model: lambda _, x: model(x).mean(), "weight"),
}


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_gradient_past_the_replicas_is_refused_and_nothing_moves(case: str, devices: int) -> None:
    build, loss_of, name = CASES[case]
    model = build()
    with updater_of(model, X, devices=devices, num_shards=3, loss_fn=loss_of(model)) as updater:
        before = ls.digest(updater.state_dict())
        for _ in range(2):
            with pytest.raises(ValueError, match=re.escape(f"also gives {name!r} of your original model")):
                updater.update()
            assert ls.digest(updater.state_dict()) == before
            assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_function_is_told_too_and_other_optimizers_keep_their_gradients() -> None:
    models = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.5) for name, each in models.items()}

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.compute_gradients(batch, loss_fn=lambda m, x: m["a"](x).mean(), optimizer="a")
        # The other network as it is, not its replica: a gradient for "b" alone is asked for.
        updater.compute_gradients(batch, loss_fn=lambda m, x: (m["b"](x) + models["b"](x)).mean(), optimizer="b")

    updater = ls.ParallelUpdater([X], optimizers, dict(models), devices=["cpu"], num_shards=2, step_fn=step)
    with pytest.raises(ValueError, match=re.escape("also gives 'b.weight' of your original model")):
        updater.update()
    assert models["a"].weight.grad is not None


# Buffers of the model itself --------------------------------------------------------------------------


class Centered(nn.Module):
    """Changes one of its buffers and the statistics, and leaves the other buffer alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.norm(self.body(x))
        self.center = 0.5 * self.center + output.detach().mean(0) + 0.25
        return output


class Task:
    def __init__(self, net: Any) -> None:
        self.net = net

    def by_method(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - self.net.norm.running_mean.clone()).square().mean()

    def __call__(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        return (model(x) - self.net.center).square().mean()

    def by_name(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        assert self.net.training
        return (model(x) * self.net.scale - model.center).square().mean()


OUTER: Any = Centered()


def by_global(model: Any, x: torch.Tensor) -> torch.Tensor:
    return (model(x) - OUTER.center).square().mean()


def by_closure(net: Any) -> Callable[..., torch.Tensor]:
    return lambda model, x: (model(x) - net.center).square().mean()


def by_helper(net: Any) -> Callable[..., torch.Tensor]:
    def error(output: torch.Tensor) -> torch.Tensor:
        return sum(part.mean() for part in map(lambda each: (each - net.center).square(), output))  # noqa: C417

    return lambda model, x: error(model(x)) / len(x)


def by_tensor(net: Any) -> Callable[..., torch.Tensor]:
    mean = net.norm.running_mean
    return lambda model, x: (model(x) - mean).square().mean()


def by_class(net: Any) -> Callable[..., torch.Tensor]:
    class Held:
        model = net
        scale = 2.0

    return lambda model, x: ((model(x) - Held.model.center) * Held.scale).square().mean()


def by_constant_of_a_class(_: Any) -> Callable[..., torch.Tensor]:
    class Options:
        scale = 2.0

    return lambda model, x: (model(x) * Options.scale).square().mean()


def by_the_same_name(net: Any) -> Callable[..., torch.Tensor]:
    """Names the original model like the replica, and reads nothing of it."""

    def loss(OUTER: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: N803 - as the global variable
        difference = lambda: OUTER(x) - OUTER.center  # noqa: E731 - the function inside reads the argument
        return difference().square().mean() * net.scale.mean()

    return loss


STALE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "method": (lambda net: Task(net).by_method, "norm.running_mean"),
    "object": (Task, "center"),
    "global": (lambda _: by_global, "center"),
    "closure": (by_closure, "center"),
    "helper": (by_helper, "center"),
    "class": (by_class, "center"),
    "tensor": (by_tensor, "norm.running_mean"),
    "whole batch": (
        lambda net: ls.BatchLoss(lambda model, x: model(x) - net.center, lambda each: each.std()),
        "center",
    ),
}


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("case", STALE)
def test_a_loss_that_reads_changed_buffers_of_the_original_is_refused(
    case: str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss_of, name = STALE[case]
    model = Centered()
    monkeypatch.setitem(globals(), "OUTER", model)
    with updater_of(model, X, devices=devices, num_shards=1, loss_fn=loss_of(model)) as updater:
        before = ls.digest(updater.state_dict())
        with pytest.raises(
            ValueError, match=rf"must read the buffers of the model that it is given.* {name!r} of your"
        ):
            updater.update()
        assert ls.digest(updater.state_dict()) == before


@pytest.mark.filterwarnings("ignore:`loss_fn` must return the mean:UserWarning")  # it centers by the mean of the shard
@pytest.mark.parametrize("loss_of", [lambda net: Task(net).by_name, by_the_same_name, by_constant_of_a_class])
def test_a_loss_that_reads_other_buffers_is_left_alone(loss_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Centered()
    monkeypatch.setitem(globals(), "OUTER", model)
    with updater_of(model, X, num_shards=2, loss_fn=loss_of(model)) as updater:
        assert updater.update().applied


# Tensors that are trained beside the model ------------------------------------------------------------


class Centers(nn.Module):
    """A criterion that learns, with a number, a table and a use of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.table = nn.Parameter(torch.linspace(-1, 1, 6).view(2, 3))

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return torch.cdist(output, self.table).min(1).values.mean() * self.scale.exp()


class OverAll(Centers):
    def forward(self, output: torch.Tensor) -> torch.Tensor:
        return super().forward(output) + (output @ output.T).logsumexp(1).mean() * self.scale


BATCHES = torch.randn(3, 12, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 3).double()


def plain(criterion: nn.Module) -> list[torch.Tensor]:
    """Train a network and a criterion in a loop of PyTorch."""
    modules = nn.ModuleList([network(), criterion.double()])
    optimizer = torch.optim.SGD(modules.parameters(), lr=0.25)
    for batch in BATCHES:
        optimizer.zero_grad()
        criterion(modules[0](batch)).backward()
        optimizer.step()
    return [each.detach() for each in modules.parameters()]


def together(loss_of: Callable[[nn.Module], Any], criterion: nn.Module, devices: int, **options: Any) -> Any:
    """Train a network and a criterion as two models."""
    models = {"net": network(), "criterion": criterion.double()}
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.25) for name, each in models.items()}
    options = {"num_shards": 4, "loss_fn": loss_of(criterion), **options}
    with finalized(
        ls.ParallelUpdater(list(BATCHES), optimizers, models, devices=["cpu"] * devices, **options)
    ) as updater:
        for _ in BATCHES:
            updater.update()
    return [each.detach() for model in models.values() for each in model.parameters()]


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize(
    ("loss_of", "kind"),
    [
        (lambda _: lambda nets, x: nets["criterion"](nets["net"](x)), Centers),
        (lambda criterion: ls.BatchLoss(lambda nets, x: nets["net"](x), criterion), OverAll),
        (lambda criterion: ls.BatchLoss(lambda nets, x: nets["net"](x), criterion), Centers),
    ],
)
def test_a_criterion_that_is_one_of_the_models_is_trained_as_in_a_plain_loop(
    loss_of: Any, kind: type[nn.Module], devices: int
) -> None:
    expected, found = plain(kind()), together(loss_of, kind(), devices)
    # Sums are in another order.
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_a_criterion_of_a_batch_loss_has_the_same_bits_on_any_devices_and_ranks() -> None:
    loss_of = partial(ls.BatchLoss, lambda nets, x: nets["net"](x))
    digests = {ls.digest(together(loss_of, OverAll(), devices)) for devices in (1, 2, 3)}
    assert {*digests, *run_on_ranks(criterion_on_ranks, 2)} == digests
    assert len(digests) == 1


def criterion_on_ranks(communicator: ls.Communicator) -> str:
    loss_of = partial(ls.BatchLoss, lambda nets, x: nets["net"](x))
    return ls.digest(together(loss_of, OverAll(), 1, communicator=communicator))


def bound(criterion: nn.Module) -> Any:
    return lambda model, x: criterion(model(x))


BESIDE: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a closure": (bound, "'scale' of a Centers"),
    "supervised": (lambda criterion: ls.supervised(lambda x, _: criterion(x)), "'scale' of a Centers"),
    "a partial": (lambda criterion: partial(lambda model, x, c: c(model(x)), c=criterion), "'scale' of a Centers"),
    "the criterion of a BatchLoss": (lambda each: ls.BatchLoss(lambda m, x: m(x), each), "'scale' of a Centers"),
    "a bare tensor": (lambda _: partial(scaled, v=torch.ones(3, requires_grad=True)), "a tensor of shape (3,)"),
    "a list": (lambda c: partial(lambda m, x, cs: cs[0](m(x)), cs=[c]), "'scale' of a Centers"),
}


def scaled(model: nn.Module, x: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (model(x) * v).square().mean()


@pytest.mark.each_value
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("case", BESIDE)
def test_what_is_trained_beside_the_model_is_refused_by_name(case: str, devices: int) -> None:
    loss_of, name = BESIDE[case]
    criterion, model = Centers(), nn.Linear(4, 3)
    data = (X, X) if case == "supervised" else (X,)
    with updater_of(model, *data, devices=devices, num_shards=2, loss_fn=loss_of(criterion)) as updater:
        before = ls.digest(updater.state_dict())
        with pytest.raises(ValueError, match="besides the parameters of the model") as error:
            updater.update()
        assert ls.digest(updater.state_dict()) == before
    assert name in str(error.value)
    assert all(parameter.grad is None for parameter in criterion.parameters())


def test_a_group_refuses_it_too() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.others = nn.Linear(4, 3), [Centers()]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.others[0](self.layer(x))

    with ls.ReplicaGroup(Around(), devices=["cpu"] * 2) as group, pytest.raises(ValueError, match="'scale' of a Cent"):
        group.forward(X)


def of_gradients(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Make a leaf of its own, as a gradient penalty does, with a hook that refers to it."""
    other = x.clone().requires_grad_()
    other.register_hook(lambda grad: grad + 0 * other.detach())
    (gradient,) = torch.autograd.grad(model(other).square().sum(), other, create_graph=True)
    return gradient.norm(dim=1).mean()


def of_inputs(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return (gradient * x).sum(1).mean()


def test_a_batch_that_requires_a_gradient_is_refused_with_the_cure() -> None:
    x = X.clone().requires_grad_()
    with (
        updater_of(nn.Linear(4, 3), x, num_shards=3, loss_fn=of_inputs) as updater,
        pytest.raises(ValueError, match=r"a tensor of the batch, call requires_grad_\(\) on it in the loss function"),
    ):
        updater.update()


def of_an_extractor() -> Any:
    extractor = nn.Linear(4, 4).eval()
    return lambda model, x: model(extractor(x)).square().mean()


@pytest.mark.each_value
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("loss_fn", [of_gradients, of_inputs, of_an_extractor()])
def test_leaves_that_nobody_trains_are_left_alone(loss_fn: Any, devices: int) -> None:
    with updater_of(nn.Linear(4, 3), X, devices=devices, num_shards=3, loss_fn=loss_fn) as updater:
        assert all(updater.update().applied for _ in range(4))
