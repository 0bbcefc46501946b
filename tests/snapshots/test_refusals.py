"""A run resumes only with the recipe of its snapshot; what differs is named with both values, and nothing changes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.snapshots import updater_state as recipes
from tests.support.resuming import vectors


def updater(**changes: Any) -> ls.ParallelUpdater:
    """Build a run of which each part can be changed alone."""
    torch.manual_seed(changes.pop("weights", 1))
    width, dtype = changes.pop("width", 8), changes.pop("dtype", torch.float32)
    model = nn.Sequential(nn.Linear(6, width), changes.pop("activation", nn.ReLU()), nn.Linear(width, 3)).to(dtype)
    model[0].requires_grad_(not changes.pop("frozen", False))
    if changes.pop("tied", False):
        model[0].bias = nn.Parameter(torch.zeros(8))
        model.add_module("extra", nn.Module())
        model.extra.bias = model[0].bias
    build = changes.pop("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
    optimizer = build(model.parameters())
    schedule = changes.pop("schedule", lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 30))
    data = {"batch_size": 8, "shuffle": True, "seed": 3, **changes.pop("data", {})}
    batches = ls.BatchIterator(vectors(changes.pop("num_samples", 50)), **data)
    options: dict[str, Any] = {"num_shards": 4, "loss_scale": ls.DynamicLossScale(8.0, interval=5), "devices": 1}
    options |= {"loss_fn": loss, "scheduler": schedule(optimizer)} | changes
    return ls.ParallelUpdater(batches, optimizer, model, **options)


def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x.to(model[0].weight.dtype)).float(), target)  # type: ignore[index,union-attr,arg-type]


def other_loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return scale * loss(model, x, target)


def sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, **options})


def identity(order: list[int], position: int) -> list[int]:  # noqa: ARG001 - called with both
    return order


CHANGES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    "num_shards": ({"num_shards": 2}, 4, 2),
    "seed": ({"seed": 9}, 0, 9),
    "accumulate": ({"accumulate": 2}, 1, 2),
    "split": ({"split": "strided"}, "contiguous", "strided"),
    "reduction": ({"reduction": "sum"}, "mean", "sum"),
    "precision": ({"precision": "bf16"}, "fp32", "bf16"),
    "buffers": ({"buffers": "first"}, "mean", "first"),
    "batch_dim": ({"batch_dim": 1}, 0, 1),
    "carried": ({"carried": ls.Carried(torch.zeros(1, 8, 4))}, None, {"carried": "float32 [1, 8, 4]"}),
    "on_overflow": ({"on_overflow": "skip"}, "retry", "skip"),
    "max_tries": ({"max_tries": 7}, 20, 7),
    "on_exhausted": ({"on_exhausted": "raise"}, "skip", "raise"),
    "auto_new_epoch": ({"auto_new_epoch": False}, True, False),
    "loss_scale": ({"loss_scale": ls.RampLossScale(8.0)}, "DynamicLossScale", "RampLossScale"),
    "loss_scale.interval": ({"loss_scale": ls.DynamicLossScale(8.0, interval=6)}, 5, 6),
    "loss_scale.growth": ({"loss_scale": ls.DynamicLossScale(8.0, interval=5, growth=4.0)}, 2.0, 4.0),
    "loss_scale.backoff": ({"loss_scale": ls.DynamicLossScale(8.0, interval=5, backoff=0.25)}, 0.5, 0.25),
    "clip_grad_norm": ({"clip_grad_norm": 1.0}, "nothing", 1.0),
    "batch_size": ({"data": {"batch_size": 10}}, 8, 10),
    "repeat": ({"data": {"repeat": False}}, True, False),
    "shuffle": ({"data": {"shuffle": False}}, True, False),
    "last_batch": ({"data": {"last_batch": "drop"}}, "short", "drop"),
    "data_seed": ({"data": {"seed": 4}}, 3, 4),
    "sampler": ({"data": {"order_sampler": identity, "shuffle": False}}, False, True),
    "sample_streams": ({"data": {"sample_streams": False}}, True, False),
    "num_samples": ({"num_samples": 49}, 50, 49),
    "iterator": ({}, "BatchIterator", "IterableBatches"),
    "model.0.weight": ({"width": 9}, "float32 [8, 6]", "float32 [9, 6]"),
    "model.2.bias": ({"dtype": torch.float64}, "float32 [3]", "float64 [3]"),
    "model.extra.bias": ({"tied": True}, "nothing", "tied to 0.bias"),
    "frozen": ({"frozen": True}, "nothing", ["0.weight", "0.bias"]),
    "optimizer": ({"optimizer": torch.optim.Adam}, "SGD", "Adam"),
    "optimizer.num_parameters": ({"optimizer": lambda each: sgd()(list(each)[:3])}, [4], [3]),
    "optimizer.lr": ({"optimizer": sgd(lr=0.2)}, 0.1, 0.2),
    "optimizer.momentum": ({"optimizer": sgd(momentum=0.8)}, 0.9, 0.8),
    "optimizer.foreach": ({"optimizer": sgd(foreach=False)}, None, False),
    "optimizer.fused": ({"optimizer": sgd(fused=True)}, None, True),
    "scheduler": ({"schedule": lambda each: torch.optim.lr_scheduler.StepLR(each, 30)}, "CosineAnnealingLR", "StepLR"),
    "scheduler.T_max": ({"schedule": lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 40)}, 30, 40),
}
ACCOMPANIED = {
    # Changes that cannot be made alone.
    "carried": {"carried.dim", "carried.each_epoch", "carried.initial"},
    "sampler": {"shuffle"},
    "loss_scale": {"loss_scale.growth", "loss_scale.backoff", "loss_scale.interval", "loss_scale.minimum"}
    | {"loss_scale.maximum", "loss_scale.uncounted"},
    "iterator": {"num_samples", "data_seed", "sampler", "batch_size", "shuffle", "last_batch", "sample_streams"}
    | {"batches_of"},
    "model.0.weight": {"model.0.bias", "model.2.weight"},
    "model.2.bias": {"model.0.weight", "model.0.bias", "model.2.weight"},
    "optimizer": {"scheduler.base_lrs"},
    "optimizer.lr": {"scheduler.base_lrs"},
    "scheduler": {"scheduler.T_max", "scheduler.eta_min", "scheduler.step_size", "scheduler.gamma"},
}


def changed(field: str) -> ls.ParallelUpdater:
    changes = CHANGES[field][0]
    made = updater(weights=2, **changes)
    if field == "iterator":
        made.finalize()
        batches = ls.IterableBatches([torch.zeros(8, 6)])
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = sgd()(model.parameters())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        scale = ls.DynamicLossScale(8.0, interval=5)
        options: dict[str, Any] = {"num_shards": 4, "loss_scale": scale, "devices": 1, "loss_fn": loss}
        return ls.ParallelUpdater(batches, optimizer, model, scheduler=schedule, **options)
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = updater()
    for _ in range(3):
        made.update()
    path = tmp_path_factory.mktemp("saved") / "snapshot"
    ls.snapshots.save(made, path)
    made.finalize()
    return path


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_is_refused_with_both_values(field: str, saved: Path) -> None:
    made = changed(field)
    before = ls.digest(made.state_dict())
    with pytest.raises(ls.StateError, match="Cannot resume from") as raised:
        ls.snapshots.restore(made, saved)
    _, old, new = CHANGES[field]
    assert f"{field} is {new!r} here and {old!r} in the snapshot" in str(raised.value)
    assert ("accept=(" in str(raised.value)) == (field != "optimizer.num_parameters" and not field.startswith("model."))
    assert ls.digest(made.state_dict()) == before
    differing = recipes.compare_fields(ls.snapshots.load(saved).recipe, made.recipe_fields())
    alone = {each.name for each in differing} - {field}
    assert {each for each in alone if not each.startswith(("optimizer.", "code."))} == ACCOMPANIED.get(field, set())


def test_every_field_is_changed_by_a_test() -> None:
    made = updater(carried=ls.Carried(torch.zeros(1, 8, 4)), clip_grad_norm=1.0)
    made.finalize()
    # Of the tensors and of the options of classes that have many, some stand for all.
    parts = ("model.", "optimizer.", "scheduler.", "loss_scale.", "carried.", "code.")
    assert {each for each in made.recipe_fields() if not each.startswith(parts)} <= CHANGES.keys()


def rewritten(saved: Path, out: Path, *, without: str | None = None, added: str | None = None) -> Path:
    """Write a snapshot of another version of PyTorch, whose optimizer has an option less or more."""
    read = ls.snapshots.load(saved)
    recipe, state = read.recipe, read.state()
    [group] = state["optimizers"]["main"]["param_groups"]
    if without is not None:
        del group[without], recipe[f"optimizer.{without}"]
    if added is not None:
        group[added] = recipe[f"optimizer.{added}"] = 7
    content = ls.snapshots.Content(
        progress=read.manifest.progress,
        run_id=read.manifest.run_id,
        recipe=recipe,
        kernel_class=read.manifest.kernel_class,
        models=read.models(),
        state=state,
    )
    return ls.snapshots.write_beside(out, content, reasons=["test"])


def test_an_option_that_the_snapshot_lacks_keeps_its_default(saved: Path, tmp_path: Path) -> None:
    path = rewritten(saved, tmp_path, without="nesterov")
    made = updater()
    with pytest.warns(ls.DeterminismWarning, match="optimizer.nesterov is False here and 'nothing' in the snapshot"):
        ls.snapshots.restore(made, path)
    assert made.get_optimizer("main").param_groups[0]["nesterov"] is False
    made.update()
    made.finalize()


def test_an_option_that_is_unknown_here_is_told(saved: Path, tmp_path: Path) -> None:
    path = rewritten(saved, tmp_path, added="from_the_future")
    made = updater()
    with pytest.warns(ls.DeterminismWarning, match="optimizer.from_the_future is 'nothing' here and 7 in the snapshot"):
        ls.snapshots.restore(made, path)
    made.update()
    made.finalize()


def carrying(initial: torch.Tensor, dim: int = 1, *, each_epoch: bool = True) -> dict[str, object]:
    made = updater(carried=ls.Carried(initial, dim, each_epoch))
    made.finalize()
    return made.recipe_fields()


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (lambda: carrying(torch.zeros(8, 8)), set()),
        (lambda: carrying(torch.zeros(8, 8), -1), set()),
        (lambda: carrying(torch.zeros(8, 8), 0), {"carried.dim"}),
        (lambda: carrying(torch.ones(8, 8)), {"carried.initial"}),
        (lambda: carrying(torch.zeros(8, 8, dtype=torch.float64)), {"carried", "carried.initial"}),
        (lambda: carrying(torch.zeros(8, 8), each_epoch=False), {"carried.each_epoch", "carried.initial"}),
    ],
)
def test_what_is_carried_is_compared(build: Callable[[], dict[str, object]], names: set[str]) -> None:
    saved = carrying(torch.zeros(8, 8))
    assert {each.name for each in recipes.compare_fields(saved, build())} == names


def test_initial_values_do_not_matter_where_the_run_does_not_return_to_them() -> None:
    forever = carrying(torch.zeros(8, 8), each_epoch=False)
    assert recipes.compare_fields(forever, carrying(torch.ones(8, 8), each_epoch=False)) == []


@pytest.mark.parametrize("options", [{"max_skipped": 5}], ids=str)
def test_arguments_that_change_no_bit_may_differ(options: dict[str, Any], saved: Path) -> None:
    made = updater(**options)
    ls.snapshots.restore(made, saved)
    assert made.iteration == 3


def test_one_error_names_all_fields(saved: Path) -> None:
    made = updater(accumulate=2, data={"batch_size": 10}, num_shards=2)
    with pytest.raises(ls.StateError) as raised:
        ls.snapshots.restore(made, saved)
    for text in ("accumulate is 2 here and 1", "batch_size is 10 here and 8", "num_shards is 2 here and 4"):
        assert text in str(raised.value)
    assert "accept=('num_shards', 'accumulate', 'batch_size')" in str(raised.value)


@pytest.mark.parametrize(
    "field",
    [
        "num_shards",
        "seed",
        "accumulate",
        "batch_size",
        "data_seed",
        "last_batch",
        "num_samples",
        "loss_scale.interval",
        "optimizer.momentum",
        "scheduler.T_max",
    ],
)
def test_an_accepted_field_keeps_the_value_of_the_run(field: str, saved: Path) -> None:
    made = changed(field)
    found = ls.snapshots.restore(made, saved, accept=(field,))
    assert found.accepted == (field,)
    assert made.iteration == 3
    assert ls.digest(made.get_all_models()["main"]) == ls.digest(ls.snapshots.load(saved).model())
    values = {
        "optimizer.momentum": made.get_optimizer("main").param_groups[0]["momentum"],
        "scheduler.T_max": made.state_dict()["schedulers"]["main"]["T_max"],
        "loss_scale.interval": made.state_dict()["loss_scale"]["interval"],
        "data_seed": made.state_dict()["iterators"]["main"]["seed"],
        "seed": made.state_dict()["seed"],
    }
    if field in values:
        assert values[field] == CHANGES[field][2]
    made.update()
    made.finalize()


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler]] = {
    "cosine": torch.optim.lr_scheduler.CosineAnnealingLR,
    "polynomial": torch.optim.lr_scheduler.PolynomialLR,
    "steps": lambda each, total: torch.optim.lr_scheduler.StepLR(each, total // 2),
    "sequence": lambda each, total: torch.optim.lr_scheduler.SequentialLR(
        each,
        [
            torch.optim.lr_scheduler.LinearLR(each, 0.1, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(each, total - 2),
        ],
        [2],
    ),
}


@pytest.mark.parametrize("lr", [0.1, 0.5])
@pytest.mark.parametrize("kind", SCHEDULES)
def test_an_accepted_schedule_goes_on_as_that_of_the_script(kind: str, lr: float, tmp_path: Path) -> None:
    def trained(
        lr: float, total: int, updates: int, source: Path | None = None
    ) -> tuple[ls.ParallelUpdater, list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        made = ls.ParallelUpdater(
            [torch.ones(4, 3)] * 8,
            optimizer,
            model,
            devices=["cpu"],
            loss_fn=lambda model, x: model(x).square().mean(),
            scheduler=SCHEDULES[kind](optimizer, total),
        )
        if source is not None:
            with pytest.raises(ls.StateError, match="by accept=") as raised:
                ls.snapshots.restore(made, source)
            accept = re.findall(r"'([\w.]+)'", str(raised.value).partition("accept=")[2])
            ls.snapshots.restore(made, source, accept=accept)
        rates = [optimizer.param_groups[0]["lr"]]
        for _ in range(updates):
            made.update()
            rates.append(optimizer.param_groups[0]["lr"])
        made.finalize()
        return made, rates

    before, _ = trained(0.1, 4, 4)
    ls.snapshots.save(before, tmp_path / "saved")
    _, rates = trained(lr, 8, 4, tmp_path / "saved")
    _, whole = trained(lr, 8, 8)
    assert rates == whole[4:]


def test_unknown_fields_are_refused(saved: Path) -> None:
    made = updater()
    with pytest.raises(
        ValueError, match=r"`accept` must be a collection of fields of the recipe, got .*batchsize.* batch_size"
    ):
        ls.snapshots.restore(made, saved, accept=("batchsize",))


def test_of_several_schedulers_only_the_options_that_differ_are_listed(tmp_path: Path) -> None:
    def made(lr: float, updates: int) -> ls.ParallelUpdater:
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        parts = [lr_scheduler.LinearLR(optimizer, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, updates)]
        batches = ls.BatchIterator(TensorDataset(torch.zeros(4, 2), torch.zeros(4, 1)), 2)
        loss_fn = ls.supervised(torch.nn.functional.mse_loss)
        scheduler = lr_scheduler.SequentialLR(optimizer, parts, [2])
        options: dict[str, Any] = {"devices": 1, "num_shards": 1, "scheduler": scheduler, "loss_fn": loss_fn}
        return ls.ParallelUpdater(batches, optimizer, model, **options)

    ls.snapshots.save(made(0.1, 20), tmp_path / "saved")
    with pytest.raises(ls.StateError) as raised:
        ls.snapshots.restore(made(0.1, 40), tmp_path / "saved")
    assert "differ. scheduler._schedulers.1.T_max is 40 here and 20 in the snapshot. Restore" in str(raised.value)
    assert "accept=('scheduler._schedulers',)" in str(raised.value)
    with pytest.raises(ls.StateError) as raised:
        ls.snapshots.restore(made(0.5, 40), tmp_path / "saved")
    assert "scheduler._schedulers.0.base_lrs is [0.5] here and [0.1] in the snapshot" in str(raised.value)
    assert "_last_lr" not in str(raised.value)
    assert len(str(raised.value)) < 600


def test_a_run_without_snapshots_is_refused_by_the_name_of_the_argument(tmp_path: Path) -> None:
    (tmp_path / "run/snapshots").mkdir(parents=True)
    (tmp_path / "file").touch()
    for path in (tmp_path / "run", tmp_path, tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(ls.SnapshotError, match="`path` must name a snapshot or a run that has one, got"):
            ls.snapshots.restore(updater(), path)
        with pytest.raises(ls.SnapshotError, match="`source` must be the folder of a run with snapshots, or of a"):
            ls.snapshots.export_torch(path, tmp_path / "checkpoint.pt")


def test_other_code_is_a_warning(saved: Path) -> None:
    made = updater(loss_fn=other_loss)
    with pytest.warns(ls.DeterminismWarning, match="code.loss_fn is 'other_loss' here and 'loss' in the snapshot"):
        ls.snapshots.restore(made, saved)
    assert made.iteration == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"activation": nn.GELU()}, "code.model.1 is \"GELU(approximate='none')\" here and 'ReLU()' in the snapshot"),
        (
            {"loss_fn": ls.supervised(nn.CrossEntropyLoss(label_smoothing=0.1))},
            "code.loss_fn is \"supervised(CrossEntropyLoss(ignore_index=-100, label_smoothing=0.1, reduction='mean'))",
        ),
        ({"loss_fn": partial(other_loss, scale=2.0)}, "code.loss_fn is 'other_loss(scale=2.0)' here and 'loss' in"),
        ({"loss_fn": ls.supervised(functional.cross_entropy)}, "code.loss_fn is 'supervised(cross_entropy)' here"),
    ],
)
def test_other_options_of_modules_and_functions_are_a_warning(saved: Path, changes: Any, words: str) -> None:
    made = updater(**changes)
    with pytest.warns(ls.DeterminismWarning, match=re.escape(words)):
        ls.snapshots.restore(made, saved)


def test_modules_that_get_their_shape_in_the_first_update_are_no_difference(tmp_path: Path) -> None:
    def lazy() -> ls.ParallelUpdater:
        model = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.1), nn.LazyLinear(3))
        batches = ls.BatchIterator(vectors(50), 8, seed=3)
        supervised = ls.supervised(functional.cross_entropy)
        return ls.ParallelUpdater(batches, sgd()(model.parameters()), model, devices=1, loss_fn=supervised)

    made = lazy()
    made.update()
    ls.snapshots.save(made, tmp_path / "snapshot")
    assert made.recipe_fields()["code.model.2"] == "Linear(in_features=8, out_features=3, bias=True)"
    resumed = lazy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ls.snapshots.restore(resumed, tmp_path / "snapshot")
    # With the momentum of its optimizer, too.
    for each in (made, resumed):
        each.update()
    assert ls.digest(resumed.state_dict()) == ls.digest(made.state_dict())


def test_parameters_in_another_order_are_refused(saved: Path) -> None:
    made = updater(optimizer=lambda each: sgd()(list(each)[::-1]))
    with pytest.raises(ls.StateError, match=r"order_of_parameters is .* in the order of model\.parameters"):
        ls.snapshots.restore(made, saved)
    made.finalize()


def test_an_older_snapshot_without_their_order_is_read(saved: Path) -> None:
    made = updater()
    own = made.recipe_fields()
    earlier = {name: value for name, value in own.items() if name != "optimizer.order_of_parameters"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recipes.check_recipe(saved, earlier, own, ()) == []
    made.finalize()


def test_an_option_that_is_new_is_a_warning(saved: Path) -> None:
    made = updater()
    own = made.recipe_fields()
    earlier = {name: value for name, value in own.items() if name != "optimizer.fused"}
    with pytest.warns(ls.DeterminismWarning, match="optimizer.fused is None here and 'nothing' in the snapshot"):
        assert recipes.check_recipe(saved, earlier, own, ()) == []


def test_other_kernels_suspend_the_guarantee(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    made = updater()
    with pytest.warns(ls.DeterminismWarning, match=r"\$MKL_CBWR is 'COMPATIBLE' here.*guarantee is suspended"):
        found = ls.snapshots.restore(made, saved)
    assert not found.same_kernels
    assert made.iteration == 3
