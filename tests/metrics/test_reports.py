"""What is reported inside a shard is the mean over all samples, under the name Chainer gave it."""

from __future__ import annotations

import itertools
import threading
import timeit
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.extensions import Evaluator
from lockstep.metrics import Mean, Observers, collecting, report


class Predictor(nn.Module):
    """Reports the mean of its inputs, in whole numbers whose means are exact in binary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.recomputed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.recomputed += 1
        report({"mean": x.mean(), "rows": len(x)}, self)
        output: torch.Tensor = self.linear(x)
        return output


class Reporting(nn.Module):
    """A model that is its own loss, as a Chainer classifier is."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.predictor = Predictor()
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.predictor, x, use_reentrant=False) if self.checkpointed else self.predictor(x)
        loss: torch.Tensor = y.square().mean()
        report({"loss": loss + 100, "first": x[0]}, self)
        report({"last": 0.0})
        report({"last": x[-1, 0]})
        report({"tokens": x.mean()}, self, weight=x.sum())
        report({"even": x.mean() if len(x) % 2 == 0 else float("nan")}, weight=1 - len(x) % 2)
        return loss


def updater_of(
    model: nn.Module, *, devices: int, num_shards: int | None, batch_size: int, num_samples: int = 23
) -> ls.ParallelUpdater:
    x = torch.arange(1.0, num_samples + 1).reshape(-1, 1)
    return ls.ParallelUpdater(
        ls.BatchIterator(TensorDataset(x), batch_size, last_batch="short"),
        torch.optim.SGD(model.parameters(), lr=0.0),
        model,
        devices=["cpu"] * devices,
        num_shards=num_shards,
    )


def observations(
    updates: int = 4, *, devices: int = 1, num_shards: int | None = 4, batch_size: int = 9, **options: Any
) -> list[dict[str, Mean]]:
    torch.manual_seed(0)
    updater = updater_of(Reporting(**options), devices=devices, num_shards=num_shards, batch_size=batch_size)
    try:
        return [updater.update().observation() for _ in range(updates)]
    finally:
        updater.finalize()


def bits(found: Sequence[dict[str, Mean]]) -> list[dict[str, tuple[float, float]]]:
    return [{name: (float(mean.total), float(mean.weight)) for name, mean in each.items()} for each in found]


NAMES = {"loss", "predictor/mean", "predictor/rows", "first", "last", "tokens", "even"}


@pytest.mark.parametrize("num_shards", [1, 3, 4, 9])
def test_the_placement_changes_no_bit(num_shards: int) -> None:
    expected = bits(observations(num_shards=num_shards))
    assert all(set(each) == NAMES | {"skipped"} for each in expected)
    assert bits(observations(num_shards=num_shards, devices=2)) == expected
    assert bits(observations(num_shards=num_shards, devices=3)) == expected


@pytest.mark.parametrize("num_shards", [1, 2, 4, 5])
def test_the_mean_is_that_of_all_samples(num_shards: int) -> None:
    # 23 samples in batches of 9: two whole ones and a short one of 5, all cut unevenly.
    batches = [range(1, 10), range(10, 19), range(19, 24), range(1, 10)]
    for batch, found in zip(batches, observations(num_shards=num_shards), strict=True):
        shards = cut(batch, num_shards)
        assert exact(found["predictor/mean"]) == pytest.approx(Fraction(sum(batch), len(batch)), rel=1e-7)
        assert float(found["predictor/mean"].weight) == len(batch)
        assert exact(found["predictor/rows"]) == Fraction(sum(len(s) ** 2 for s in shards), len(batch))
        assert exact(found["first"]) == Fraction(sum(s[0] * len(s) for s in shards), len(batch))
        assert exact(found["last"]) == Fraction(sum(s[-1] * len(s) for s in shards), len(batch))
        # A mean of float32 numbers is rounded once in each shard.
        tokens = sum(Fraction(sum(s) ** 2, len(s)) for s in shards) / sum(batch)
        assert exact(found["tokens"]) == pytest.approx(tokens, rel=1e-7)
        even = [s for s in shards if len(s) % 2 == 0]
        assert float(found["even"].weight) == len(even)
        if even:
            means = sum(Fraction(sum(s), len(s)) for s in even)
            assert exact(found["even"]) == pytest.approx(means / len(even), rel=1e-7)


def cut(batch: range, num_shards: int) -> list[range]:
    num_shards = min(num_shards, len(batch))
    size, longer = divmod(len(batch), num_shards)
    starts = [shard * size + min(shard, longer) for shard in range(num_shards + 1)]
    return [batch[start:stop] for start, stop in itertools.pairwise(starts)]


def exact(mean: Mean) -> Fraction:
    return Fraction(float(mean.total)) / Fraction(float(mean.weight))


def test_checkpointing_does_not_report_twice() -> None:
    plain, recomputing = observations(), observations(checkpointed=True)
    assert bits(recomputing) == bits(plain)


def test_the_recomputation_does_happen() -> None:
    model = Reporting(checkpointed=True)
    with collecting(Observers({"": model}), 2) as reports:
        loss = model(torch.ones(2, 1))
    before = dict(reports.pairs)
    loss.backward()
    assert model.predictor.recomputed == 2
    assert reports.pairs == before


def test_the_loss_of_the_update_keeps_its_name() -> None:
    for each in observations():
        assert float(each["loss"]) < 100


def test_a_copy_stays_when_the_tensor_is_changed_afterwards() -> None:
    value = torch.zeros(1, requires_grad=True) + 1
    with collecting(Observers({}), 3) as reports:
        report({"double": value.double().detach(), "x": value})
        value += 5
    assert reports.pairs == {"double": (3.0, 3), "x": (3.0, 3)}
    assert not any(isinstance(part, torch.Tensor) and part.requires_grad for part in reports.pairs["x"])


def test_numbers_of_every_kind() -> None:
    with collecting(Observers({}), 2) as reports:
        report({"numpy": np.float32(0.5), "bool": True, "tensor": torch.tensor([[3]])}, weight=np.int64(4))
        report({"absent": torch.tensor(float("nan"))}, weight=torch.tensor([0]))
    assert reports.pairs == {
        "numpy": (2.0, 4.0),
        "bool": (4.0, 4.0),
        "tensor": (12.0, 4.0),
        "absent": (0.0, 0.0),
    }


def test_outside_of_everything_nothing_happens() -> None:
    report({"x": 1.0}, nn.Linear(1, 1), weight=-1)
    assert Reporting()(torch.ones(2, 1)).ndim == 0


def test_threads_do_not_see_each_other() -> None:
    with collecting(Observers({}), 1) as reports:
        thread = threading.Thread(target=report, args=({"x": 1.0},))
        thread.start()
        thread.join()
    assert reports.pairs == {}


def test_the_inner_one_hides_the_outer_one() -> None:
    with collecting(Observers({}), 1) as outer:
        with collecting(Observers({}), 1) as inner:
            report({"x": 1.0})
        report({"y": 2.0})
    assert (set(inner.pairs), set(outer.pairs)) == ({"x"}, {"y"})


def test_after_an_error_nothing_is_collected() -> None:
    def fail() -> None:
        with collecting(Observers({}), 1):
            raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    report({1: 1.0})  # type: ignore[dict-item]  # would be refused where it is taken


def test_modules_are_named_by_their_paths() -> None:
    shared = nn.ReLU()
    gen, dis = nn.Sequential(nn.Sequential(shared), shared), nn.Linear(1, 1)
    observers = Observers({"gen": gen, "dis": dis})
    found = [observers.prefix(module) for module in (gen, gen[0], shared, dis)]
    assert found == ["gen/", "gen/0/", "gen/0/0/", "dis/"]
    gen.append(nn.Tanh())
    assert observers.prefix(gen[2]) == "gen/2/"


# torch's compiler imports a module of its own that uses what torch has deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()  # where a graph breaks, torch's compiler looks at gradients that are not there, and warns
def test_a_compiled_model_reports_under_its_own_names() -> None:
    model = Reporting()
    found = []
    for each in (model, torch.compile(model, backend="eager")):
        with collecting(Observers({"": each}), 2) as reports:
            each(torch.tensor([[1.0], [3.0]]))
        found.append(reports.pairs)
    assert found[0] == found[1]
    assert set(found[0]) == NAMES


@pytest.mark.parametrize(
    ("values", "options", "error", "message"),
    [
        ({1: 1.0}, {}, TypeError, "The keys of `values` must be strings, got 1"),
        ({"x": "1"}, {}, TypeError, r"`values\['x'\]` must be a number or a tensor of one element, got '1'"),
        (
            {"x": torch.ones(2)},
            {},
            ValueError,
            r"`values\['x'\]` must be a tensor of one element, got shape \(2,\)",
        ),
        ({"x": 1.0}, {"weight": -1}, ValueError, "`weight` must be finite and at least 0, got -1"),
        ({"x": 1.0}, {"weight": float("nan")}, ValueError, "`weight` must be finite and .*, got nan"),
        ({"x": 1.0}, {"weight": "1"}, TypeError, "`weight` must be a number or a tensor .*, got '1'"),
        (
            {"x": 1.0},
            {"weight": torch.ones(2)},
            ValueError,
            r"`weight` must be a tensor of one element, got shape \(2,\)",
        ),
        (
            {"x": 1.0},
            {"observer": nn.MSELoss()},
            ValueError,
            "`observer` must be a module of the model that runs, got another MSELoss",
        ),
    ],
)
def test_what_cannot_be_reported_is_refused(
    values: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with collecting(Observers({"": nn.Linear(1, 1)}), 1) as reports:
        with pytest.raises(error, match=message):
            report({"before": 1.0} | values, **options)
        assert reports.pairs == {}


def test_the_original_model_is_no_observer_inside_a_shard() -> None:
    model = Reporting()

    def loss_fn(replica: nn.Module, x: torch.Tensor) -> torch.Tensor:
        report({"x": 1.0}, model)
        loss: torch.Tensor = replica(x)
        return loss

    updater = ls.ParallelUpdater(
        ls.BatchIterator(TensorDataset(torch.ones(2, 1)), 2),
        torch.optim.SGD(model.parameters(), lr=0.0),
        model,
        devices=["cpu"],
        loss_fn=loss_fn,
    )
    with pytest.raises(ls.ReplicaError, match="`observer` must be a module of the model that runs"):
        updater.update()
    updater.finalize()


def test_names_in_a_run(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Reporting()
    updater = updater_of(model, devices=2, num_shards=3, batch_size=9)
    trainer = ls.Trainer(updater, until=(1, "iteration"), out=tmp_path)
    held_out = [(torch.ones(4, 1),), (torch.full((1, 1), 6.0),)]
    trainer.extend(Evaluator(held_out, loss_fn=lambda replica, x: replica(x)), trigger=(1, "iteration"))
    trainer.run()
    names = {f"{kind}main/{name}" for kind in ("", "validation/") for name in NAMES}
    assert set(trainer.observation) == names | {"main/skipped"}
    assert float(trainer.observation["validation/main/predictor/mean"]) == 2.0  # (4 * 1 + 1 * 6) / 5
    assert float(trainer.observation["validation/main/even"]) == 1.0
    assert float(trainer.observation["validation/main/loss"]) < 100


class Right:
    """A metric under a name that is reported, too."""

    def update(self, _output: Any, _target: Any) -> None:
        """Ignore the batch: the value is always the same."""

    def compute(self) -> float:
        return 7.0

    def reset(self) -> None:
        """Return at once, because nothing is counted."""


def test_a_metric_counts_before_a_report_and_a_report_without_a_loss_function() -> None:
    model = Reporting()
    evaluator = Evaluator([(torch.ones(2, 1), torch.ones(2))], {"first": Right()}, model=model)
    found = evaluator.evaluate()
    assert found["first"] == 7.0
    assert float(found["predictor/rows"]) == 2.0  # type: ignore[arg-type]  # a number
    assert float(found["loss"]) >= 100  # type: ignore[arg-type]  # no loss function, so the model's own


def test_a_metric_of_the_loss_function_counts_before_a_report() -> None:
    model = nn.Linear(1, 1)

    def loss_fn(replica: nn.Module, x: torch.Tensor) -> ls.Loss:
        report({"accuracy": 0.5, "other": 0.25})
        return ls.Loss(replica(x).mean(), metrics={"accuracy": (len(x), len(x))})

    updater = ls.ParallelUpdater(
        ls.BatchIterator(TensorDataset(torch.ones(5, 1)), 5),
        torch.optim.SGD(model.parameters(), lr=0.0),
        model,
        devices=["cpu"],
        num_shards=2,
        loss_fn=loss_fn,
    )
    result = updater.update()
    assert {name: float(mean) for name, mean in result.metrics.items()} == {"accuracy": 1.0, "other": 0.25}
    updater.finalize()


def test_a_shard_without_reports_pays_next_to_nothing() -> None:
    observers = Observers({"": nn.Linear(1, 1)})

    def empty() -> None:
        with collecting(observers, 4):
            pass

    layer, one = nn.Linear(1, 1), torch.ones(1, 1)
    # The least of several, because other work on the machine only ever adds. The smallest forward there is
    # takes several times as long.
    smallest = min(timeit.repeat(lambda: layer(one), number=2000, repeat=5))
    assert min(timeit.repeat(empty, number=2000, repeat=5)) < smallest


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        report({"inner": x.mean(), "number": len(x)})
        report({"weighted": x.mean()}, weight=float(x[0]))
        output: torch.Tensor = self.linear(x)
        return output


class Nesting(nn.Module):
    """A loss with a module that splits each shard further."""

    def __init__(self, devices: int, num_shards: int) -> None:
        super().__init__()
        self.inner = ls.DataParallel(Inner(), ["cpu"] * devices, num_shards=num_shards)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        report({"inner": 0.0, "outer": x.mean()})
        loss: torch.Tensor = self.inner(x).square().mean()
        return loss


@pytest.mark.parametrize(("devices", "inner_devices"), [(1, 2), (2, 3)])
def test_what_is_reported_inside_of_a_data_parallel_does_not_depend_on_its_devices(
    devices: int, inner_devices: int
) -> None:
    def found(devices: int, inner_devices: int) -> list[dict[str, Mean]]:
        torch.manual_seed(0)
        updater = updater_of(Nesting(inner_devices, 3), devices=devices, num_shards=2, batch_size=8, num_samples=16)
        try:
            return [updater.update().observation() for _ in range(2)]
        finally:
            updater.finalize()

    several = found(devices, inner_devices)
    assert bits(several) == bits(found(1, 1))
    for each in several:
        assert exact(each["inner"]) == exact(each["outer"])
        # Shards of 4 samples, in parts of 2, 1 and 1.
        assert exact(each["number"]) == Fraction(4 + 1 + 1, 4)
    # The parts of the first update have the weights 1, 3, 4, 5, 7 and 8.
    weighted = [(Fraction(3, 2), 1), (3, 3), (4, 4), (Fraction(11, 2), 5), (7, 7), (8, 8)]
    expected = Fraction(sum(mean * weight for mean, weight in weighted)) / sum(weight for _, weight in weighted)
    assert float(several[0]["weighted"]) == pytest.approx(float(expected), rel=1e-12)
