"""Snapshots of a trainer: the end of a run, damaged ones, repeated updates, the best one, and whose folder it is."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from tests.support.resuming import Noted, PatientSnapshot, digests, log_lines, vectors


def trainer(out: Path, updates: int = 8, *, every: int = 2, loss_fn: Any = None, **options: Any) -> ls.Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = ls.BatchIterator(vectors(), 8, shuffle=True, seed=3)
    loss = loss_fn or ls.supervised(functional.cross_entropy)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=1, num_shards=4, loss_fn=loss)
    made = ls.Trainer(updater, (updates, "iteration"), out=out)
    made.extend(ls.extensions.LogReport(trigger=(3, "iteration")))
    made.extend(PatientSnapshot(**{"keep": 100, **options}), trigger=(every, "iteration"))
    return made


def weights(made: ls.Trainer) -> str:
    return ls.digest(made.updater.get_all_models()["main"])


def snapshots(out: Path) -> list[int]:
    return [each.update for each in ls.snapshots.list(out)]


def contents(out: Path) -> dict[str, tuple[int, bytes]]:
    """Return each file with the time at which it was changed."""
    files = [path for path in out.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_end_is_a_snapshot_whether_the_trigger_fires_or_not(tmp_path: Path) -> None:
    trainer(tmp_path, 7).run()
    assert snapshots(tmp_path) == [2, 4, 6, 7]
    assert ls.snapshots.load(tmp_path / "snapshots/00000007").manifest.reasons == ("end of the run",)
    assert sorted(digests(tmp_path)) == [2, 4, 6, 7]


def test_a_finished_run_that_is_resumed_does_nothing(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.run()
    before = contents(tmp_path)
    again = trainer(tmp_path)
    again.run(resume="auto")
    assert contents(tmp_path) == before
    assert weights(again) == weights(first)
    assert again.updater.iteration == 8


def test_a_finished_run_continues_with_a_later_end(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", 12)
    whole.run()
    trainer(tmp_path / "raised", 7).run()
    raised = trainer(tmp_path / "raised", 12)
    raised.run(resume="auto")
    assert weights(raised) == weights(whole)
    assert log_lines(tmp_path / "raised") == log_lines(tmp_path / "whole")


def test_auto_starts_anew_where_there_is_nothing(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    made.run(resume="auto")
    assert made.resumption is None
    with pytest.raises(
        ls.SnapshotError, match=r'must name a snapshot or a run that has one, got .*nowhere\. Pass "auto"'
    ):
        trainer(tmp_path / "other").run(resume=tmp_path / "nowhere")
    with pytest.raises(
        TypeError, match='`resume` must be "auto", the folder of a snapshot or of a run, or None, got T'
    ):
        trainer(tmp_path / "other").run(resume=True)  # type: ignore[arg-type]


def test_resume_from_another_run_into_another_folder(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.run()
    branch = trainer(tmp_path / "branch")
    branch.run(resume=tmp_path / "whole/snapshots/00000004")
    assert weights(branch) == weights(whole)
    first = ls.snapshots.load(tmp_path / "whole/snapshots/00000004")
    found = ls.snapshots.load(tmp_path / "branch/snapshots/00000008")
    assert found.manifest.parent == (first.manifest.run_id, 4)
    assert found.manifest.run_id != first.manifest.run_id
    assert ls.snapshots.compare_runs(tmp_path / "whole", tmp_path / "branch").common == (6, 8)


def test_an_interrupted_run_continues_in_the_same_process(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole")
    whole.run()
    made = trainer(tmp_path / "stopped")
    made.extend(stop_at(5), name="stop", trigger=(1, "iteration"))
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert snapshots(made.out) == [2, 4]
    made.run(resume="auto")  # what is in memory is newer
    assert weights(made) == weights(whole)
    assert snapshots(made.out) == [2, 4, 6, 8]
    assert digests(made.out) == digests(whole.out)


def stop_at(update: int) -> Any:
    done = []

    def stop(made: ls.Trainer) -> None:
        if made.updater.iteration == update and not done:
            done.append(update)
            raise KeyboardInterrupt

    return stop


def test_a_damaged_snapshot_is_left_out_with_a_warning(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    first.run()
    flip(tmp_path / "snapshots/00000008/model.safetensors")
    again = trainer(tmp_path, 10)
    with pytest.warns(ls.SnapshotWarning, match="00000008 is damaged.*the tensor.*SHA-256"):
        again.run(resume="auto")
    assert again.resumption is not None
    assert again.resumption.update == 6
    # What is loaded is not kept as well.
    assert again.resumption.updater == {}
    assert snapshots(tmp_path) == [2, 4, 6, 8, 10]


def test_no_whole_snapshot_is_an_error_and_stays_one(tmp_path: Path) -> None:
    trainer(tmp_path, 2).run()
    flip(tmp_path / "snapshots/00000002/state.safetensors")
    with pytest.warns(ls.SnapshotWarning, match="damaged"), pytest.raises(ls.SnapshotError, match="is whole"):
        trainer(tmp_path).run(resume="auto")
    with pytest.raises(ls.SnapshotError, match="is whole: damaged-00000002"):
        trainer(tmp_path).run(resume="auto")


# Repeated updates ----------------------------------------------------------------------------------------------------


def run_again(out: Path, disturb: Any = None) -> list[str]:
    """Damage the newest snapshot, resume from the one before, and return the warnings of repeated updates."""
    trainer(out).run()
    flip(out / "snapshots/00000008/model.safetensors")
    made = trainer(out, 10)
    if disturb is not None:
        made.extend(disturb, name="disturb", trigger=(1, "iteration"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.run(resume="auto")
    return [str(each.message) for each in caught if each.category is ls.DeterminismWarning]


def test_equal_repeated_updates_are_silent(tmp_path: Path) -> None:
    assert run_again(tmp_path) == []
    lines = (tmp_path / "digests.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines if "update" in json.loads(line)] == [2, 4, 6, 8, 10]


def flip_a_weight(made: ls.Trainer) -> None:
    if made.updater.iteration == 7:
        weight = made.updater.get_all_models()["main"][3].weight  # type: ignore[index]
        weight.data.view(torch.int32)[0, 0] ^= 1  # type: ignore[union-attr, operator]


def test_a_flipped_bit_is_named_with_update_and_tensor(tmp_path: Path) -> None:
    (message,) = run_again(tmp_path, flip_a_weight)
    assert message.startswith("Update 8 was repeated after a restart with another result: the tensor 'models.main.")


def test_the_log_alone_detects_it(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    for name in ("snapshot.json", "model.safetensors"):
        flip(tmp_path / "snapshots/00000008" / name)
    made = trainer(tmp_path)
    made.extend(flip_a_weight, trigger=(1, "iteration"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.run(resume="auto")
    assert [
        "Update 8 was repeated" in str(each.message) for each in caught if each.category is ls.DeterminismWarning
    ] == [True]


def test_updates_between_snapshots_are_logged_too(tmp_path: Path) -> None:
    trainer(tmp_path, 8, every=4, digest_every=3).run()
    assert sorted(digests(tmp_path)) == [3, 4, 6, 8]


def test_a_log_that_was_cut_is_continued(tmp_path: Path) -> None:
    trainer(tmp_path, 4).run()
    path = tmp_path / "digests.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    trainer(tmp_path, 6).run(resume="auto")
    # The line that was cut is written again, from the snapshot that the run is resumed from.
    assert sorted(digests(tmp_path)) == [2, 4, 6]


def test_accepted_changes_begin_a_new_log(tmp_path: Path) -> None:
    trainer(tmp_path, 4, digest_every=1).run()
    changed = trainer_with_batch_size(tmp_path, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed.run(resume="auto", accept=("batch_size",))
    assert changed.updater.iteration == 6
    lines = map(json.loads, (tmp_path / "digests.jsonl").read_text().splitlines())
    assert [line.get("update", "conditions") for line in lines] == ["conditions", 1, 2, 3, 4, "conditions", 5, 6]
    with pytest.raises(ls.OrderError, match="must not hold later snapshots"):
        trainer_with_batch_size(tmp_path, 9).run(resume=tmp_path / "snapshots/00000004", accept=("batch_size",))


def trainer_with_batch_size(out: Path, batch_size: int) -> ls.Trainer:
    made = trainer(out, 6)
    model = made.updater.get_all_models()["main"]
    batches = ls.BatchIterator(vectors(), batch_size, shuffle=True, seed=3)
    loss = ls.supervised(functional.cross_entropy)
    optimizer = made.updater.get_optimizer("main")
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=1, num_shards=4, loss_fn=loss)
    changed = ls.Trainer(updater, (6, "iteration"), out=out)
    changed.extend(ls.extensions.LogReport(trigger=(3, "iteration")))
    changed.extend(PatientSnapshot(keep=100, digest_every=1), trigger=(2, "iteration"))
    return changed


# Retention and folders -----------------------------------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    values = {2: 0.1, 4: 0.9, 6: 0.3, 8: float("nan"), 10: 0.5, 12: 0.2}
    made = trainer(tmp_path, 12, keep=2, best="score", mode="max")
    made.extend(
        lambda each: each.observe("score", values[each.updater.iteration]),
        name="score",
        trigger=(2, "iteration"),
        priority=300,
    )
    made.run()
    assert snapshots(tmp_path) == [4, 10, 12]
    assert "best: score = 0.9" in ls.snapshots.load(tmp_path / "snapshots/00000004").manifest.reasons


def test_a_best_value_that_is_not_observed_is_told_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="`best` must be observed at a snapshot.*'nothing/of/this'") as told:
        trainer(tmp_path, best="nothing/of/this", mode="min").run()
    assert len(told) == 1


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, 4).run()
    before = contents(tmp_path / "snapshots")
    with pytest.raises(ls.OrderError, match="must not hold snapshots of a run that this one does not continue"):
        trainer(tmp_path, 4).run()
    assert contents(tmp_path / "snapshots") == before


def test_extensions_may_be_added(tmp_path: Path) -> None:
    trainer(tmp_path, 4).run()
    made = trainer(tmp_path, 6)
    made.extend(Noted("added"), trigger=(1, "iteration"))
    with pytest.warns(UserWarning, match="added added"):
        made.run(resume="auto")
    assert made.get_extension("added").calls == [5, 6]  # type: ignore[attr-defined]


def test_loops_without_a_trainer(tmp_path: Path) -> None:
    whole, loop = (trainer(tmp_path / each).updater for each in ("a", "b"))
    for _ in range(3):
        whole.update()
    ls.snapshots.save(whole, tmp_path / "after three")
    with pytest.raises(FileExistsError):
        ls.snapshots.save(whole, tmp_path / "after three")
    found = ls.snapshots.restore(loop, tmp_path / "after three")
    assert (found.update, loop.iteration) == (3, 3)
    for each in (whole, loop):
        for _ in range(3):
            each.update()
    assert ls.digest(whole.state_dict()) == ls.digest(loop.state_dict())
    with pytest.raises(ls.StateError, match="which was saved without one"):
        trainer(tmp_path / "c").run(resume=tmp_path / "after three")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["after three"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep": 0}, "`keep` must be at least 1, got 0"),
        ({"mode": "most"}, "`mode` must be 'auto', 'min' or 'max', got 'most'"),
        ({"digest_every": 0}, "`digest_every` must be at least 1, got 0"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ls.extensions.Snapshot(**options)


@pytest.mark.parametrize(
    ("best", "mode"), [("validation/main/loss", "min"), ("validation/main/accuracy", "max"), (None, "min")]
)
def test_the_mode_is_that_of_early_stopping(best: str | None, mode: str) -> None:
    assert ls.extensions.Snapshot(best=best).mode == ls.triggers.EarlyStopping(best or "main/loss").mode == mode


def test_the_smallest_loss_is_the_best(tmp_path: Path) -> None:
    made = trainer(tmp_path, 6, keep=1, best="val_loss")
    losses = {2: 0.3, 4: 0.1, 6: 0.2}
    made.extend(
        lambda each: each.observe("val_loss", losses[each.updater.iteration]),
        name="val_loss",
        trigger=(2, "iteration"),
        priority=300,
    )
    made.run()
    assert snapshots(tmp_path) == [4, 6]


def test_a_name_that_does_not_say_which_values_are_better_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="smallest 'val/f1' is the best one"):
        ls.extensions.Snapshot(best="val/f1")
    ls.extensions.Snapshot(best="val/f1", mode="max")


@pytest.mark.parametrize(("mode", "better", "worse"), [("max", 2.0, 0.5), ("min", 0.5, 2.0)])
def test_of_equal_values_the_first_snapshot_stays_the_best(mode: Any, better: float, worse: float) -> None:
    retention = ls.snapshots.Retention(best="value", mode=mode)
    found = {value: retention.is_better({"value": value}, {"value": 1.0}) for value in (better, 1.0, worse)}
    assert found == {better: True, 1.0: False, worse: False}
    assert retention.is_better({"value": worse}, None)
    assert not retention.is_better({}, None)
