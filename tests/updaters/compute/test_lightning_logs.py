"""What a LightningModule logs in its training step is observed, without a Lightning Trainer."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep as ls

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of the packages that Lightning imports
    lightning: Any = pytest.importorskip("lightning.pytorch", reason="the module is Lightning's")


class Head(lightning.LightningModule):  # type: ignore[misc]  # typed as Any, because it may not be installed
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(inputs)
        self.log("size", outputs.detach().abs().mean())
        return outputs


class Classifier(lightning.LightningModule):  # type: ignore[misc]  # as above
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.3))
        self.head = Head()
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        scores = self.head(self.body(inputs))
        loss = cross_entropy(scores, targets)
        accuracy = (scores.argmax(1) == targets).float().mean()
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"accuracy": accuracy, "index": float(batch_idx)}, batch_size=len(inputs))
        if self.options:
            self.log("more", **self.options)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def samples() -> list[tuple[torch.Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(4, generator=generator), index % 3) for index in range(24)]


def updater_of(model: Classifier, devices: int = 1) -> ls.ParallelUpdater:
    return ls.ParallelUpdater(
        ls.BatchIterator(samples(), 10, seed=0),
        model.configure_optimizers(),
        model,
        devices=["cpu"] * devices,
        num_shards=4,
        loss_fn=lambda replica, *batch: replica.training_step(batch, 0),
    )


def seeded(**options: Any) -> Classifier:
    torch.manual_seed(0)
    return Classifier(**options)


def test_logged_values_are_in_the_log(tmp_path: Path) -> None:
    def log_on(devices: int) -> list[dict[str, float]]:
        model = seeded()
        trainer = ls.Trainer(updater_of(model, devices), (2, "epoch"), tmp_path, extensions=[ls.extensions.LogReport()])
        trainer.run()
        assert "log" not in vars(model)  # only replicas were changed
        lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
        return [{key: value for key, value in json.loads(line).items() if key != "elapsed_time"} for line in lines]

    log = log_on(1)
    assert log_on(3) == log
    for entry in log:
        assert entry["main/train_loss"] == pytest.approx(entry["main/loss"], rel=1e-6)  # summed in another order
        assert 0 < entry["main/accuracy"] < 1
        assert entry["main/index"] == 0
        assert entry["main/head/size"] > 0


def test_it_changes_no_bit_of_the_training() -> None:
    class Silent(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002 - Lightning's signature
            inputs, targets = batch
            return cross_entropy(self.head.layer(self.body(inputs)), targets)

    torch.manual_seed(0)
    models = [seeded(), seeded()]
    models[1].__class__ = Silent
    for model in models:
        updater = updater_of(model, 2)
        updater.update()
        updater.update()
    assert ls.digest(models[0]) == ls.digest(models[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value": 1.0, "reduce_fx": "max"}, r"`reduce_fx` of log\('more'\) must be 'mean', got 'max'"),
        ({"value": 1.0, "reduce_fx": torch.sum}, r"`reduce_fx` of log\('more'\) must be 'mean', got 'sum'"),
        ({"value": nn.Identity()}, r"`value` of log\('more'\) must be a number or a tensor, got a Identity"),
    ],
)
def test_what_cannot_be_averaged_over_samples_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ls.ReplicaError, match=message):
        updater_of(seeded(**options)).update()


def test_a_mean_by_function_and_values_by_name() -> None:
    options = {"value": {"one": torch.tensor(1.0), "two": 2}, "reduce_fx": torch.mean}
    metrics = updater_of(seeded(**options)).update().metrics
    assert (float(metrics["more/one"]), float(metrics["more/two"])) == (1.0, 2.0)


class Counting(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * min(1, self.global_step / 4)


class Clipping(Classifier):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1)


@pytest.mark.parametrize(
    ("kind", "warning"),
    [
        (Classifier, ""),
        (Counting, "Counting reads global_step, which stay 0"),
        (Clipping, "Clipping overrides configure_gradient_clipping, which nothing calls"),
    ],
)
def test_what_needs_a_trainer_of_lightning_is_warned_of(kind: type[Classifier], warning: str) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        updater_of(kind(), devices=2).update()
    found = [str(each.message) for each in said if "no Lightning Trainer runs" in str(each.message)]
    assert len(found) == bool(warning)
    assert all(text.startswith(warning) for text in found)
