"""Exports go on in bare PyTorch with our bits, and checkpoints of other programs are matched by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.cli import main as command
from tests.support.resuming import PatientSnapshot, vectors

BEFORE, AFTER, BATCH = 7, 10, 8


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9, nesterov=True),
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=0.01),
}


def built(kind: str, scale: Any = None, num_shards: int = 1) -> ls.ParallelUpdater:
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    return ls.ParallelUpdater(
        ls.BatchIterator(vectors(48), BATCH, shuffle=False),
        optimizer,
        model,
        devices=["cpu"],
        num_shards=num_shards,
        loss_fn=ls.supervised(functional.cross_entropy),
        scheduler=schedule,
        loss_scale=scale,
    )


def batch_of(update: int) -> tuple[torch.Tensor, ...]:
    start = update * BATCH % 48
    samples: tuple[torch.Tensor, ...] = vectors(48)[start : start + BATCH]
    return samples


def run(updater: ls.ParallelUpdater, out: Path, until: int) -> None:
    trainer = ls.Trainer(updater, (until, "update"), out=out)
    trainer.extend(ls.extensions.Snapshot(), trigger=(BEFORE, "update"))
    trainer.run(resume="auto")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute with one intra-op thread, as updates do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ten_more_updates_in_bare_torch(tmp_path: Path, kind: str) -> None:
    run(built(kind), tmp_path / "run", BEFORE)
    assert command(["export", str(tmp_path / "run"), "--to", "torch", str(tmp_path / "out.pt")]) == 0
    ours = built(kind)
    run(ours, tmp_path / "run", BEFORE + AFTER)

    checkpoint = torch.load(tmp_path / "out.pt", weights_only=True)
    model = network()
    model.load_state_dict(checkpoint["model"])
    optimizer = OPTIMIZERS[kind](model.parameters())
    optimizer.load_state_dict(checkpoint["optimizer"])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    schedule.load_state_dict(checkpoint["scheduler"])
    assert checkpoint["iteration"] == BEFORE
    for update in range(BEFORE, BEFORE + AFTER):
        inputs, target = batch_of(update)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        schedule.step()
    assert ls.digest(model) == ls.digest(ours.get_all_models()["main"])


def test_a_scale_is_that_of_a_grad_scaler(tmp_path: Path) -> None:
    run(built("sgd", ls.DynamicLossScale(1024.0)), tmp_path, BEFORE)
    checkpoint = ls.snapshots.export_torch(tmp_path, tmp_path / "out.pt")
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(checkpoint["scaler"])
    assert scaler.get_scale() == 1024.0
    with pytest.raises(FileExistsError, match=r"must not exist, got .*Choose another path, or remove it\."):
        ls.snapshots.export_torch(tmp_path, tmp_path / "out.pt")


@pytest.mark.parametrize(("name", "options"), [("none", []), ("empty", []), ("empty", ["--best"])])
def test_what_is_no_run_is_refused(
    name: str, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert command(["export", str(tmp_path / name), *options, "--to", "torch", str(tmp_path / "x.pt")]) == 1
    wanted = "`out` must be a run that has a best snapshot, got" if options else "`source` must be the folder of a run"
    assert capsys.readouterr().err.startswith(f"lockstep export: {wanted}")


def test_the_best_snapshot_is_found_and_exported(tmp_path: Path) -> None:
    trainer = ls.Trainer(built("sgd"), (4, "update"), out=tmp_path)
    scores = [1.0, 3.0, 2.0, 0.0]
    trainer.extend(
        lambda trainer: trainer.observe("score", scores[trainer.updater.iteration - 1]),
        trigger=(1, "update"),
        priority=500,
    )
    trainer.extend(PatientSnapshot(keep=4, best="score", mode="max"), trigger=(1, "update"))
    trainer.run()
    found = ls.snapshots.best(tmp_path)
    assert [each.update for each in ls.snapshots.list(tmp_path)] == [1, 2, 3, 4]
    assert found.update == 2
    assert repr(found.manifest) == "Manifest(update=2, epoch=0, reasons=('interval', 'best: score = 3'))"
    assert command(["export", str(tmp_path), "--best", "--to", "torch", str(tmp_path / "best.pt")]) == 0
    assert torch.load(tmp_path / "best.pt", weights_only=True)["iteration"] == 2


def test_an_unknown_model_is_an_error_with_the_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(built("sgd"), tmp_path / "run", BEFORE)
    line = ["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf"), "--model", "gen"]
    assert command(line) == 1
    assert capsys.readouterr().err == "lockstep export: `model` must be one of ['main'], got 'gen'.\n"


def plain(kind: str = "sgd", updates: int = BEFORE) -> tuple[nn.Module, Any, Any]:
    """Train in bare PyTorch."""
    model = network()
    optimizer = OPTIMIZERS[kind](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5)
    for update in range(updates):
        inputs, target = batch_of(update)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        schedule.step()
    return model, optimizer, schedule


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("layout", ["torch", "lightning", "accelerate"])
def test_imports_go_on_with_the_bits_of_bare_torch(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, schedule = plain()
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0).state_dict()
    updater = built("sgd", ls.DynamicLossScale(1024.0))
    state = model.state_dict()
    if layout == "torch":
        wrapped = {f"module._orig_mod.{name}": each for name, each in state.items()}
        found = ls.snapshots.import_torch(
            updater,
            {"model_state_dict": wrapped, "optimizer": optimizer.state_dict(), "scheduler": schedule.state_dict()}
            | {"scaler": scaler},
        )
    elif layout == "lightning":
        checkpoint = {
            "epoch": 1,
            "state_dict": {f"model.{name}": each for name, each in state.items()},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [schedule.state_dict()],
            "MixedPrecision": scaler,
        }
        found = ls.snapshots.import_lightning(updater, checkpoint)
    else:
        found = ls.snapshots.import_accelerate(
            updater,
            model=state,
            optimizer=optimizer.state_dict(),
            scheduler=schedule.state_dict(),
            scaler=scaler,
        )
    assert found.complete, str(found)
    assert len(found.loaded) == len(state) + 3
    assert str(found) in capsys.readouterr().out
    assert updater.loss_scale.factor == 512.0  # type: ignore[attr-defined]
    # The data starts anew, and 7 updates are one more than an epoch.
    continued, _, _ = plain(updates=0)
    assert ls.digest(updater.get_all_models()["main"]) == ls.digest(model) != ls.digest(continued)
    for update in range(3):
        updater.update()
        inputs, target = batch_of(update)
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        schedule.step()
    assert ls.digest(updater.get_all_models()["main"]) == ls.digest(model)


def test_master_weights_start_from_the_weights() -> None:
    model = network().half()
    last, first = [*model[3].parameters()], [*model[0].parameters(), *model[1].parameters()]  # type: ignore[index]
    # In another order than in the model.
    optimizer = torch.optim.SGD([{"params": last}, {"params": first}], lr=0.05, momentum=0.9)
    batches = ls.BatchIterator(vectors(48), BATCH, shuffle=False)
    updater = ls.ParallelUpdater(
        batches, optimizer, model, devices=["cpu"], num_shards=1, loss_fn=half_loss, precision="fp16-true"
    )
    weights = {name: each + 1 if each.is_floating_point() else each for name, each in model.state_dict().items()}
    checkpoint = {"model": weights, "optimizer": optimizer.state_dict()}
    assert ls.snapshots.import_torch(updater, checkpoint).complete
    holder: Any = updater.state_dict()["optimizers"]
    names = ["3.weight", "3.bias", "0.weight", "0.bias", "1.weight", "1.bias"]
    assert [torch.equal(holder["main"]["masters"][at], weights[name].float()) for at, name in enumerate(names)] == [
        True
    ] * len(names)


def half_loss(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(inputs.half()).float(), target)


def test_what_does_not_match_is_an_error_that_changes_nothing() -> None:
    updater = built("sgd")
    before = ls.digest(updater.state_dict())
    state = dict(network().state_dict())
    state["0.weight"] = torch.zeros(3, 3)
    state["head.weight"] = state.pop("3.weight")
    with pytest.raises(ls.StateError, match=r"shape \[3, 3\] instead of \[8, 6\]") as caught:
        ls.snapshots.import_torch(updater, {"model": state})
    assert "head.weight" in str(caught.value)
    assert ls.digest(updater.state_dict()) == before
    found = ls.snapshots.import_torch(updater, {"model": state}, partial=True)
    assert found.missing == ["3.weight", "optimizer", "scheduler"]
    assert found.unknown == ["head.weight"]
    assert set(found.unfit) == {"0.weight"}


def test_what_no_checkpoint_of_lightning_is_lacks_the_model() -> None:
    with pytest.raises(ls.StateError, match=r"missing \(3\) +model\n"):
        ls.snapshots.import_lightning(built("sgd"), plain()[0].state_dict())


def test_names_of_lightning_without_the_prefix_are_unknown() -> None:
    model, optimizer, schedule = plain()
    state = model.state_dict()
    first, *others = state
    # Of the same name as a tensor of the model, and before or after it.
    saved = {first: torch.zeros_like(state[first]), **{f"model.{name}": each for name, each in state.items()}}
    saved |= {name: torch.zeros_like(state[name]) for name in others}
    checkpoint = {
        "state_dict": saved,
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [schedule.state_dict()],
    }
    with pytest.raises(ls.StateError, match=rf"unknown \({len(state)}\) +{first}"):
        ls.snapshots.import_lightning(built("sgd"), checkpoint)
    updater = built("sgd")
    found = ls.snapshots.import_lightning(updater, checkpoint, partial=True)
    assert found.unknown == list(state)
    assert ls.digest(updater.get_all_models()["main"]) == ls.digest(model)


def test_a_model_of_transformers_is_read_by_from_pretrained(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(1)
    model = transformers.GPT2LMHeadModel(config)
    # The head is tied to the embedding, and stored once.
    assert model.lm_head.weight is model.transformer.wte.weight
    tokens = [{"input_ids": torch.arange(32).reshape(4, 8) % 32, "labels": torch.arange(32).reshape(4, 8) % 32}]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    updater = ls.ParallelUpdater(tokens, optimizer, model, devices=["cpu"], num_shards=2, loss_fn=output_loss)
    trainer = ls.Trainer(updater, (2, "update"), out=tmp_path / "run")
    trainer.extend(ls.extensions.Snapshot())
    trainer.run()
    config.save_pretrained(tmp_path / "config")
    line = ["export", str(tmp_path / "run"), "--to", "hf", str(tmp_path / "hf"), "--config", str(tmp_path / "config")]
    assert command(line) == 0
    read = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    assert ls.digest(read) == ls.digest(model)
    ls.snapshots.export_hf(tmp_path / "run", tmp_path / "again", config=model)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert ls.digest(again) == ls.digest(model)


def output_loss(model: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def test_escapes_in_names_are_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = {**plain()[0].state_dict(), "\x1b[2Jweight": torch.ones(1)}
    with pytest.raises(ls.StateError) as raised:
        ls.snapshots.import_torch(built("sgd"), checkpoint)
    told = capsys.readouterr().out
    assert "\\x1b[2Jweight" in told
    assert all(line.isprintable() for line in [*told.split("\n"), *str(raised.value).split("\n")])


def test_an_export_without_the_configuration_says_what_else_is_needed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ls.snapshots.save(built("sgd"), tmp_path / "saved")
    export = ["export", str(tmp_path / "saved"), "--to", "hf"]
    assert command([*export, str(tmp_path / "hf")]) == 0
    errors = capsys.readouterr().err
    assert errors == "lockstep export: from_pretrained also needs config.json, which --config FILE adds.\n"
    (tmp_path / "config.json").write_text("{}")
    assert command([*export, str(tmp_path / "hf2"), "--config", str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().err == ""
