"""The average of the weights: that of a plain loop, on any placement, evaluated and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lockstep as ls
from lockstep.errors import StateError
from lockstep.extensions import Evaluator, ExponentialMovingAverage
from lockstep.trainer import Trainer
from tests.support.plain_updaters import LoopUpdater
from tests.support.resuming import PatientSnapshot, vectors


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def build(out: Path, updates: int = 9, devices: Any = 1, **options: Any) -> tuple[Trainer, ExponentialMovingAverage]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # Without a short last batch, whose shards of one sample BatchNorm would refuse.
    batches = ls.BatchIterator(vectors(), 8, shuffle=True, seed=3, last_batch="drop")
    loss = ls.supervised(functional.cross_entropy)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=devices, num_shards=4, loss_fn=loss)
    average = ExponentialMovingAverage(model, **{"decay": 0.9, **options})
    trainer = ls.Trainer(updater, (updates, "iteration"), out=out)
    trainer.extend(average)
    test = ls.BatchIterator(vectors(), 8, repeat=False)
    evaluator = Evaluator(test, {"accuracy": ls.metrics.Accuracy()}, loss_fn=loss, model=average.module, name="average")
    trainer.extend(evaluator, trigger=(3, "iteration"))
    trainer.extend(PatientSnapshot(), trigger=(4, "iteration"))
    return trainer, average


def test_it_is_the_average_of_a_plain_loop(tmp_path: Path) -> None:
    torch.manual_seed(1)
    x, t = torch.randn(20, 6), torch.randint(3, (20,))
    plain = LoopUpdater(network()[:1], x, t, 5)
    expected = AveragedModel(plain.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(6):
        plain.update()
        expected.update_parameters(plain.model)
    model = network()[:1]
    average = ExponentialMovingAverage(model, 0.9)
    Trainer(LoopUpdater(model, x, t, 5), (6, "iteration"), tmp_path, extensions=[average]).run()
    assert ls.digest(average.average) == ls.digest(expected)
    assert ls.digest(average.module) != ls.digest(model)


def test_the_decay_can_be_set_between_updates(tmp_path: Path) -> None:
    torch.manual_seed(1)
    x, t = torch.randn(20, 6), torch.randint(3, (20,))
    model = network()[:1]
    average = ExponentialMovingAverage(model, 0.5)
    trainer = Trainer(LoopUpdater(model, x, t, 5), (4, "iteration"), tmp_path)
    expected: list[torch.Tensor] = []

    def schedule(trainer: Trainer) -> None:
        average.decay = decay = trainer.updater.iteration / 10
        weight = model[0].weight.detach().clone()
        expected.append(weight if not expected else expected[-1].lerp(weight, 1 - decay))

    trainer.extend(schedule, trigger=(1, "iteration"), priority=average.priority + 1)
    trainer.extend(average)
    trainer.run()
    assert torch.equal(average.module[0].weight, expected[-1])  # type: ignore[index]
    with pytest.raises(ValueError, match="`decay` must be at least 0 and less than 1, got 1"):
        average.decay = 1


@pytest.mark.parametrize("use_buffers", [False, True])
def test_the_same_bits_on_any_number_of_devices(tmp_path: Path, use_buffers: bool) -> None:
    digests, scores = set(), set()
    for devices in (["cpu"], ["cpu"] * 2, ["cpu"] * 3):
        trainer, average = build(tmp_path / str(len(devices)), devices=devices, use_buffers=use_buffers)
        trainer.run()
        digests.add(ls.digest(average.module))
        scores.add(float(trainer.observation["average/main/loss"]))  # type: ignore[arg-type]
    assert (len(digests), len(scores)) == (1, 1)


def test_a_resumed_run_ends_with_the_same_average(tmp_path: Path) -> None:
    whole, expected = build(tmp_path / "whole")
    whole.run()
    build(tmp_path / "run", 4)[0].run()
    resumed, average = build(tmp_path / "run", devices=["cpu"] * 2)
    resumed.run(resume="auto")
    assert resumed.resumption is not None
    assert ls.digest(average.average) == ls.digest(expected.average)
    assert float(resumed.observation["average/main/loss"]) == float(whole.observation["average/main/loss"])  # type: ignore[arg-type]


@pytest.mark.parametrize("use_buffers", [False, True])
def test_weights_in_half_precision_are_averaged_in_float32(tmp_path: Path, use_buffers: bool) -> None:
    torch.manual_seed(1)
    x, t = torch.randn(20, 6).bfloat16(), torch.randint(3, (20,))
    updater = LoopUpdater(nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)).bfloat16(), x, t, 5)
    average = ExponentialMovingAverage(updater.model, 0.999, use_buffers=use_buffers)
    trainer = Trainer(updater, (30, "iteration"), tmp_path, extensions=[average])
    wide: dict[str, torch.Tensor] = {}

    def follow(trainer: Trainer) -> None:  # noqa: ARG001 - the signature of an extension
        for name, tensor in updater.model.state_dict().items():
            wide[name] = wide[name].lerp(tensor.float(), 1 - 0.999) if name in wide else tensor.float()

    trainer.extend(follow, trigger=(1, "iteration"))
    trainer.run()
    averaged = [name for name, _ in updater.model.named_parameters()]
    averaged += ["0.running_mean", "0.running_var"] if use_buffers else []
    expected = {name: wide[name].bfloat16() for name in averaged}
    found = average.module.state_dict()
    assert ls.digest({name: found[name] for name in averaged}) == ls.digest(expected)
    # The float32 values are saved: a restored average goes on as the first one does.
    other = ExponentialMovingAverage(updater.model, 0.999, use_buffers=use_buffers)
    other.load_state_dict(average.state_dict())
    assert ls.digest(other.state_dict()) == ls.digest(average.state_dict())
    with pytest.raises(StateError, match="must hold 'average', 'exact'; missing: 'exact'"):
        other.load_state_dict({"average": average.state_dict()["average"]})


def test_a_small_change_of_a_weight_in_half_precision_moves_the_average(tmp_path: Path) -> None:
    updater = LoopUpdater(nn.Linear(1, 1, bias=False).bfloat16(), torch.zeros(1, 1).bfloat16(), torch.zeros(1, 1), 1)
    average = ExponentialMovingAverage(updater.model, 0.999)
    with torch.no_grad():
        updater.model.weight.fill_(0.5)
        average(Trainer(updater, (1, "iteration"), tmp_path))
        updater.model.weight.fill_(1.0)
    for _ in range(700):
        average(Trainer(updater, (1, "iteration"), tmp_path))
    # 1 - 0.5 · 0.999⁷⁰⁰; in bfloat16 no update could move it.
    assert average.module.weight.item() == pytest.approx(0.752, abs=0.004)


def test_training_does_not_depend_on_it(tmp_path: Path) -> None:
    trainer, _ = build(tmp_path / "a")
    trainer.run()
    other, _ = build(tmp_path / "b", decay=0.0)
    other.run()
    assert ls.digest(trainer.updater.get_all_models()["main"]) == ls.digest(other.updater.get_all_models()["main"])


def test_one_of_several_models_is_found_by_itself(tmp_path: Path) -> None:
    models = {name: nn.Linear(6, 3) for name in ("dis", "gen")}
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in models.items()}
    updater = ls.ParallelUpdater(
        ls.BatchIterator(vectors(), 8),
        optimizers,
        models,
        devices=1,
        num_shards=1,
        loss_fn=lambda nets, x, t: functional.cross_entropy(nets["dis"](x) + nets["gen"](x), t),
    )
    averages = [ExponentialMovingAverage(models["gen"], 0.5), ExponentialMovingAverage(models["dis"], model_name="gen")]
    Trainer(updater, (1, "iteration"), tmp_path, extensions=averages).run()
    assert [ls.digest(each.module) for each in averages] == [ls.digest(models["gen"])] * 2


def test_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`decay` must be at least 0 and less than 1, got 1"):
        ExponentialMovingAverage(network(), 1)
    average = ExponentialMovingAverage(network())
    before = ls.digest(average.average)
    with pytest.raises(StateError, match="The state of ExponentialMovingAverage must hold 'average'"):
        average.load_state_dict({})
    with pytest.raises(StateError, match="missing: 'n_averaged'"):
        average.load_state_dict({"average": {}})
    tensors = {name: torch.full_like(tensor, 7) for name, tensor in average.average.state_dict().items()}
    last = list(tensors)[-1]
    with pytest.raises(StateError, match=rf"`state\['average'\]\['{last}'\]` must have shape .*, got \(9, 9\)"):
        average.load_state_dict({"average": {**tensors, last: torch.zeros(9, 9)}})
    assert ls.digest(average.average) == before
    trainer, _ = build(tmp_path, model_name="gen")
    with pytest.raises(KeyError, match=r"`model_name` must be one of \['main'\], got 'gen'"):
        trainer.run()
