"""What an evaluation counts and computes with: samples as the updater does, in its precision, on its devices."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep as ls
from lockstep.extensions import Evaluator

cross_entropy = nn.functional.cross_entropy


def tensors(num_samples: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_samples, 4, generator=generator), torch.randint(0, 3, (num_samples,), generator=generator)


def trainer_for(
    tmp_path: Path, model: Any, evaluator: Evaluator, *, iterator: Any = None, **options: Any
) -> ls.Trainer:
    """Return a trainer of one update with an evaluation after it."""
    x, y = tensors()
    batches = [(x[:8], y[:8])] if iterator is None else iterator
    options = {"loss_fn": ls.supervised(cross_entropy), "num_shards": 2, "devices": 1, **options}
    parameters = model.parameters() if isinstance(model, nn.Module) else model["main"].parameters()
    updater = ls.ParallelUpdater(batches, torch.optim.SGD(parameters, lr=0.1), model, **options)
    trainer = ls.Trainer(updater, until=(1, "iteration"), out=tmp_path)
    trainer.extend(evaluator, trigger=(1, "iteration"))
    return trainer


@dataclass
class Graphs:
    """A batch of graphs as one object, whose nodes lie end to end."""

    def __init__(self, nodes: torch.Tensor, graph_of: torch.Tensor, labels: torch.Tensor) -> None:
        self.nodes, self.graph_of, self.labels = nodes, graph_of, labels


def collate_graphs(samples: Sequence[Any], device: torch.device) -> tuple[Graphs]:
    """Join graphs of different sizes."""
    sizes = torch.tensor([len(nodes) for nodes, _ in samples])
    joined = torch.cat([nodes for nodes, _ in samples]).to(device)
    labels = torch.tensor([label for _, label in samples])
    return (Graphs(joined, torch.arange(len(samples)).repeat_interleave(sizes), labels),)


class GraphNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)

    def forward(self, batch: Graphs) -> torch.Tensor:
        nodes = self.linear(batch.nodes)
        return torch.zeros(len(batch.labels), 3).index_add(0, batch.graph_of, nodes)


def graph_loss(model: nn.Module, batch: Graphs) -> ls.Loss:
    logits = model(batch)
    right = (logits.argmax(1) == batch.labels).sum()
    return ls.Loss(cross_entropy(logits, batch.labels), metrics={"accuracy": (right, len(batch.labels))})


def test_samples_count_as_for_the_updater_and_not_rows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    graphs = [(torch.randn(1 + 3 * (i % 4), 2), i % 3) for i in range(11)]
    model = GraphNet()
    evaluator = Evaluator(ls.BatchIterator(graphs, 4, repeat=False), loss_fn=graph_loss)
    trainer = trainer_for(
        tmp_path,
        model,
        evaluator,
        iterator=ls.BatchIterator(graphs, 4),
        loss_fn=graph_loss,
        converter=collate_graphs,  # the evaluator uses it too
        num_shards=1,
    )
    trainer.run()
    whole = collate_graphs(graphs, torch.device("cpu"))[0]
    with torch.no_grad():
        logits = model(whole)
    # Float32 means over batches of 4, 4 and 3 graphs against one over 11.
    expected = float(cross_entropy(logits, whole.labels))
    assert float(trainer.observation["validation/main/loss"]) == pytest.approx(expected, rel=1e-5)
    right = int((logits.argmax(1) == whole.labels).sum())
    assert float(trainer.observation["validation/main/accuracy"]) == pytest.approx(right / 11)


def test_tensors_of_different_lengths_are_refused_as_by_the_updater() -> None:
    batch = (torch.zeros(9, 4), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="must be as long as"):
        Evaluator([batch], {"a": ls.metrics.Accuracy()}, model=nn.Linear(4, 3)).evaluate()


def test_token_means_and_summed_losses_count_as_in_an_update() -> None:
    logits = nn.Linear(4, 3)
    x, y = tensors(6)
    y[0] = y[1] = y[5] = -100
    loader = DataLoader(TensorDataset(x, y), 4)
    found = Evaluator(loader, loss_fn=ls.token_mean(), model=logits, num_shards=2).evaluate()
    with torch.no_grad():
        whole, summed = (float(cross_entropy(logits(x), y, reduction=kind)) for kind in ("mean", "sum"))
    # Float32 means over shards against one over all tokens.
    assert found["loss"] == pytest.approx(whole, rel=1e-6)
    loss_fn = ls.supervised(nn.CrossEntropyLoss(reduction="sum"))
    for num_shards in (1, 3):
        # The mean over batches of their sums, as in the log of training.
        found = Evaluator(loader, loss_fn=loss_fn, model=logits, num_shards=num_shards).evaluate()
        assert found["loss"] == pytest.approx(summed / 2, rel=1e-6)


def test_all_devices_evaluate_at_the_same_time(tmp_path: Path) -> None:
    threads: set[str] = set()
    meeting = threading.Barrier(3, timeout=60)

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            meeting.wait()  # passes only if three shards are computed at once
            threads.add(threading.current_thread().name)
        return cross_entropy(model(x), y)

    evaluator = Evaluator([tensors(9)], loss_fn=loss_fn)
    trainer_for(tmp_path, nn.Linear(4, 3), evaluator, loss_fn=loss_fn, devices=3, num_shards=3).run()
    assert len(threads) == 3


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_it_computes_in_the_precision_of_the_run(tmp_path: Path, precision: str) -> None:
    seen: list[torch.dtype] = []

    class Watching(ls.metrics.Accuracy):
        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            seen.append(output.dtype)
            super().update(output, target)

    model = nn.Linear(4, 3)
    outputs: list[torch.dtype] = []
    model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.dtype))
    if precision == "bf16-true":
        model.to(torch.bfloat16)

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)

    evaluator = Evaluator([tensors()], {"a": Watching()})  # without a loss function the evaluator runs the model
    trainer_for(tmp_path, model, evaluator, precision=precision, loss_fn=loss_fn).run()
    assert set(outputs) == {torch.bfloat16}
    assert set(seen) == {torch.float32}  # in which metrics compute


@dataclass
class Output:
    """What a model may return instead of a tensor."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None


class ReturnsObject(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Output:
        return Output(self.linear(x))


def test_output_picks_what_metrics_see() -> None:
    model, (x, y) = ReturnsObject(), tensors()
    evaluator = Evaluator([(x, y)], {"a": ls.metrics.Accuracy()}, model=model, output=lambda out: out.logits)
    assert evaluator.evaluate()["a"] == float((model(x).logits.argmax(1) == y).double().mean())


def test_a_metric_that_gets_an_object_names_output() -> None:
    evaluator = Evaluator([tensors()], {"a": ls.metrics.Accuracy()}, model=ReturnsObject())
    with pytest.raises(TypeError, match=r"`output` must pick what metrics see .* which is a Output; without it"):
        evaluator.evaluate()


def test_the_target_of_a_dict_is_that_of_the_loss_function() -> None:
    x, y = tensors()
    loss_fn = ls.supervised(cross_entropy, target="label")
    model = nn.Linear(4, 3)
    found = Evaluator([{"input": x, "label": y}], {"a": ls.metrics.Accuracy()}, loss_fn=loss_fn, model=model).evaluate()
    assert found["a"] == float((model(x).argmax(1) == y).double().mean())


def test_the_target_of_a_tuple_may_be_chosen_by_its_position() -> None:
    (x, y), model, metrics = tensors(), nn.Linear(4, 3), {"a": ls.metrics.Accuracy()}
    batches, weight = [(x, y, torch.rand(len(y)))], lambda m, x, y, w: (w * cross_entropy(m(x), y)).mean()
    expected = float((model(x).argmax(1) == y).double().mean())
    for options in ({"loss_fn": weight}, {}):
        for target in (1, -2):
            assert Evaluator(batches, metrics, target=target, model=model, **options).evaluate()["a"] == expected
    with pytest.raises(TypeError, match=r"must be integer classes, .* Evaluator\(\.\.\., target=1\)"):
        Evaluator(batches, metrics, loss_fn=weight, model=model).evaluate()
    with pytest.raises(IndexError, match="`target` must be a position in a batch of 3 entries, got 3"):
        Evaluator(batches, metrics, target=3, model=model).evaluate()
    with pytest.raises(TypeError, match=r"`target` must name the entry of a batch .* got 1"):
        Evaluator([{"x": x, "labels": y}], metrics, target=1, model=model).evaluate()


@pytest.mark.filterwarnings("ignore:The model or a function draws:lockstep.errors.RandomStreamWarning")
def test_the_model_is_as_it_was_also_where_the_loss_runs_the_original(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout())
    model[2].eval()  # frozen on purpose
    states: list[Any] = []

    def loss_fn(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        random.random()  # noqa: S311 - its state is what is looked at
        return cross_entropy(model(x), y)

    evaluator = Evaluator([tensors()], loss_fn=loss_fn)
    trainer = trainer_for(tmp_path, model, evaluator)

    def keep(_: ls.Trainer) -> None:
        states.append([{name: value.clone() for name, value in model.state_dict().items()}, random.getstate()])
        states[-1].append(torch.get_rng_state().tolist())
        states[-1].append([module.training for module in model.modules()])

    trainer.extend(keep, name="before", trigger=(1, "iteration"), priority=1000)
    trainer.extend(keep, name="after", trigger=(1, "iteration"), priority=0)
    trainer.run()
    (before, *first), (after, *second) = states
    assert first == second
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_one_of_several_networks(tmp_path: Path) -> None:
    networks = {"main": nn.Linear(4, 3), "train": nn.Linear(4, 3)}
    x, y = tensors()
    evaluator = Evaluator([(x, y)], {"a": ls.metrics.Accuracy()}, model_name="train")

    def loss_fn(models: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(models["main"](x) + 0 * models["train"](x), y)

    trainer = trainer_for(tmp_path, networks, evaluator, loss_fn=loss_fn)
    trainer.run()
    expected = float((networks["train"](x).argmax(1) == y).double().mean())
    assert float(trainer.observation["validation/train/a"]) == expected


def test_a_sampler_that_gives_each_rank_other_samples_is_refused() -> None:
    data = TensorDataset(*tensors())
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, num_replicas=2, rank=0))
    with pytest.raises(ValueError, match="DistributedSampler"):
        Evaluator(loader, {"a": ls.metrics.Accuracy()})


def test_a_batch_smaller_than_the_shards() -> None:
    (x, y), model = tensors(2), nn.Linear(4, 3)
    found = Evaluator([(x, y)], {"a": ls.metrics.Accuracy()}, model=model, num_shards=5).evaluate()
    assert found["a"] == float((model(x).argmax(1) == y).double().mean())


def test_a_loss_function_that_only_reports_has_no_loss(tmp_path: Path) -> None:
    x, y = tensors(9)

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        ls.report({"val_loss": cross_entropy(model(x), y)})

    model = nn.Linear(4, 3)
    trainer = trainer_for(tmp_path, model, Evaluator([(x, y)], loss_fn=loss_fn, metrics={"a": ls.metrics.Accuracy()}))
    trainer.run()
    observed = {name for name in trainer.observation if name.startswith("validation/")}
    assert observed == {"validation/main/val_loss", "validation/main/a"}
    with torch.no_grad():
        expected = float(cross_entropy(model(x), y))
    # Float32 means over two shards against one over all samples.
    assert float(trainer.observation["validation/main/val_loss"]) == pytest.approx(expected, rel=1e-6)


def test_a_loss_for_some_batches_only_is_refused() -> None:
    x, y = tensors(8)

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
        loss = cross_entropy(model(x), y)
        ls.report({"val_loss": loss})
        return loss if len(x) == 5 else None

    evaluator = Evaluator([(x[:5], y[:5]), (x[5:], y[5:])], loss_fn=loss_fn, model=nn.Linear(4, 3))
    with pytest.raises(TypeError, match=r"`loss_fn` must return a loss for every batch or for none, got None for some"):
        evaluator.evaluate()


def test_what_a_lightning_module_logs_is_observed_of_any_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class LightningModule(nn.Module):
        def log(self, *_: object) -> None:
            """Do nothing, as without a Lightning Trainer."""

    class Net(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.log("inputs", x.mean())
            outputs: torch.Tensor = self.layer(x)
            return outputs

    # In the place of the package, which may not be installed.
    package = ModuleType("pytorch_lightning")
    vars(package)["LightningModule"] = LightningModule
    monkeypatch.setitem(sys.modules, "pytorch_lightning", package)
    x, y = tensors()
    expected = pytest.approx(float(x.mean()), rel=1e-5)  # summed in another order

    other = Net()
    evaluator = Evaluator([(x, y)], loss_fn=ls.supervised(cross_entropy))
    assert evaluator.evaluate(other)["inputs"] == expected  # without an updater
    assert "log" not in vars(other)  # only replicas were changed
    for model in (None, other):  # the updater's model, and one that is not
        evaluator = Evaluator([(x, y)], loss_fn=ls.supervised(cross_entropy), model=model)
        trainer = trainer_for(tmp_path / str(model is other), Net(), evaluator)
        report = ls.extensions.LogReport(trigger=(1, "iteration"))
        trainer.extend(report)
        trainer.run()
        assert report.log[-1]["validation/main/inputs"] == expected


def test_a_model_of_its_own_is_evaluated_as_by_the_updater_of_each_run(tmp_path: Path) -> None:
    outputs: list[torch.dtype] = []
    other = nn.Linear(4, 3)
    other.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.dtype))
    evaluator = Evaluator([tensors()], {"accuracy": ls.metrics.Accuracy()}, model=other)
    for precision in ("fp32", "bf16"):
        trainer_for(tmp_path, nn.Linear(4, 3), evaluator, precision=precision).run()
    assert outputs == [torch.float32] * 2 + [torch.bfloat16] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_an_updater_it_computes_in_the_precision_of_the_parameters(dtype: torch.dtype) -> None:
    outputs: list[torch.dtype] = []
    model = nn.Linear(4, 3).to(dtype)
    model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output.dtype))
    found = Evaluator([tensors()], {"accuracy": ls.metrics.Accuracy()}).evaluate(model)
    assert 0 <= found["accuracy"] <= 1
    assert outputs == [dtype]


def test_strings_of_a_loader_reach_the_loss_function_with_their_samples() -> None:
    inputs = torch.randn(10, 3, generator=torch.Generator().manual_seed(0))
    samples = [{"x": each, "name": f"{index}.png"} for index, each in enumerate(inputs)]

    def loss_fn(model: nn.Module, x: torch.Tensor, name: list[str]) -> torch.Tensor:
        numbers = torch.tensor([float(each.removesuffix(".png")) for each in name])
        out: torch.Tensor = (model(x).sum(dim=1) * numbers).mean()
        return out

    model = nn.Linear(3, 2)
    evaluator = ls.extensions.Evaluator(DataLoader(samples, batch_size=4), loss_fn=loss_fn, num_shards=2)
    expected = (model(inputs).sum(dim=1) * torch.arange(10)).mean()
    assert float(evaluator.evaluate(model)["loss"]) == pytest.approx(expected.item(), rel=1e-5)
