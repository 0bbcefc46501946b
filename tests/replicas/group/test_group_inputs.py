"""A group's names, shapes, parameters, sharing and metrics: done right, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls

TWO = ["cpu", "cpu"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


class Pair(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return x if y is None else x + y


def bound(**options: Any) -> ls.ReplicaGroup:
    group = ls.ReplicaGroup(Pair(), TWO, **options)
    group.bind(data=[("x", (6, 5))], labels=[("y", (6, 5))])
    return group


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no data": (lambda: ls.ReplicaGroup(Pair(), TWO).bind(data=[]), ValueError, "must describe at least one"),
    "no pair": (
        lambda: ls.ReplicaGroup(Pair(), TWO).bind(data=["x"]),  # type: ignore[list-item]
        TypeError,
        "must hold pairs of a name and a shape, got 'x'",
    ),
    "no whole number": (
        lambda: ls.ReplicaGroup(Pair(), TWO).bind(data=[("x", (6, 5.0))]),  # type: ignore[list-item]
        TypeError,
        "must hold pairs of a name and a shape",
    ),
    "negative": (
        lambda: ls.ReplicaGroup(Pair(), TWO).bind(data=[("x", (6, -1))]),
        ValueError,
        "`data` must hold lengths of at least 0, got (6, -1) for 'x'",
    ),
    "twice": (
        lambda: ls.ReplicaGroup(Pair(), TWO).bind(data=[("x", (6, 5)), ("x", (6, 5))]),
        ValueError,
        "must name each input once, got 'x' twice",
    ),
    "lengths": (
        lambda: ls.ReplicaGroup(Pair(), TWO).bind(data=[("x", (6, 5))], labels=[("y", (5,))]),
        ValueError,
        "`y` must hold as many samples as `x` (6) along dimension 0, got 5",
    ),
    "no samples": (
        lambda: ls.ReplicaGroup(Pair(), TWO).bind(data=[("x", (0, 5))]),
        ValueError,
        "must hold at least one sample",
    ),
    "no dimension": (
        lambda: ls.ReplicaGroup(Pair(), TWO, batch_dim=2).bind(data=[("x", (6, 5))]),
        ValueError,
        "`x` must have a dimension 2 to count samples by, got shape (6, 5)",
    ),
    "unknown dimension": (
        lambda: ls.ReplicaGroup(Pair(), TWO, batch_dim={"z": 1}).bind(data=[("x", (6, 5))]),
        ValueError,
        "`batch_dim` must name some of x, got 'z'",
    ),
    "all whole": (
        lambda: ls.ReplicaGroup(Pair(), TWO, batch_dim=None).forward(torch.ones(2)),
        ValueError,
        "`batch` must hold an input that is split over devices, got only inputs that are given whole. Specify",
    ),
    "each whole": (
        lambda: ls.ReplicaGroup(Pair(), TWO, batch_dim={"x": None, "y": None}).forward([torch.ones(2)] * 2),
        ValueError,
        "must hold an input that is split over devices, got only inputs that are given whole",
    ),
    "wrong name beside a right dimension": (
        lambda: ls.ReplicaGroup(Pair(), TWO, batch_dim={"x": 1}).bind(data=[("z", (6, 5))]),
        ValueError,
        "`batch_dim` must name some of z, got 'x'",
    ),
    "wrong name at reshape beside a right dimension": (
        lambda: bound(batch_dim={"y": 0}).reshape(data=[("x", (6, 5))], labels=[("z", (6, 5))]),
        ValueError,
        "`labels` must name the inputs that are bound, ['y'], got ['z']",
    ),
    "bound twice": (lambda: bound().bind(data=[("x", (6, 5))]), ls.OrderError, "Inputs are bound once"),
    "not bound": (
        lambda: ls.ReplicaGroup(Pair(), TWO).reshape(data=[("x", (6, 5))]),
        ls.OrderError,
        "reshape must follow bind",
    ),
    "another shape": (
        lambda: bound().forward(torch.ones(7, 5)),
        ValueError,
        "`x` must have the shape it was bound with, (6, 5), got (7, 5). Call `reshape`",
    ),
    "unknown input": (
        lambda: bound().forward({"x": torch.ones(6, 5), "z": torch.ones(6, 5)}),
        ValueError,
        "`z` must be one of the inputs that are bound (x, y)",
    ),
    "missing input": (
        lambda: bound().forward({"y": torch.ones(6, 5)}),
        ValueError,
        "must hold the inputs that are bound, got none for x",
    ),
    "too many inputs": (
        lambda: bound().forward([torch.ones(6, 5)] * 3),
        ValueError,
        "`batch` must hold the inputs that are bound (2), got 3",
    ),
    "other names": (
        lambda: bound().reshape(data=[("z", (6, 5))], labels=[("y", (6, 5))]),
        ValueError,
        "`data` must name the inputs that are bound, ['x'], got ['z']",
    ),
    "other rank": (
        lambda: bound().reshape(data=[("x", (6, 5, 1))], labels=[("y", (6, 5))]),
        ValueError,
        "`x` must keep its number of dimensions (2), got shape (6, 5, 1)",
    ),
    "mode": (
        lambda: ls.ReplicaGroup(net(), TWO, grad_mode="foo"),  # type: ignore[arg-type]
        ValueError,
        "`grad_mode` must be 'write', 'add' or 'null', got 'foo'",
    ),
    "mode by name": (
        lambda: ls.ReplicaGroup(net(), TWO, grad_mode={"0.bias": 1}),  # type: ignore[dict-item]
        ValueError,
        "`grad_mode['0.bias']` must be 'write', 'add' or 'null', got 1",
    ),
    "mode of nobody": (
        lambda: ls.ReplicaGroup(net(), TWO, grad_mode={"bias": "add"}),
        ValueError,
        "`grad_mode` must name parameters of `model` (0.weight, 0.bias, 1.weight",
    ),
    "fixed nobody": (
        lambda: ls.ReplicaGroup(net(), TWO, fixed=["x"]),
        ValueError,
        "`fixed` must name parame",
    ),
    "fixed string": (
        lambda: ls.ReplicaGroup(net(), TWO, fixed="0.bias"),
        TypeError,
        "got '0.bias'",
    ),
    "shards": (
        lambda: ls.ReplicaGroup(net(), TWO, num_shards=True),
        TypeError,
        "`num_shards` must be an integer, got True",
    ),
    "no shards": (
        lambda: ls.ReplicaGroup(net(), TWO, num_shards=0),
        ValueError,
        "`num_shards` must be at least 1",
    ),
    "workloads": (
        lambda: ls.ReplicaGroup(net(), TWO, workloads=[1, float("nan")]),
        ValueError,
        "`workloads[1]` must be positive and finite, got nan",
    ),
    "loads": (
        lambda: ls.ReplicaGroup(net(), TWO, workloads=[1]),
        ValueError,
        "one number per device (2), got 1",
    ),
    "timeout": (lambda: ls.ReplicaGroup(net(), TWO, timeout=0), ValueError, "`timeout` must be above 0"),
    "dimension": (
        lambda: ls.ReplicaGroup(net(), TWO, batch_dim=""),  # type: ignore[arg-type]
        TypeError,
        "`batch_dim` must be an integer, None, or a dict of these by name, got ''",
    ),
    "output dimension": (
        lambda: ls.ReplicaGroup(net(), TWO, output_dim={"output": 0.0}),  # type: ignore[dict-item]
        TypeError,
        "`output_dim` must be an integer, None, or a dict of these by name, got {'output': 0.0}",
    ),
    "gradients of inputs": (
        lambda: ls.ReplicaGroup(net(), TWO, input_grads=True, training=False),
        ValueError,
        "`input_grads` must be False in a group with training=False",
    ),
    "no module": (lambda: ls.ReplicaGroup(len, TWO), TypeError, "must be a torch.nn.Module"),  # type: ignore[arg-type]
    "backward first": (
        lambda: ls.ReplicaGroup(net(), TWO).backward(),
        ls.OrderError,
        "A forward must come first",
    ),
    "batch size first": (
        lambda: ls.ReplicaGroup(net(), TWO).batch_size,
        ls.OrderError,
        "A forward must come",
    ),
    "input gradients first": (
        lambda: ls.ReplicaGroup(net(), TWO, input_grads=True).input_grads(),
        ls.OrderError,
        "Gradients of inputs must follow a backward",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_what_is_wrong(case: str) -> None:
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=re.escape(message)):
        call()


class Returning(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


OUTPUTS: dict[str, tuple[Callable[[torch.Tensor], Any], type[Exception], str]] = {
    "nothing": (lambda _: None, TypeError, "`model` must return at least one tensor, got a NoneType"),
    "an object": (lambda _: {1, 2}, TypeError, "tuples, lists, dicts and dataclasses, got a set"),
    "other values": (
        lambda x: (x, len(x)),
        ValueError,
        "the same containers and plain values for every shard",
    ),
    "other containers": (
        lambda x: (x,) if len(x) > 2 else [x],
        ValueError,
        "got something else for shard 1 than for shard 0",
    ),
    "no samples": (
        lambda x: x.sum(0),
        ValueError,
        "`output` must hold the samples of its shard (3) along dimension 0",
    ),
    "several counts": (
        lambda x: {"x": x, "n": torch.tensor(len(x))},
        ValueError,
        "must be the same for every shard, got different values",
    ),
}


@pytest.mark.parametrize("case", OUTPUTS)
def test_outputs_that_cannot_be_put_together_are_refused(case: str) -> None:
    function, error, message = OUTPUTS[case]
    with ls.ReplicaGroup(Returning(function), TWO) as group, pytest.raises(error, match=re.escape(message)):
        group.forward(torch.ones(5, 2))


def test_plain_values_and_whole_outputs_are_handed_out() -> None:
    def function(x: torch.Tensor) -> Any:
        return {"x": [x], "name": "five", "mean": x.mean(), "table": torch.arange(3), "none": None}

    with ls.ReplicaGroup(Returning(function), TWO, output_dim={"table": None}) as group:
        x = torch.arange(10.0).reshape(5, 2)
        out = group.forward(x)
        assert torch.equal(out["x"][0], x)
        assert (out["name"], out["none"]) == ("five", None)
        torch.testing.assert_close(out["mean"], x.mean())
        assert out["table"].tolist() == [0, 1, 2]
        assert group.output_shapes() == [("x[0]", (5, 2)), ("mean", ()), ("table", (3,))]


GRADS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (None, ValueError, "must be given unless the model returns one loss"),
    "shape": (torch.ones(4, 2), ValueError, "must have the shape (5, 2) for 'output', got (4, 2)"),
    "longer": (torch.ones(6, 2), ValueError, "must have the shape (5, 2) for 'output', got (6, 2)"),
    "more": (
        [torch.ones(5, 2)] * 2,
        ValueError,
        "`output_grads` must hold 1 gradients, as the output does, got 2",
    ),
    "number": (1.0, TypeError, "must hold a tensor for 'output', got a float"),
}


@pytest.mark.parametrize("case", GRADS)
def test_gradients_that_do_not_fit_are_refused(case: str) -> None:
    given, error, message = GRADS[case]
    with ls.ReplicaGroup(nn.Linear(2, 2), TWO) as group:
        group.forward(torch.ones(5, 2))
        with pytest.raises(error, match=re.escape(message)):
            group.backward(given)
        group.backward([torch.ones(5, 2)])


def test_gradients_may_be_left_out() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"a": self.parts["a"](x), "rest": (self.parts["b"](x), x.mean())}

    with ls.ReplicaGroup(Two(), TWO) as group:
        group.forward(torch.ones(5, 2))
        with pytest.raises(ValueError, match=re.escape("must have the keys of the output, ['a', 'rest'], got ['c']")):
            group.backward({"c": None})
        group.backward({"rest": (torch.ones(5, 2), None)})
    assert model["a"].weight.grad is None
    assert model["b"].bias.grad.tolist() == [5.0, 5.0]


def test_bound_inputs_and_reshape() -> None:
    with bound(input_grads=True, grad_mode="add") as group:
        assert (group.batch_size, group.slices) == (6, [slice(0, 3), slice(3, 6)])
        x = torch.ones(6, 5)
        group.forward((x, x))
        group.backward(x)
        assert [grad is None for grad in group.input_grads()] == [False, True]
        assert not group.reshape(data=[("x", [6, 5])], labels=[("y", torch.Size([6, 5]))])
        group.outputs()
        with pytest.raises(ValueError, match="as many samples"):
            group.reshape(data=[("x", (4, 5))], labels=[("y", (5, 5))])
        assert group.batch_size == 6
        group.outputs()
        assert group.reshape(data=[("x", (5, 5))], labels=[("y", (5, 5))])
        assert (group.batch_size, group.slices) == (5, [slice(0, 3), slice(3, 5)])
        with pytest.raises(ls.OrderError, match="A forward must come first"):
            group.outputs()
        group.forward(torch.ones(5, 5))  # labels may be left out
        group.backward(torch.ones(5, 5))
        assert group.input_grads()[0].shape == (5, 5)


def test_reshape_moves_the_dimension_of_samples_and_leaves_labels_out() -> None:
    with bound() as group:
        with pytest.raises(TypeError, match="`batch_dim` must be an integer"):
            group.reshape(data=[("x", (5, 6))], batch_dim="x")  # type: ignore[arg-type]  # that is what is tested
        with pytest.raises(ValueError, match="as many samples"):
            group.reshape(data=[("x", (5, 4))], labels=[("y", (5, 5))], batch_dim=1)
        assert group.batch_size == 6
        assert group.reshape(data=[("x", (5, 4))], batch_dim={"x": 1})
        assert (group.batch_size, group.slices) == (4, [slice(0, 2), slice(2, 4)])
        assert group.reshape(data=[("x", (5, 6))], labels=[("y", (6, 5))], batch_dim={"x": 1, "y": 0})
        assert group.batch_size == 6
        assert group.reshape(data=[("x", (5, 6))], batch_dim=1)
        assert group.reshape(data=[("x", (5, 6))], batch_dim=0)
        assert (group.batch_size, group.reshape(data=[("x", (5, 6))])) == (5, False)


def test_reshape_keeps_parameters_and_gradients() -> None:
    model = nn.Linear(5, 4)
    with ls.ReplicaGroup(model, TWO, grad_mode="add") as group:
        group.bind(data=[("input", (6, 5))])
        group.forward(torch.ones(6, 5))
        group.backward(torch.ones(6, 4))
        before = ls.digest(model)
        group.reshape(data=[("input", (3, 5))])
        assert ls.digest(model) == before
        group.forward(torch.ones(3, 5))
        group.backward(torch.ones(3, 4))
    assert model.bias.grad.tolist() == [9.0] * 4


def test_parameters_are_read_as_copies_and_written_by_name() -> None:
    model, other = net(), net()
    with torch.no_grad():
        other[0].weight.add_(1)
    with ls.ReplicaGroup(model, TWO) as group, ls.ReplicaGroup(other, TWO) as source:
        source.forward(torch.randn(6, 5))
        parameters, buffers = source.get_parameters()
        assert [*parameters, *buffers] != []
        group.set_parameters(parameters, buffers)
        assert ls.digest(model) == ls.digest(other)
        parameters["0.weight"].zero_()
        assert ls.digest(model) == ls.digest(other)


SETS: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], object], str]] = {
    "missing and extra": (
        lambda p, b: (p.pop("0.bias"), p.update(zz=p["0.weight"]), b.pop("1.running_var")),
        "got 0.bias, 1.running_var missing and zz unknown",
    ),
    "extra buffer": (lambda _, b: b.update(m=torch.ones(1)), "got m unknown"),
    "shape": (lambda p, _: p.update({"2.bias": torch.ones(4)}), "`2.bias` must have shape (3,), got (4,)"),
    "no tensor": (lambda p, _: p.update({"2.bias": [0.0] * 3}), "`2.bias` must be a tensor, got a list"),
    "a parameter for a buffer": (lambda p, b: b.update({"2.bias": p["2.bias"]}), "got 2.bias unknown"),
}


@pytest.mark.parametrize("case", SETS)
def test_what_does_not_fit_changes_nothing(case: str) -> None:
    spoil, message = SETS[case]
    model = net()
    before = ls.digest(model)
    with ls.ReplicaGroup(model, TWO) as group:
        parameters, buffers = group.get_parameters()
        parameters = {name: value + 1 for name, value in parameters.items()}
        spoil(parameters, buffers)
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            group.set_parameters(parameters, buffers)
        assert ls.digest(model) == before


def test_missing_and_extra_names_may_be_allowed() -> None:
    model = net()
    with ls.ReplicaGroup(model, TWO) as group:
        extra = {"2.bias": torch.ones(3), "zz": torch.ones(1)}
        group.set_parameters(extra, allow_missing=True, allow_extra=True)
        with pytest.raises(ValueError, match="zz unknown"):
            group.set_parameters(extra, allow_missing=True)
    assert model[2].bias.tolist() == [1.0] * 3


def test_tied_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with ls.ReplicaGroup(model, TWO, fixed=["1.weight"]) as group:
        parameters, _ = group.get_parameters()
        assert list(parameters) == ["0.weight", "0.bias", "1.bias"]
        parameters["1.weight"] = parameters.pop("0.weight") * 0
        group.set_parameters(parameters)
        group.forward(torch.ones(4, 3))
        group.backward(torch.ones(4, 3))
    assert not model[0].weight.any()
    assert model[0].weight.grad is None
    assert model[1].bias.grad.tolist() == [4.0] * 3


def test_a_shared_group_has_the_same_parameters_and_gradients_and_its_own_outputs() -> None:
    model, other = net(), net()
    with (
        ls.ReplicaGroup(model, TWO) as first,
        ls.ReplicaGroup(other, ["cpu"] * 3, shared_group=first) as second,
    ):
        assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
        assert all(a is b for a, b in zip(model.buffers(), other.buffers(), strict=True))
        x = torch.randn(6, 5)
        out = first.forward(x)
        kept = ls.digest(out, first.outputs())
        first.backward(torch.ones(6, 3))
        second.forward(torch.randn(7, 5))
        assert ls.digest(out, first.outputs()) == kept
        second.backward(torch.ones(7, 3))
        assert model[2].bias.grad.tolist() == [7.0] * 3
        assert first.gradients()["2.bias"] is second.gradients()["2.bias"]
        first.set_parameters({name: value * 0 for name, value in first.get_parameters()[0].items()})
        assert not second.forward(x).any()


def test_sharing_keeps_ties_and_refuses_what_differs() -> None:
    model, other = net(), net()
    other[2] = nn.Linear(4, 3)
    other.append(nn.Linear(4, 3))
    other[3].weight = other[2].weight
    group = ls.ReplicaGroup(model, TWO)
    ls.ReplicaGroup(other, TWO, shared_group=group)
    assert other[3].weight is other[2].weight is model[2].weight
    wider = nn.Sequential(nn.Linear(9, 4))
    with pytest.raises(ValueError, match=re.escape("'0.weight' as a parameter of shape (4, 9) and torch.float32")):
        ls.ReplicaGroup(wider, TWO, shared_group=group)
    tied = nn.Sequential(nn.Linear(5, 4), nn.Identity(), nn.Linear(4, 3))
    tied[2].bias = tied[0].bias
    with pytest.raises(ValueError, match=r"must have '2\.bias' as"):
        ls.ReplicaGroup(tied, TWO, shared_group=group)


class Counting:
    """Counts right answers, and how often it is asked to."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.right = 0

    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.calls.append(len(target))
        self.right += int((output.argmax(1) == target).sum())

    def compute(self) -> float:
        return self.right / sum(self.calls)


def test_metrics() -> None:
    x = torch.eye(7)
    labels = torch.tensor([0, 1, 2, 0, 0, 5, 0])
    with ls.ReplicaGroup(nn.Identity(), ["cpu"] * 3, workloads=[1, 2, 4]) as group:
        group.forward(x)
        for per_device, pad, calls, right in [
            (False, 0, [7], 4),
            (True, 0, [1, 2, 4], 4),
            (False, 2, [5], 3),
            (True, 2, [1, 2, 2], 3),
            (True, 5, [1, 1], 2),
        ]:
            metric = Counting()
            group.update_metric(metric, labels, per_device=per_device, pad=pad)
            assert (metric.calls, metric.right) == (calls, right)
        accuracy = ls.metrics.Accuracy()
        group.update_metric(accuracy, labels)
        assert accuracy.compute() == pytest.approx(4 / 7)
        for refused, message in [
            (labels[:4], "must be for the 7 samples"),
            (torch.zeros(9), "for the 7 samples"),
        ]:
            metric = Counting()
            with pytest.raises(ValueError, match=message):
                group.update_metric(metric, refused, per_device=True)
            assert metric.calls == []
        with pytest.raises(ValueError, match=r"`pad` must lie in 0\.\.6, got 7"):
            group.update_metric(Counting(), labels, pad=7)


@pytest.mark.parametrize("dim", [1, -2])
def test_outputs_lie_as_the_inputs_do(dim: int) -> None:
    x = torch.arange(24.0).reshape(3, 4, 2)
    with ls.ReplicaGroup(nn.Tanh(), TWO, batch_dim=dim, input_grads=True) as group:
        assert torch.equal(group.forward(x), x.tanh())
        assert [part.shape for part in group.outputs(merge=False)[0]] == [(3, 2, 2)] * 2
        group.backward(x)
        assert torch.allclose(group.input_grads()[0], x * (1 - x.tanh().square()), atol=1e-6)


def test_metrics_get_labels_and_outputs_in_their_own_form() -> None:
    seen: list[Any] = []

    class Seeing:
        def update(self, output: Any, target: Any) -> None:
            seen.append((output, target))

    class Sequence(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"steps": x, "mean": x.mean()}

    x = torch.arange(12.0).reshape(2, 6)
    with ls.ReplicaGroup(Sequence(), TWO, batch_dim=1, output_dim=1) as group:
        group.bind(data=[("x", (2, 6))], labels=[("y", (3, 6)), ("z", (1, 6))])
        group.forward(x)
        group.update_metric(Seeing(), (torch.zeros(3, 6), torch.zeros(1, 6)), per_device=True, pad=1)
        group.update_metric(Seeing(), {"y": torch.zeros(3, 6)})
    assert [output["steps"].shape for output, _ in seen] == [(2, 3), (2, 2), (2, 6)]
    assert [[each.shape for each in target] for _, target in seen[:2]] == [[(3, 3), (1, 3)], [(3, 2), (1, 2)]]
    assert seen[2][1]["y"].shape == (3, 6)


def test_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
    metric = torchmetrics.classification.MulticlassAccuracy(num_classes=3, average="micro")
    x = torch.eye(3)[[0, 1, 2, 0, 1]]
    with ls.ReplicaGroup(nn.Identity(), TWO) as group:
        group.forward(x)
        group.update_metric(metric, torch.tensor([0, 1, 2, 2, 2]))
        assert float(metric.compute()) == pytest.approx(3 / 5)
        metric.reset()
        group.update_metric(metric, torch.tensor([0, 1, 2, 2, 2]), per_device=True)
        assert float(metric.compute()) == pytest.approx(3 / 5)
