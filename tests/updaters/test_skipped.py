"""Updates that are skipped are seen: a warning, the log, an error after many, an extension that ends the run."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.extensions import FailOnNonFinite, LogReport
from lockstep.updaters.step import engine, retry
from tests.support.gan import gan
from tests.support.ranks import launch_on_ranks
from tests.support.reads import Reads
from tests.support.runs import finalized

EPOCH = 4
"""Updates of an epoch; the second batch has a NaN."""
KINDS = ["host", "device"]


def model_of(*, bad_weights: bool = False) -> nn.Linear:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.copy_(torch.arange(6.0).reshape(2, 3) / 10)
        model.bias.fill_(math.nan if bad_weights else 0.1)
    return model


def updater_of(kind: str, *, bad_weights: bool = False, bad: bool = True, **options: Any) -> ls.ParallelUpdater:
    """Make an updater that skips a batch of each epoch, by a check on the host or on the device."""
    model = model_of(bad_weights=bad_weights)
    x = torch.linspace(-1.0, 1.0, 48 * EPOCH // 4).reshape(-1, 3)
    if bad:
        x[5, 1] = math.nan
    fused = kind == "device"
    updater = ls.ParallelUpdater(
        ls.BatchIterator(TensorDataset(x, torch.arange(len(x)) % 2), len(x) // EPOCH),
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused),
        model,
        num_shards=2,
        **{
            "devices": ["cpu"],
            "loss_fn": ls.supervised(nn.functional.cross_entropy),
            "on_overflow": "skip" if fused else "retry",
            **options,
        },
    )
    assert (updater.why_it_waits is None) == fused
    return updater


def train(updater: ls.ParallelUpdater, epochs: int, out: Path, *extensions: Any) -> LogReport:
    log = LogReport()
    try:
        ls.Trainer(updater, (epochs, "epoch"), out, [log, *extensions]).run()
    finally:
        updater.finalize()
    return log


@pytest.mark.parametrize("kind", KINDS)
def test_a_skipped_update_is_named_once_and_counted_and_its_loss_is_left_out(kind: str, tmp_path: Path) -> None:
    updater = updater_of(kind)
    with pytest.warns(ls.NonFiniteWarning) as caught:
        log = train(updater, 3, tmp_path).log
    (message,) = [str(each.message) for each in caught]
    assert message.startswith(
        "Update 2 was skipped: the gradient of 'weight' is not finite, with a loss of nan. The we"
    )
    assert "find_nonfinite" in message
    assert [entry["main/skipped"] for entry in log] == [1.0, 1.0, 1.0]
    assert all(math.isfinite(entry["main/loss"]) for entry in log)
    assert updater.last_skipped() == retry.SkippedUpdate(2 + 2 * EPOCH, "weight", pytest.approx(math.nan, nan_ok=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_that_of_the_applied_updates(kind: str, tmp_path: Path) -> None:
    updater, losses = updater_of(kind), []
    with finalized(updater):
        for _ in range(EPOCH):
            result = updater.update()
            if result.applied:
                losses.append(float(result.loss))
    assert train(updater_of(kind), 1, tmp_path).log[0]["main/loss"] == pytest.approx(sum(losses) / 3, rel=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_skipped_updates_is_an_error_that_names_weights_that_are_not_finite(kind: str, tmp_path: Path) -> None:
    updater = updater_of(kind, bad_weights=True, max_skipped=6)
    message = (
        r"updates in a row \(`max_skipped`\) had to be skipped: the gradient of 'weight' is not finite, with a loss"
    )
    with pytest.raises(ls.NonFiniteError, match=message) as caught:
        train(updater, 9, tmp_path)
    assert "The weights themselves are not finite (the first is 'bias')" in str(caught.value)
    # On a device they are counted when the log reads them.
    assert updater.iteration == (5 if kind == "host" else 2 * EPOCH)
    assert updater.applied_updates == 0


@pytest.mark.parametrize("kind", KINDS)
def test_applied_updates_in_between_begin_a_new_run_and_none_allows_any_number(kind: str, tmp_path: Path) -> None:
    train(updater_of(kind, max_skipped=2), 3, tmp_path / "some")
    log = train(updater_of(kind, bad_weights=True, max_skipped=None), 3, tmp_path / "all").log
    assert [entry["main/skipped"] for entry in log] == [EPOCH] * 3
    assert [str(entry["main/loss"]) for entry in log] == ["nan"] * 3


def test_the_error_comes_before_the_update_and_its_batch_can_be_searched() -> None:
    with finalized(updater_of("host", max_skipped=1)) as updater:
        updater.update()
        with pytest.raises(ls.NonFiniteError):
            updater.update()
        assert updater.iteration == 1
        assert [(each.shard, each.parameter) for each in updater.find_nonfinite()] == [(0, "weight")]


def test_loops_of_ones_own_are_told_too() -> None:
    with finalized(updater_of("host", max_skipped=3, bad_weights=True)) as updater:
        batch = updater.get_iterator().peek()
        updater.compute_gradients(batch)
        with pytest.warns(ls.NonFiniteWarning):
            updater.apply_gradients()
        updater.compute_gradients(batch)
        updater.apply_gradients()
        updater.compute_gradients(batch)
        with pytest.raises(ls.NonFiniteError):
            updater.apply_gradients()


def test_each_network_of_a_step_function_counts_its_own() -> None:
    with finalized(gan(num_shards=2)) as updater:
        with torch.no_grad():
            next(updater.get_all_models()["gen"].parameters()).fill_(math.nan)
        with pytest.warns(ls.NonFiniteWarning):
            observed = updater.update().observation()
        assert {name: float(mean) for name, mean in observed.items() if name.endswith("skipped")} == {
            "dis/skipped": 1.0,
            "gen/skipped": 1.0,
        }


def test_a_finite_loss_is_explained_by_an_overflow() -> None:
    updater = updater_of("host", bad=False, loss_fn=lambda model, x, _: model(x).double().mean() * 1e39)
    with finalized(updater), pytest.warns(ls.NonFiniteWarning, match="The loss is finite, so the gradient overflowed"):
        assert not updater.update().applied


def test_nothing_is_read_outside_of_the_interval() -> None:
    with finalized(updater_of("device")) as updater:
        updater.update()
        with Reads() as reads, warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                skipped = updater.update().observation()["skipped"]
                assert isinstance(skipped.total, torch.Tensor)
        # On a CPU the loss itself is a number of the host, read once for each of the two shards, and so is the smallest
        # label, because ignored ones do not count.
        assert reads.count == 5 * 2 * 2
        with pytest.warns(ls.NonFiniteWarning, match="Update 2 was"):
            assert updater.last_skipped() is not None


def test_old_checks_are_merged_without_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "HELD", 3)
    monkeypatch.setattr(engine, "AUDITED_AGAIN", 100)
    with finalized(updater_of("device", max_skipped=3)) as updater:
        updater.update()
        with Reads() as reads:
            for _ in range(10):
                updater.update()
        # Only the smallest label of each of the two shards, which costs nothing on a CPU.
        assert reads.count == 10 * 2
        with pytest.warns(ls.NonFiniteWarning, match="An update before"):
            found = updater.last_skipped()
        assert found is not None
        assert found.update == 2 + 2 * EPOCH


@pytest.mark.parametrize(("kind", "update"), [("host", 2), ("device", 2)])
def test_an_extension_ends_the_run_at_the_first(kind: str, update: int, tmp_path: Path) -> None:
    model = updater_of(kind)
    with pytest.raises(ls.NonFiniteError, match=f"ends the run after update {update}"):
        train(model, 3, tmp_path, FailOnNonFinite())
    assert all(parameter.isfinite().all() for parameter in model.get_all_models()["main"].parameters())


def test_an_extension_finds_a_loss_whose_gradient_is_finite(tmp_path: Path) -> None:
    updater = updater_of("host", bad=False, loss_fn=lambda model, x, _: model(x).mean() + math.inf)
    named = pytest.warns(ls.NonFiniteWarning, match="The loss of shard 0 is inf, but the gradient is finite")
    with named, pytest.raises(ls.NonFiniteError, match="`main/loss` is not finite"):
        train(updater, 1, tmp_path, FailOnNonFinite())


def test_an_extension_reads_devices_at_its_trigger_only(tmp_path: Path) -> None:
    check = FailOnNonFinite((1, "epoch"))

    def onto_the_device(trainer: ls.Trainer) -> None:
        trainer.observation["main/loss"] = torch.tensor(math.nan if trainer.updater.iteration == 2 else 1.0)

    updater = updater_of("host", bad=False)
    trainer = ls.Trainer(updater, (2, "epoch"), tmp_path, [check])
    trainer.extend(onto_the_device, trigger=(1, "iteration"), priority=1000)
    with pytest.raises(ls.NonFiniteError, match="after update 2: `main/loss`"):
        trainer.run()
    assert updater.iteration == EPOCH


def test_an_extension_reads_devices_at_the_end_of_a_run_too(tmp_path: Path) -> None:
    def onto_the_device(trainer: ls.Trainer) -> None:
        trainer.observation["main/loss"] = torch.tensor(math.nan)

    updater = updater_of("host", bad=False)
    trainer = ls.Trainer(updater, (2, "iteration"), tmp_path, [FailOnNonFinite((1, "epoch"))])
    trainer.extend(onto_the_device, trigger=(1, "iteration"), priority=1000)
    with pytest.raises(ls.NonFiniteError, match="after update 1: `main/loss`"):
        trainer.run()


def skipped_on_a_rank(out: str) -> tuple[list[dict[str, float]], str, int]:
    updater = updater_of("host")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        log = train(updater, 2, Path(out)).log
    told = [str(each.message) for each in caught if each.category is ls.NonFiniteWarning]
    entries = [{key: entry[key] for key in ("main/loss", "main/skipped")} for entry in log]
    return entries, told[0], len(told)


def test_ranks_see_the_same(tmp_path: Path) -> None:
    alone = skipped_on_a_rank(str(tmp_path / "alone"))
    assert alone[2] == 1
    assert launch_on_ranks(skipped_on_a_rank, 2, str(tmp_path / "ranks")) == [alone] * 2


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_loss_that_is_not_finite_although_its_gradient_is_is_named_once(num_devices: int) -> None:
    def loss_fn(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # Positions of the whole batch, of which a shard of 6 samples has none.
        return nn.functional.cross_entropy(net(x)[:6], y[:6]) + net(x)[6:].square().mean()

    updater = updater_of("host", bad=False, loss_fn=loss_fn, devices=["cpu"] * num_devices)
    with finalized(updater), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = [updater.update() for _ in range(3)]
    assert all(each.applied and math.isnan(each.loss) for each in results)
    (found,) = [str(each.message) for each in said if each.category is ls.NonFiniteWarning]
    assert found.startswith("The loss of shard 0 is nan, but the gradient is finite")
