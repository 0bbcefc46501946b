"""Evaluation: samples count equally, and everything is afterwards as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.extensions import Evaluator, LogReport
from lockstep.metrics import Accuracy, Average
from lockstep.trainer import Trainer
from lockstep.triggers import MaxValue
from tests.support.plain_updaters import LoopUpdater

cross_entropy = torch.nn.functional.cross_entropy


class ForwardBackward:
    """An iterator that must be reset before each pass."""

    def __init__(self, batches: Sequence[Any], *, repeat: bool = False) -> None:
        self.batches = batches
        self.repeat = repeat
        self.rest: list[Any] = []

    def reset(self) -> None:
        self.rest = list(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self.rest:
            raise StopIteration
        return self.rest.pop(0)


def data(num_samples: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_samples, 4, generator=generator), torch.randint(0, 3, (num_samples,), generator=generator)


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 3)
    )


def batches(size: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, t = data()
    return list(zip(x.split(size), t.split(size), strict=True))


def supervised(model: torch.nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return cross_entropy(model(x), t)


def by_hand(model: torch.nn.Module) -> tuple[float, float]:
    """Return loss and accuracy over all samples at once."""
    x, t = data()
    model.eval()
    with torch.no_grad():
        output = model(x)
    return float(cross_entropy(output, t)), float((output.argmax(1) == t).double().mean())


def test_samples_count_equally_in_a_short_last_batch() -> None:
    model = net()
    found = Evaluator(batches(), {"accuracy": Accuracy()}, loss_fn=supervised, model=model).evaluate()
    loss, accuracy = by_hand(model)
    assert list(found) == ["loss", "accuracy"]
    assert found["accuracy"] == accuracy
    # Float32 means over batches of 4, 4 and 3 against one over 11.
    assert found["loss"] == pytest.approx(loss, rel=1e-6)
    with torch.no_grad():
        mean_of_means = sum(float(supervised(model, *batch)) for batch in batches()) / 3
    assert found["loss"] != pytest.approx(mean_of_means, rel=1e-3)  # what counting batches would give


def test_everything_is_afterwards_as_it_was() -> None:
    model = net()
    model[1].eval()  # a frozen part within a model in training
    modes = [module.training for module in model.modules()]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    threads = torch.get_num_threads()
    seen = []

    def loss_fn(model: torch.nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        inside = [
            any(module.training for module in model.modules()),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
        ]
        seen.append(inside)
        torch.rand(3)
        return supervised(model, x, t)

    try:
        torch.set_num_threads(2)
        generator = torch.get_rng_state()
        Evaluator(DataLoader(TensorDataset(*data()), 4, shuffle=True), loss_fn=loss_fn).evaluate(model)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert seen == [[False, False, 1]] * 3
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert not model._forward_hooks


def test_everything_is_as_it_was_after_an_error_too() -> None:
    def loss_fn(*_: object) -> torch.Tensor:
        raise RuntimeError("boom")

    model, threads, generator = net(), torch.get_num_threads(), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="boom"):
        Evaluator(batches(), loss_fn=loss_fn, model=model).evaluate()
    assert all(module.training for module in model.modules())
    assert (torch.get_num_threads(), torch.is_grad_enabled()) == (threads, True)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not model._forward_hooks


def test_the_number_of_threads_changes_no_bit() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3000, 3)
    x, t = torch.randn(64, 3000), torch.randint(3, (64,))
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(Evaluator([(x, t)], loss_fn=supervised, model=model).evaluate()["loss"])
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


def test_a_loss_may_bring_its_weight_and_metrics() -> None:
    def loss_fn(_model: torch.nn.Module, x: torch.Tensor, _t: torch.Tensor) -> ls.Loss:
        return ls.Loss(torch.tensor([float(len(x))]), torch.tensor(2), {"share": (len(x), 10)})

    found = Evaluator(batches(), loss_fn=loss_fn, model=net()).evaluate()
    assert found == {"loss": (4 + 4 + 3) / 3, "share": 11 / 30}


def test_the_model_runs_once_for_loss_and_metrics() -> None:
    model, runs = net(), []
    model.register_forward_hook(lambda *_: runs.append(1))
    Evaluator(batches(), {"accuracy": Accuracy()}, loss_fn=supervised, model=model).evaluate()
    assert len(runs) == 3


def test_metrics_see_the_output_also_when_the_loss_does_not_run_the_model() -> None:
    model = net()
    found = Evaluator(batches(), {"accuracy": Accuracy()}, loss_fn=lambda *_: torch.tensor(0.0), model=model).evaluate()
    assert found == {"loss": 0.0, "accuracy": by_hand(model)[1]}


class Caching(nn.Linear):
    """Keeps in evaluation mode what only `train` drops."""

    scaled: torch.Tensor | None = None

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.by_size: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return super().forward(x)
        if self.scaled is None:
            self.scaled = self.weight.detach() * 2
        weight = self.by_size.setdefault(len(x), self.scaled + 1)
        return nn.functional.linear(x, weight, self.bias)


def test_what_a_model_keeps_in_an_evaluation_is_gone_in_the_next_one(tmp_path: Path) -> None:
    model, x = Caching(4, 3), torch.ones(6, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    updater = ls.ParallelUpdater([(x, torch.zeros(6, dtype=torch.int64))], optimizer, model, devices=["cpu"] * 2)
    trainer = Trainer(updater, until=(1, "iteration"), out=tmp_path)
    for number in range(3):
        with torch.no_grad():
            model.weight.fill_(number)
        expected = x @ (2.0 * model.weight.T + 1) + model.bias
        torch.testing.assert_close(trainer.predict(list(x), batch_size=6, num_shards=2), expected.detach())


def test_metrics_are_reset_before_each_pass() -> None:
    metric = Accuracy()
    evaluator = Evaluator(batches(), {"accuracy": metric}, model=net())
    assert evaluator.evaluate() == evaluator.evaluate()
    assert metric.state_dict()["count"] == 11


@pytest.mark.parametrize(
    "iterator",
    [
        ForwardBackward(batches()),
        DataLoader(TensorDataset(*data()), 4),  # yields lists
        [list(batch) for batch in batches()],
    ],
)
def test_whatever_yields_batches_can_be_passed_over_again(iterator: Any) -> None:
    model = net()
    evaluator = Evaluator(iterator, {"accuracy": Accuracy()}, model=model)
    expected = {"accuracy": by_hand(model)[1]}
    assert [evaluator.evaluate(), evaluator.evaluate()] == [expected, expected]


def test_dicts_and_lone_tensors() -> None:
    class Named(torch.nn.Module):
        def forward(self, *, x: torch.Tensor) -> torch.Tensor:
            return x @ torch.eye(4, 3)

    def loss_fn(model: torch.nn.Module, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x=x), label)

    named = [{"x": x, "label": t} for x, t in batches()]
    whole = Evaluator(named, {"a": Accuracy()}, loss_fn=loss_fn, model=Named(), target="label").evaluate()
    alone = Evaluator(named, {"a": Accuracy()}, model=Named(), target="label").evaluate()
    assert whole["a"] == alone["a"]
    lone = Evaluator([x for x, _ in batches()], loss_fn=lambda model, x: model(x).mean(), model=net()).evaluate()
    assert list(lone) == ["loss"]


def stack(samples: Sequence[Any], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    assert device == torch.device("cpu")
    return torch.stack([x for x, _ in samples]), torch.tensor([int(t) for _, t in samples])


def test_samples_are_converted() -> None:
    x, t = data()
    samples = [list(zip(part, labels, strict=True)) for part, labels in batches()]
    pairs = [range(start, min(start + 4, 11)) for start in range(0, 11, 4)]
    model = net()
    expected = {"accuracy": by_hand(model)[1]}
    assert Evaluator(samples, {"accuracy": Accuracy()}, model=model, converter=stack).evaluate() == expected

    def look_up(indices: Sequence[Any], device: torch.device) -> Any:
        return stack([(x[index], t[index]) for index in indices], device)

    assert Evaluator(pairs, {"accuracy": Accuracy()}, model=model, converter=look_up).evaluate() == expected
    lone = [list(part) for part, _ in batches()]  # a list of tensors: samples, since there is a converter

    def stack_alone(samples: Sequence[Any], _: torch.device) -> torch.Tensor:
        return torch.stack(list(samples))

    evaluator = Evaluator(lone, loss_fn=lambda _, x: x.sum() / len(x), model=model, converter=stack_alone)
    # Float32 sums over batches of 4, 4 and 3 against one over 11.
    assert evaluator.evaluate()["loss"] == pytest.approx(float(x.sum()) / 11, rel=1e-5)


def build(out: Path, *evaluators: Evaluator) -> Trainer:
    x, t = data(12)
    trainer = Trainer(LoopUpdater(net(), x, t, batch_size=4), (2, "epoch"), out)
    for evaluator in evaluators:
        trainer.extend(evaluator)
    return trainer


def test_values_are_observed_under_the_name_it_was_hung_in_with(tmp_path: Path) -> None:
    trainer = build(tmp_path, *(Evaluator(batches(), {"accuracy": Accuracy()}) for _ in range(2)))
    trainer.extend(Evaluator(batches(), loss_fn=supervised), name="test")
    report = LogReport()
    trainer.extend(report)
    trainer.run()
    names = {"validation/main/accuracy", "validation_1/main/accuracy", "test/main/loss"}
    assert [names <= set(entry) for entry in report.log] == [True, True]
    loss, accuracy = by_hand(trainer.updater.get_all_models()["main"])
    assert report.log[-1]["validation/main/accuracy"] == accuracy
    # Float32 means over batches of 4, 4 and 3 against one over 11.
    assert report.log[-1]["test/main/loss"] == pytest.approx(loss, rel=1e-6)


def test_a_trigger_sees_what_the_evaluator_observed_in_the_same_iteration(tmp_path: Path) -> None:
    fired = []
    trainer = build(tmp_path, Evaluator(batches(), {"accuracy": Accuracy()}))
    best = MaxValue("validation/main/accuracy")
    trainer.extend(lambda trainer: fired.append(trainer.updater.iteration), trigger=best)
    trainer.run()
    assert fired[0] == 3
    assert best.best is not None


def test_evaluating_changes_no_bit_of_the_training(tmp_path: Path) -> None:
    weights = []
    for evaluators in ([], [Evaluator(batches(), {"accuracy": Accuracy()}, loss_fn=supervised)]):
        trainer = build(tmp_path, *evaluators)
        trainer.run()
        weights.append(trainer.updater.get_all_models()["main"].state_dict())
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: Evaluator([]),
            ValueError,
            "`metrics` must hold at least one metric if there is no `loss_fn`",
        ),
        (
            lambda: Evaluator([], {"loss": Average()}, loss_fn=supervised),
            ValueError,
            "`metrics` must not hold 'loss'",
        ),
        (
            lambda: Evaluator([], {"x": Average}),
            TypeError,
            "must hold instances, got the class Average as 'x'",
        ),
        (
            lambda: Evaluator([], [Average()]),
            TypeError,
            "`metrics` must be a dict of metrics by name, got a list",
        ),
        (lambda: Evaluator([], {"x": len}), TypeError, "must have update, compute and reset, got .* as 'x'"),
        (
            lambda: Evaluator(ForwardBackward([], repeat=True), {"x": Average()}),
            ValueError,
            "Create it with repeat=False",
        ),
        (lambda: Evaluator([], {"x": Average()}).evaluate(), ValueError, "`model` must be given here or"),
        (
            lambda: Evaluator([], {"x": Average()}).evaluate(net()),
            ValueError,
            "must yield at least one batch, got none",
        ),
        (
            lambda: Evaluator(batches, {"x": Average()}),
            TypeError,
            r"`iterator` must be an iterable of batches, got a function\. .*, a DataLoader or a list of batches",
        ),
        (
            lambda: Evaluator(["ab"], {"x": Average()}).evaluate(net()),
            TypeError,
            "if there is no `converter`, got a str",
        ),
        (
            lambda: Evaluator([{"x": ("ab", None)}], {"x": Average()}).evaluate(net()),
            TypeError,
            "if there is no `converter`, got a dict without tensors",
        ),
        (
            lambda: Evaluator([()], {"x": Average()}).evaluate(net()),
            ValueError,
            "`batch` must hold at least one tensor",
        ),
        (
            lambda: Evaluator([torch.zeros(2, 4)], {"x": Average()}).evaluate(net()),
            TypeError,
            r"A batch must be \(\*inputs, target\), or a dict with the key `target`, got 1 tensor",
        ),
        (
            lambda: Evaluator([{"x": torch.zeros(2, 4)}], {"x": Average()}).evaluate(net()),
            TypeError,
            r"`target` must name the entry .*, got None for a batch with the keys \['x'\]",
        ),
        (
            lambda: Evaluator(
                [{"input": torch.zeros(2, 4), "labels": torch.zeros(2)}], {"x": Average()}, target="label"
            ).evaluate(net()),
            TypeError,
            r"got 'label' for a batch with the keys \['input', 'labels'\]. Pass Evaluator\(..., target='labels'\)",
        ),
        (
            lambda: Evaluator(batches(), loss_fn=lambda model, x, _: model(x)).evaluate(net()),
            ValueError,
            r"must return a loss of one element, got shape \(4, 3\)",
        ),
        (
            lambda: Evaluator(batches(), loss_fn=lambda model, x, t, carried: (model, x, t, carried)),
            TypeError,
            "`loss_fn` must not require `carried` in an evaluation, which .* Give it a default",
        ),
        (  # the error of the model, not of the call
            lambda: Evaluator(batches(), loss_fn=lambda model, x, t: supervised(model, *x, t)).evaluate(net()),
            ls.ReplicaError,
            r"supervised\(\) takes 3 positional arguments but 6 were given",
        ),
    ],
)
def test_refusals(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_generator_is_used_up_and_says_so() -> None:
    evaluator = Evaluator((batch for batch in batches()), {"accuracy": Accuracy()}, model=net())
    evaluator.evaluate()
    with pytest.raises(ValueError, match="A generator yields only once"):
        evaluator.evaluate()


def test_a_model_that_the_updater_lacks_is_named(tmp_path: Path) -> None:
    trainer = build(tmp_path, Evaluator(batches(), {"accuracy": Accuracy()}, model_name="critic"))
    with pytest.raises(KeyError, match=r"`model_name` must be one of \['main'\], got 'critic'"):
        trainer.run()


def test_the_name_of_a_subclass_takes_precedence() -> None:
    class Tested(Evaluator):
        name = "test"  # type: ignore[assignment, misc]

    class Computed(Evaluator):
        @property
        def name(self) -> str:  # type: ignore[override]
            return "computed"

    batches, metrics = [(torch.ones(2, 3), torch.zeros(2).long())], {"accuracy": ls.metrics.Accuracy()}
    names = [kind(batches, metrics).name for kind in (Evaluator, Tested, Computed)]
    assert [*names, Evaluator(batches, metrics, name="held out").name] == ["validation", "test", "computed", "held out"]
