"""Tensors outside of the model that change while shards are computed are warned of by name."""

from __future__ import annotations

import copy
import functools
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional

import lockstep as ls
from tests.support.runs import Placement, cross_entropy, finalized, train, updater_for
from tests.support.workloads import MLP

TWO = Placement(2)
RUN: dict[str, Any] = {"num_shards": 4, "batch_size": 16, "num_samples": 32}


class Centred:
    """A loss of outputs from which a moving average is subtracted, as in DINO."""

    def __init__(self) -> None:
        self.center = torch.zeros(3)

    def __call__(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = model(x)
        loss = functional.cross_entropy(output - self.center, target)
        self.update_center(output)
        return loss

    @torch.no_grad()
    def update_center(self, output: torch.Tensor) -> None:
        mean = output.mean(0)
        self.center = self.center * 0.5 + mean * 0.5


class InPlace(Centred):
    @torch.no_grad()
    def update_center(self, output: torch.Tensor) -> None:
        self.center.mul_(0.5).add_(output.mean(0), alpha=0.5)


class OfData(Centred):
    """Writes to `data`, which no version counts."""

    @torch.no_grad()
    def update_center(self, output: torch.Tensor) -> None:
        self.center.data.mul_(0.5).add_(output.mean(0), alpha=0.5)


class Queue(nn.Module):
    """A loss with keys of former samples in a buffer, as in MoCo."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.eye(3).repeat(4, 1))
        self.place = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(output, target) + (output @ self.queue.clone().T).logsumexp(1).mean()
        self.queue[self.place % 12] = output.detach()[0]
        self.place += 1
        return loss


def nonlocal_center() -> Any:
    center = torch.zeros(3)

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal center
        output = model(x)
        center = 0.5 * center + 0.5 * output.detach().mean(0)
        return functional.cross_entropy(output - center, target)

    return loss_fn


STATE = {"center": torch.zeros(3)}


def of_dict(model: nn.Module, x: torch.Tensor, target: torch.Tensor, *, state: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(x)
    loss = functional.cross_entropy(output - state["center"], target)
    state["center"] = 0.5 * state["center"] + 0.5 * output.detach().mean(0)
    return loss


def of_globals(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return of_dict(model, x, target, state=STATE)


def bank() -> Any:
    kept = [torch.zeros(3), torch.zeros(3)]

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = model(x)
        loss = functional.cross_entropy(output - torch.stack(kept).mean(0), target)
        kept.append(output.detach().mean(0))
        kept.pop(0)
        return loss

    return loss_fn


def normed() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3, momentum=0.5))


def taught(teacher: Any) -> Any:
    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = teacher(x)
            # What a teacher in train mode normalizes by later.
            wanted = wanted + teacher[1].running_mean
        return cross_entropy(model, x, target) + functional.mse_loss(model(x), wanted)

    return loss_fn


class Held:
    """A loss whose average is in an object of its own."""

    def __init__(self) -> None:
        self.inner = Centred()

    def loss(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.inner(model, x, target)


def recent() -> Any:
    kept = {"means": deque([torch.zeros(3)], maxlen=1)}

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = model(x)
        loss = functional.cross_entropy(output - kept["means"][0], target)
        kept["means"].append(output.detach().mean(0))
        return loss

    return loss_fn


def averaging() -> Any:
    """A teacher that is moved in the loss function, by `data` as in BYOL."""
    teacher = MLP.model()

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
            mine.data = mine.data * 0.5 + theirs.data * 0.5
        with torch.no_grad():
            wanted = teacher(x)
        return cross_entropy(model, x, target) + functional.mse_loss(model(x), wanted)

    return loss_fn


def created() -> Any:
    """A teacher that begins as a copy of the model in the first call, and is moved in each."""
    kept: dict[str, nn.Module] = {}

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept["teacher"] = copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            wanted = kept["teacher"](x)
            for mine, theirs in zip(kept["teacher"].parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
        return cross_entropy(model, x, target) + functional.mse_loss(model(x), wanted)

    return loss_fn


CHANGING: dict[str, tuple[Callable[[], Any], str]] = {
    "rebound": (Centred, "Centred.center"),
    "in place": (InPlace, "InPlace.center"),
    "by data": (OfData, "OfData.center"),
    "method": (lambda: Held().loss, "Held.inner.center"),
    "criterion": (lambda: ls.supervised(Queue()), "criterion.queue"),
    "closure": (nonlocal_center, "center"),
    "partial": (lambda: functools.partial(of_dict, state={"center": torch.zeros(3)}), "state['center']"),
    "list": (bank, "kept["),  # which of its entries depends on the audited shard
    "deque": (recent, "kept['means']["),
    "teacher": (lambda: taught(normed()), "teacher.1.running_mean"),
    "moved teacher": (averaging, "teacher.0.weight"),
    "created teacher": (created, "kept['teacher'].0.weight"),
}


@pytest.mark.filterwarnings("ignore::lockstep.DeterminismWarning")
@pytest.mark.parametrize("name", CHANGING)
def test_the_result_depends_on_the_placement(name: str) -> None:
    make, _ = CHANGING[name]
    # One device after another: with two threads the bits would differ from run to run.
    assert train(MLP, loss_fn=make(), **RUN) != train(MLP, Placement(4, (1, 2, 3, 4)), loss_fn=make(), **RUN)


@pytest.mark.each_value
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("name", CHANGING)
def test_it_is_warned_of_once_by_name(name: str, num_devices: int) -> None:
    make, value = CHANGING[name]
    updater = updater_for(MLP, Placement(num_devices), loss_fn=make(), **RUN)
    with finalized(updater), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            updater.update()
    (message,) = [str(each.message) for each in caught if each.category is ls.DeterminismWarning]
    assert f"`{value}" in message
    assert "this changed, which is no part of the model: " in message
    assert "eval()" in message


@pytest.mark.parametrize("seed", range(6))
def test_a_value_of_the_last_shard_is_named_if_that_shard_is_computed_twice(seed: int) -> None:
    # What the audited shard leaves behind is there already before it is computed again.
    with (
        finalized(updater_for(MLP, loss_fn=recent(), seed=seed, **RUN)) as updater,
        pytest.warns(ls.DeterminismWarning, match=r"part of the model: `kept\['means'\]"),
    ):
        updater.update()


def test_a_global_value_is_found_through_functions() -> None:
    updater = updater_for(MLP, TWO, loss_fn=of_globals, **RUN)
    with finalized(updater), pytest.warns(ls.DeterminismWarning, match=r"part of the model: `STATE\['center'\]`\."):
        updater.update()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_a_loss_leaves_for_that_of_another_gradient_is_named(num_devices: int) -> None:
    kept: dict[str, torch.Tensor] = {}

    def first(nets: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        kept["mean"] = (output := nets["one"](x)).detach().mean(0)
        return functional.cross_entropy(output, target)

    def second(nets: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(nets["other"](x) + kept["mean"], target)

    def step(updater: Any, batch: Any) -> None:
        for name, loss_fn in {"one": first, "other": second}.items():
            updater.compute_gradients(batch, loss_fn=loss_fn, optimizer=name)
            updater.apply_gradients(name)

    nets = {"one": MLP.model(), "other": MLP.model()}
    updater = ls.ParallelUpdater(
        ls.BatchIterator(MLP.data(), 16),
        {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()},
        nets,
        devices=["cpu"] * num_devices,
        num_shards=4,
        step_fn=step,
    )
    with finalized(updater), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            updater.update()
    (message,) = [str(each.message) for each in caught if each.category is ls.DeterminismWarning]
    assert "part of the model: `kept['mean']`." in message


class Outputs(Centred):
    """Centers outputs of which a criterion gets the whole batch."""

    def __call__(self, model: nn.Module, x: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        output = model(x) - self.center
        self.update_center(output)
        return output


@pytest.mark.parametrize("several", [False, True])
def test_what_a_loss_of_the_whole_batch_runs_per_shard_is_looked_at(several: bool) -> None:
    outputs = Outputs()
    loss = ls.BatchLoss(outputs, lambda found: found.square().mean())
    model = MLP.model()
    if several:
        loss = ls.BatchLoss(lambda nets, *batch: outputs(nets["net"], *batch), loss.criterion)
    updater = ls.ParallelUpdater(
        ls.BatchIterator(MLP.data(), 16),
        {"net": torch.optim.SGD(model.parameters(), lr=0.1)}
        if several
        else torch.optim.SGD(model.parameters(), lr=0.1),
        {"net": model} if several else model,
        devices=["cpu"] * 2,
        num_shards=4,
        loss_fn=loss,
    )
    with (
        finalized(updater),
        pytest.warns(ls.DeterminismWarning, match="returned other outputs when it was called again"),
    ):
        updater.update()


def test_many_tensors_are_counted_and_counters_are_none() -> None:
    teacher = nn.Sequential(normed(), nn.BatchNorm1d(3))

    def loss_fn(model: nn.Module, x: torch.Tensor, _target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(model(x), teacher(x).detach() * teacher[1].running_mean)

    named = (
        r": `teacher.0.1.running_mean`, `teacher.0.1.running_var`, `teacher.1.running_mean` and 1 more\. Such a value"
    )
    with (
        finalized(updater_for(MLP, loss_fn=loss_fn, **RUN)) as updater,
        pytest.warns(ls.DeterminismWarning, match=named),
    ):
        updater.update()


def test_an_error_in_its_place_leaves_everything_as_it_was_and_it_comes_once() -> None:
    with finalized(updater_for(MLP, loss_fn=Centred(), **RUN)) as updater:
        before = ls.digest(updater.state_dict())
        with pytest.raises(ls.DeterminismWarning):
            updater.update()
        assert ls.digest(updater.state_dict()) == before
        assert updater.update().applied


class ChangesLate(Centred):
    """Changes in one update only."""

    def __init__(self, when: int) -> None:
        super().__init__()
        self.updates_left = when

    @torch.no_grad()
    def update_center(self, output: torch.Tensor) -> None:
        if self.updates_left == 0:
            self.center.add_(output.mean(0))


@pytest.mark.parametrize(("update", "count"), [(2, 1), (3, 0)])
def test_three_updates_are_checked_and_three_after_loading(update: int, count: int) -> None:
    loss = ChangesLate(update)
    with finalized(updater_for(MLP, loss_fn=loss, **RUN)) as updater:

        def warned(num_updates: int) -> int:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(num_updates):
                    updater.update()
                    loss.updates_left -= 1
            return len(caught)

        assert warned(5) == count
        updater.load_state_dict(updater.state_dict())
        loss.updates_left = 1
        assert warned(3) == 1 - count


# What no warning is given for. Warnings are errors ----------------------------------------------------


class Reporting:
    """Keeps much that no result depends on."""

    def __init__(self) -> None:
        self.last_loss = torch.zeros(())
        self.total = torch.zeros(1)
        self.average, self.calls = 1.0, 0
        self.history: list[Any] = [0.0]
        self.outputs = torch.zeros(4, 3)
        self.counts = torch.zeros(3, dtype=torch.int64)

    def __call__(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        output = model(x)
        loss = functional.cross_entropy(output, target)
        self.calls += 1
        self.last_loss = loss.detach()
        self.total += loss.detach()
        self.average = 0.9 * self.average + 0.1 * loss.item()
        self.history.append(loss.detach())
        self.outputs = output.detach()
        self.counts += functional.one_hot(target, 3).sum(0)
        return loss


class Cached:
    """Creates constants on first use, and a larger mask where a batch needs one."""

    def __init__(self) -> None:
        self.weight: torch.Tensor | None = None
        self.mask = torch.ones(0)
        self.by_length: dict[int, torch.Tensor] = {}
        self.steps = torch.arange(3)

    def mask_for(self, length: int) -> torch.Tensor:
        if self.mask.size(0) != length:
            self.mask = torch.ones(length)
        return self.mask

    def __call__(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.weight is None:
            self.weight = torch.linspace(1, 2, 3)
        self.weight = self.weight.to(x)
        self.steps = self.steps.to(x)  # another dtype, once
        scale = self.by_length.setdefault(len(x), torch.ones(len(x), 1))
        mask = self.mask_for(len(x))
        return (
            functional.cross_entropy(model(x * scale), target, self.weight + self.steps, reduction="none")
            .mul(mask)
            .mean()
        )


class WithMetrics:
    """Updates metrics of several kinds in the loss function."""

    def __init__(self) -> None:
        self.theirs = torchmetrics.MeanMetric()
        self.both = torchmetrics.MetricCollection([torchmetrics.Accuracy("multiclass", num_classes=3)])
        self.ours = ls.metrics.Accuracy()

    def __call__(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> ls.Loss:
        output = model(x)
        loss = functional.cross_entropy(output, target)
        self.theirs.update(loss.detach())
        self.both.update(output, target)
        self.ours.update(output.detach(), target)
        ls.report({"loss_again": loss.detach()})
        return ls.Loss(loss, metrics={"accuracy": ((output.argmax(1) == target).sum(), len(x))})


def feature_losses() -> Any:
    network = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout()).eval()

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, network(x), target)

    return loss_fn


class Scratch(nn.Module):
    """A criterion whose module is in train mode and has nothing that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(3))
        self.dropout = nn.Dropout()

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.dropout(output), target, self.weight)


class Recorded(nn.Module):
    """A model with batch normalization that keeps a mean in an attribute, and to which the loss function refers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.mean = nn.Linear(6, 3), nn.BatchNorm1d(3), torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.norm(self.layer(x))
        self.mean = output.detach().mean(0)
        return output


def with_its_model() -> dict[str, Any]:
    model = Recorded()

    def loss_fn(replica: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(replica, x, target) if model.training else torch.zeros(())

    return {"model": model, "loss_fn": loss_fn}


HARMLESS: dict[str, Callable[[], dict[str, Any]]] = {
    "records": lambda: {"loss_fn": Reporting()},
    "caches": lambda: {"loss_fn": Cached()},
    "metrics": lambda: {"loss_fn": WithMetrics()},
    "frozen network": lambda: {"loss_fn": feature_losses()},
    "criterion": lambda: {"loss_fn": ls.supervised(Scratch())},
    "the model": with_its_model,
}


@pytest.mark.each_value
@pytest.mark.parametrize("placement", [Placement(1), TWO])
@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_result_is_not_warned_of(name: str, placement: Placement) -> None:
    with finalized(updater_for(MLP, placement, **RUN, **HARMLESS[name]())) as updater:
        for _ in range(5):
            assert updater.update().applied


# What the warning advises -----------------------------------------------------------------------------


class WithCenter(nn.Module):
    """A model with the average as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MLP.model()
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def of_the_model(model: WithCenter, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    output = model(x)
    loss = functional.cross_entropy(output - model.center, target)
    model.center = model.center * 0.5 + output.detach().mean(0) * 0.5
    return loss


def of_the_batch() -> ls.BatchLoss:
    center = torch.zeros(3)

    def criterion(given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        nonlocal center
        output, target = given
        loss = functional.cross_entropy(output - center, target)
        center = center * 0.5 + output.detach().mean(0) * 0.5
        return loss

    return ls.BatchLoss(lambda model, x, target: (model(x), target), criterion)


def between_updates() -> dict[str, Any]:
    """Move a teacher once per update, in a step function."""
    teacher = copy.deepcopy(MLP.model()).requires_grad_(requires_grad=False)

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, x, target) + functional.mse_loss(model(x), teacher(x))

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.compute_gradients(batch)
        updater.apply_gradients()
        with torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), updater.get_all_models()["main"].parameters(), strict=True):
                mine.lerp_(theirs, 0.5)

    return {"loss_fn": loss_fn, "step_fn": step}


CURES: dict[str, Callable[[], dict[str, Any]]] = {
    "buffer": lambda: {"model": WithCenter(), "loss_fn": of_the_model, "buffers": {"center": "mean"}},
    "BatchLoss": lambda: {"loss_fn": of_the_batch()},
    "between updates": between_updates,
    "eval": lambda: {"loss_fn": taught(normed().eval())},
}


@pytest.mark.parametrize("name", CURES)
def test_the_cures_give_equal_bits_on_any_placement(name: str) -> None:
    torch.manual_seed(0)
    found = []
    for placement in (Placement(1), TWO, Placement(4, (4, 1, 1, 2))):
        torch.manual_seed(0)
        found.append(train(MLP, placement, **RUN, **CURES[name]()))
    assert len(set(found)) == 1


def test_a_criterion_may_be_one_of_several_models() -> None:
    class Criterion(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(3))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            loss = functional.cross_entropy(output - self.center, target)
            self.center = self.center * 0.5 + output.detach().mean(0) * 0.5
            return loss

    def loss_fn(nets: dict[str, nn.Module], x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nets["criterion"](nets["net"](x), target)

    found = set()
    for num_devices in (1, 2, 3):
        models = {"net": MLP.model(), "criterion": Criterion()}
        optimizers = {"net": torch.optim.SGD(models["net"].parameters(), lr=0.1)}
        batches = ls.BatchIterator(MLP.data(), 9)
        updater = ls.ParallelUpdater(
            batches,
            optimizers,
            models,
            devices=["cpu"] * num_devices,
            num_shards=4,
            loss_fn=loss_fn,
            buffers={"criterion.center": "mean"},
        )
        with finalized(updater):
            for _ in range(6):
                updater.update()
        assert models["criterion"].center.abs().sum() > 0
        found.add(ls.digest(updater.state_dict()))
    assert len(found) == 1
