"""Models as they come: tied, frozen, sparse, in other formats, with unused or empty parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

import lockstep as ls
from lockstep.compat.nnabla import LAMB
from lockstep.updaters.step.stepping import PER_PARAMETER, StepProgress, step_whole
from tests.support.small_updater import mean_of_output, updater_of

pytestmark = pytest.mark.usefixtures("one_intra_op_thread")

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(5, (7, 3), generator=torch.Generator().manual_seed(0))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens)).logsumexp(-1)


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=True))
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.first(x).tanh())


class Unused(nn.Module):
    """Reaches one of two branches by the sign of the first input, and a third never."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2), nn.Linear(4, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[int(x[0, 0] > 0)](x).square()


class Odd(nn.Module):
    """Complex, float64, empty and scalar parameters side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extended = torch.cat([x, self.nothing])
        return ((extended * self.phase).abs() * self.scale).sum(1) + (x.double() * self.wide).sum(1)


class Storing(nn.Module):
    """Keeps what it computed in attributes, with its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {"hidden": self.body(x).relu()}
        return self.seen["hidden"]


def channels_last() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 8, 2), nn.Flatten()).to(
        memory_format=torch.channels_last
    )


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    return model


def weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Softplus())


def spectral_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Softplus())


class LossItself(nn.Module):
    """A parameter is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.Parameter(torch.tensor(2.0))
        self.other = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - that is the point
        return self.loss + self.other


MODELS: dict[str, tuple[Callable[[], nn.Module], torch.Tensor]] = {
    "tied": (Tied, TOKENS),
    "module twice": (SharedModule, X),
    "unused": (Unused, X),
    "odd dtypes": (Odd, X),
    "storing": (Storing, X),
    "channels last": (channels_last, X),
    "frozen": (frozen, X),
    "weight norm": (weight_norm, X),
    "spectral norm": (spectral_norm, X),
    "sparse embedding": (lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten()), TOKENS),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(5, 4, sparse=True), nn.Tanh()), TOKENS),
    "loss is a parameter": (LossItself, X),
    "double": (lambda: nn.Linear(4, 2).double(), X.double()),
    "half": (lambda: nn.Linear(4, 2).bfloat16(), X.bfloat16()),
}


def made(name: str) -> tuple[nn.Module, torch.Tensor]:
    build, x = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(), x


several_devices = pytest.mark.parametrize(
    "several", [pytest.param([3], id="3"), pytest.param([2, 3, 4], id="all", marks=pytest.mark.slow)]
)
"""Compares one device with three daily, and with other numbers in the slow tests."""
NUM_UPDATES = 6


def trained(name: str, *, updates: int = NUM_UPDATES, **options: Any) -> str:
    model, x = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    with updater_of(model, x, optimizer=optimizer, batch_size=7, **options) as updater:
        for _ in range(updates):
            assert updater.update().applied
    return ls.digest(model, optimizer)


@pytest.mark.filterwarnings("ignore:`model` holds weights in torch.bfloat16")
@pytest.mark.parametrize("name", MODELS)
@several_devices
def test_the_placement_law_holds_for_every_kind_of_model(name: str, several: list[int]) -> None:
    num_shards = 3 if name == "module twice" else 5
    found = {devices: trained(name, devices=devices, num_shards=num_shards) for devices in (1, *several)}
    assert len(set(found.values())) == 1, found


@pytest.mark.filterwarnings("ignore:`model` holds weights in torch.bfloat16")
@pytest.mark.parametrize("name", MODELS)
def test_one_shard_is_a_plain_loop_for_every_kind_of_model(name: str) -> None:
    model, x = made(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(NUM_UPDATES):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    assert trained(name) == ls.digest(model, optimizer)


@pytest.mark.filterwarnings("ignore:`loss_fn` must return the mean:UserWarning")  # a branch for each number of samples
def test_a_parameter_that_no_shard_reached_has_no_gradient() -> None:
    model, x = made("unused")
    with updater_of(model, x, devices=2, num_shards=3) as updater:
        updater.compute_gradients(x)
    assert model.branches[2].weight.grad is None


@pytest.mark.parametrize("devices", [1, 2])
def test_a_parameter_that_is_frozen_later_stands_still(devices: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    with updater_of(model, X, devices=devices, num_shards=2) as updater:
        updater.update()
        model[0].requires_grad_(False)
        before = ls.digest(model[0])
        updater.update()
        assert ls.digest(model[0]) == before
        model[0].requires_grad_(True)
        updater.update()
        assert ls.digest(model[0]) != before


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_hook_on_a_parameter_sees_the_whole_gradient_once(devices: int) -> None:
    model = nn.Linear(4, 1, bias=False)
    seen = []
    model.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    model.weight.register_hook(lambda gradient: gradient * 2)
    with updater_of(model, X, devices=devices, num_shards=3) as updater:
        updater.compute_gradients(X)
    assert len(seen) == 1
    assert torch.equal(model.weight.grad, seen[0] * 2)
    # The mean over 7 samples, added in another order.
    torch.testing.assert_close(seen[0], X.mean(0, keepdim=True))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "sgd foreach nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "adafactor": torch.optim.Adafactor,
    "momentum": lambda p: ls.MomentumSGD(p, lr=0.01),
    "corrected fused": lambda p: ls.CorrectedMomentumSGD(p, lr=0.01, fused=True),
    "lamb": lambda p: LAMB(p, lr=0.01),
}


def wide() -> nn.Module:
    """Enough parameters for a step in parts, of sizes from 1 to hundreds of thousands."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 700), nn.PReLU(), nn.Linear(700, 603), nn.LayerNorm(603), nn.Linear(603, 3))


@pytest.mark.parametrize("name", OPTIMIZERS)
@several_devices
def test_every_optimizer_steps_alike_at_any_placement(name: str, several: list[int]) -> None:
    def run(devices: int) -> str:
        model = wide()
        groups = [
            {"params": model[:3].parameters()},
            {"params": model[3:].parameters(), "weight_decay": 0.01},
        ]
        if isinstance(OPTIMIZERS[name]([nn.Parameter(torch.ones(1))]), ls.MomentumSGD | ls.CorrectedMomentumSGD):
            groups = [{"params": model.parameters()}]
        optimizer = OPTIMIZERS[name](groups)
        with updater_of(model, X, devices=devices, num_shards=3, optimizer=optimizer, batch_size=7) as updater:
            for _ in range(3):
                updater.update()
        return ls.digest(model, optimizer)

    assert {run(devices) for devices in several} == {run(1)}


@pytest.mark.parametrize("devices", [1, 2])
def test_a_scheduler_finds_the_step_taken(devices: int) -> None:
    # Warnings are errors here: torch would warn of a scheduler that is called before the optimizer.
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    with updater_of(model, X, devices=devices, num_shards=2, optimizer=optimizer, scheduler=scheduler) as updater:
        rates = []
        for _ in range(4):
            updater.update()
            rates.append(scheduler.get_last_lr()[0])
    assert rates == [1.0, 0.5, 0.5, 0.25]


@pytest.mark.parametrize("devices", [1, 3])
def test_hooks_of_the_optimizer_run_once_for_a_step(devices: int) -> None:
    """With one device the step is whole, with three it is taken in parts."""
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda found, *_: calls.append(f"pre {found is optimizer}"))
    optimizer.register_step_post_hook(lambda found, *_: calls.append(f"post {found is optimizer}"))
    with updater_of(model, X, devices=devices, num_shards=3, optimizer=optimizer) as updater:
        updater.update()
    assert calls == ["pre True", "post True"]


@pytest.mark.parametrize("kind", sorted(PER_PARAMETER, key=lambda kind: kind.__name__))
def test_a_step_without_pytorchs_wrappers_is_the_step(kind: type[torch.optim.Optimizer]) -> None:
    weights = [nn.Parameter(torch.linspace(-1.0, 1.0, 12)) for _ in range(2)]
    bare, plain = (kind([weight], lr=0.1) for weight in weights)  # type: ignore[call-arg]  # all of these take one
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.linspace(2.0, -1.0, 12)
        with torch.enable_grad():
            step_whole(bare, StepProgress())
            assert torch.is_grad_enabled()
        plain.step()
    assert torch.equal(*weights)


def test_a_hook_on_all_optimizers_runs_too() -> None:
    calls: list[bool] = []
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook = register_optimizer_step_post_hook(lambda found, *_: calls.append(found is optimizer))
    try:
        with updater_of(model, X, optimizer=optimizer) as updater:
            updater.update()
    finally:
        hook.remove()
    assert calls == [True]


def test_a_profiler_sees_the_step() -> None:
    with updater_of(wide(), X) as updater, torch.autograd.profiler.profile() as profile:
        updater.update()
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.function_events}


def test_an_optimizer_of_some_of_the_parameters_moves_those() -> None:
    model = wide()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    before = ls.digest(model[2])
    with updater_of(model, X, devices=2, num_shards=2, optimizer=optimizer) as updater:
        updater.update()
    assert ls.digest(model[2]) == before
    assert model[2].weight.grad is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_callers_grad_mode_does_not_matter(mode: Callable[[], Any]) -> None:
    model, x = made("frozen")
    expected, _ = made("frozen")
    with updater_of(model, x, devices=2, num_shards=3) as updater, mode():
        updater.update()
        assert not torch.is_grad_enabled()
    with updater_of(expected, x, num_shards=3) as updater:
        updater.update()
    assert ls.digest(model) == ls.digest(expected)


@pytest.mark.parametrize("batch", ["tuple", "list", "dict", "single"])
def test_batches_of_every_form_reach_the_loss_function(batch: str) -> None:
    model = nn.Linear(4, 1)

    def loss_fn(model: nn.Module, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        assert (len(args), set(named)) == {
            "tuple": (2, set()),
            "list": (2, set()),
            "dict": (0, {"x", "y"}),
            "single": (1, set()),
        }[batch]
        x = named["x"] if named else args[0]
        return model(x).mean()

    arrays: Any = {"tuple": (X, X), "list": [X, X], "dict": {"x": X, "y": X}, "single": X}[batch]
    with updater_of(model, devices=2, num_shards=3, loss_fn=loss_fn) as updater:
        assert updater.compute_gradients(arrays).weight == 7


@pytest.mark.filterwarnings("ignore:`loss_fn` must return the mean over the samples:UserWarning")  # a weight of 2
def test_the_model_may_return_the_loss_itself() -> None:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> ls.Loss:
            return ls.Loss(super().forward(x).mean(), weight=torch.tensor(2.0), metrics={"ones": (1, len(x))})

    model = Own(4, 1)
    with updater_of(model, X, devices=2, num_shards=3, loss_fn=None) as updater:
        result = updater.compute_gradients(X)
    assert result.weight == 6
    assert float(result.metrics["ones"]) == 3 / 7


def test_gradient_penalties_need_no_other_way() -> None:
    def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return model(x).mean() + slope.square().mean()

    digests = set()
    for devices in (1, 2, 3):
        model, _ = made("frozen")
        with updater_of(model, X, devices=devices, num_shards=3, loss_fn=penalty) as updater:
            updater.update()
        digests.add(ls.digest(model))
    assert len(digests) == 1


def test_functional_dropout_in_the_loss_is_of_the_shard() -> None:
    digests = set()
    for devices in (1, 2, 3):
        model, _ = made("frozen")

        def loss_fn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(model(x), 0.5).mean()

        with updater_of(model, X, devices=devices, num_shards=3, loss_fn=loss_fn) as updater:
            updater.update()
        digests.add(ls.digest(model))
    assert len(digests) == 1


def test_no_warning_comes_of_an_update() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, _ = made("frozen")
        with updater_of(model, X, devices=2, num_shards=2, loss_fn=mean_of_output) as updater:
            updater.update()


def replace_parameters(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


def test_parameters_that_a_loaded_state_has_replaced_are_named_as_that() -> None:
    # Of one element each, which equal the former ones.
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    message = r"replaced.* by `load_state_dict\(assign=True\)`"
    with updater_of(model, optimizer=optimizer) as updater:
        updater.update()
        replace_parameters(model)
        with pytest.raises(ValueError, match=message):
            updater.update()
    with pytest.raises(ValueError, match=message), updater_of(model, optimizer=optimizer):
        pass


def test_buffers_that_get_their_shapes_in_the_first_forward_have_a_cure() -> None:
    class Observing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 3)
            self.register_buffer("lowest", torch.empty(0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output = self.layer(x)
            lowest = output.detach().amin(0)
            self.lowest = torch.minimum(self.lowest, lowest) if self.lowest.numel() else lowest
            return output.mean()

    with (
        updater_of(Observing()) as updater,
        pytest.raises(ValueError, match="run the model on a batch in training mode"),
    ):
        updater.update()
    model = Observing()
    model(torch.ones(4, 1))
    with updater_of(model, buffers={"lowest": "min"}) as updater:
        assert updater.update().applied


def test_a_gradient_by_what_another_network_returns_is_explained() -> None:
    nets = {"gen": nn.Linear(2, 3), "dis": nn.Linear(3, 1)}

    def penalized(nets: Any, noise: torch.Tensor, *, leaf: bool) -> torch.Tensor:
        fake = nets["gen"](noise)
        fake = fake.detach().requires_grad_() if leaf else fake
        score = nets["dis"](fake).tanh()
        (gradient,) = torch.autograd.grad(score.sum(), fake, create_graph=True)
        return score.mean() + gradient.square().mean()

    updater = ls.ParallelUpdater(
        [(torch.randn(4, 2),)],
        {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()},
        nets,
        devices=["cpu"],
        loss_fn=partial(penalized, leaf=False),
    )
    with pytest.raises(ls.ReplicaError, match=r"does not require grad\. In compute_gradients\(optimizer=\.\.\.\) only"):
        updater.compute_gradients(torch.randn(4, 2), optimizer="dis")
    updater.compute_gradients(torch.randn(4, 2), loss_fn=partial(penalized, leaf=True), optimizer="dis")
    updater.apply_gradients("dis")
    updater.finalize()
