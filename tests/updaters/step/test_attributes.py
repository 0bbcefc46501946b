"""What a forward leaves in plain attributes is warned of where the program reads it from the original model."""

from __future__ import annotations

import copy
import operator
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.updaters.step import engine
from tests.support.ranks import run_on_ranks


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that other tests have compiled something, after which no model is copied."""
    monkeypatch.setattr(engine, "has_compiled", lambda: False)


BATCHES = [(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 3)] * 4


class Balanced(nn.Module):
    """Counts in a plain attribute how often each unit is used, as the load of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.used = nn.Linear(6, 8), nn.Linear(8, 3), torch.zeros(8)
        self.register_buffer("bias", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x)
        self.used += (hidden + self.bias > 0).sum(0)
        return self.head(hidden)


def balance(model: Any) -> None:
    """Move the bias by the counts since the last call."""
    with torch.no_grad():
        model.bias += (model.used.mean() - model.used).sign()
    model.used.zero_()


class Auxiliary(nn.Module):
    """Leaves an additional loss, a list and the shape of its input in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.auxiliary, self.sums = nn.Linear(6, 3), torch.zeros(()), list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.auxiliary, self.input_shape = self.layer(x).pow(2).mean(), x.shape
        self.sums.append(float(x.sum()))
        return self.layer(x).reshape(self.input_shape[0], -1)


def with_auxiliary(model: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss with a term that forward has left in an attribute of the replica."""
    return functional.cross_entropy(model(x), target) + 0.1 * model.auxiliary


class Measured(nn.Module):
    """Has a metric as a submodule."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.layer, self.accuracy = nn.Linear(6, 3), metric

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layer(x)
        self.accuracy.update(output.detach().mean())
        return output


def warned(model: nn.Module, after: Callable[[], object], loss_fn: Any = None, **options: Any) -> list[str]:
    """Run two updates and a function after each, and return what was warned of."""
    updater = ls.ParallelUpdater(
        BATCHES,
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        **{
            "devices": ["cpu"],
            "num_shards": 2,
            "loss_fn": loss_fn or ls.supervised(functional.cross_entropy),
            **options,
        },
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            updater.update()
            after()
    updater.finalize()
    return [str(each.message) for each in caught if each.category is ls.DeterminismWarning]


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_count_that_a_function_reads_between_updates_is_named(num_devices: int) -> None:
    model = Balanced()
    (text,) = warned(model, lambda: balance(model), devices=["cpu"] * num_devices)
    assert text.startswith("Forward changes attributes of the model that your program reads elsewhere: used.")
    assert "as a buffer with a rule" in text


def test_a_list_that_a_closure_reads_is_named_and_what_only_the_loss_reads_is_not() -> None:
    model, lengths = Auxiliary(), list[int]()
    (text,) = warned(model, lambda: lengths.append(len(model.sums)), with_auxiliary)
    assert "reads elsewhere: sums." in text
    assert lengths == [0, 0]


@pytest.mark.parametrize(
    "read",
    [
        lambda model: getattr(model, "".join(["su", "ms"])),
        lambda model: [each.sums for each in model.modules() if hasattr(each, "sums")],
        operator.attrgetter("sums"),
        lambda model: copy.copy(model).sums or model.sums,
    ],
    ids=["getattr", "a loop", "attrgetter", "a copy"],
)
def test_a_read_in_any_spelling_is_named(read: Callable[[Any], object]) -> None:
    model = Auxiliary()
    (text,) = warned(model, lambda: read(model), with_auxiliary)
    assert "reads elsewhere: sums." in text


def test_what_a_forward_of_the_original_has_left_may_be_read() -> None:
    model, inputs, found = Auxiliary(), BATCHES[0][0], list[object]()

    def evaluate() -> None:
        with torch.no_grad():
            model(inputs)
        found.extend([model.sums[-1], model.auxiliary.item(), model.input_shape])

    assert warned(model, evaluate, with_auxiliary) == []
    assert found[2] == inputs.shape


def test_a_watched_attribute_behaves_as_before() -> None:
    model, other = Auxiliary(), Auxiliary()
    assert warned(model, lambda: None, with_auxiliary) == []
    assert (other.sums, len(Auxiliary().sums)) == ([], 0)
    del other.sums
    assert not hasattr(other, "sums")
    with pytest.raises(AttributeError, match="'Auxiliary' object has no attribute 'sums'"):
        _ = other.sums
    with pytest.raises(AttributeError):
        del other.sums
    assert pickle.loads(pickle.dumps(Auxiliary())).sums == []  # noqa: S301 - written just now
    assert type(copy.deepcopy(model)) is Auxiliary


def test_a_metric_in_the_model_is_named() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="the metric is one of torchmetrics")
    (text,) = warned(Measured(torchmetrics.MeanMetric()), lambda: None)
    assert "reads elsewhere: accuracy." in text


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_metric_that_the_loss_updates_is_named_where_its_value_is_computed(num_devices: int) -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="the metric is one of torchmetrics")
    metric, values = torchmetrics.MeanMetric(), list[float]()

    def loss_fn(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(net(x), y)
        metric.update(loss.detach())
        return loss

    devices = ["cpu"] * num_devices
    (text,) = warned(nn.Linear(6, 3), lambda: values.append(metric.compute()), loss_fn, devices=devices)
    assert text.startswith("`loss_fn` updates a MeanMetric of torchmetrics whose value your program computes.")


def test_attributes_of_submodules_have_their_path() -> None:
    model = nn.Sequential(Balanced())
    (text,) = warned(model, lambda: balance(model[0]))
    assert "reads elsewhere: 0.used." in text


def test_a_buffer_with_a_rule_is_right() -> None:
    model = Balanced()
    used = model.used
    del model.used
    model.register_buffer("used", used)
    counts = torch.zeros(8)
    assert warned(model, lambda: counts.copy_(model.used), buffers={"used": "sum"}) == []
    assert counts.sum() > 0


def test_no_update_without_audits_looks_for_them() -> None:
    model = Balanced()
    assert warned(model, lambda: balance(model), audit_every=0) == []


def _on_rank(communicator: ls.Communicator) -> list[str]:
    model = Balanced()
    return warned(model, lambda: balance(model), communicator=communicator)


def test_every_rank_names_them() -> None:
    for found in run_on_ranks(_on_rank, 2):
        assert ["used" in text for text in found] == [True]


class Cached(nn.Module):
    """Keeps a function of its weights, which is to be dropped after each update."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scaled = nn.Linear(6, 3), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scaled is None:
            self.scaled = (self.layer.weight / self.layer.weight.norm()).detach()
        return self.layer(x) + x @ self.scaled.T


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_cache_that_is_reset_on_the_original_is_found_by_the_second_update(num_devices: int) -> None:
    model = Cached()
    (text,) = warned(model, lambda: setattr(model, "scaled", None), devices=["cpu"] * num_devices)
    assert text.startswith("In update 1 ")
    assert "these attributes in earlier updates: scaled." in text


class Counting(nn.Module):
    """Counts its calls without any effect."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_calls = nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.layer(x)


class Counter:
    """Counts calls in an attribute of the same name, which is no attribute of a model."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls = self.num_calls + 1


def test_attributes_of_other_classes_are_others() -> None:
    assert warned(Counting(), Counter()) == []
