"""`lockstep snapshots` lists and verifies, and `lockstep compare` finds where two runs differ."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.cli import main
from lockstep.snapshots import SnapshotWriter
from tests.support.resuming import PatientSnapshot, vectors
from tests.support.snapshots import RUN, small_content, write


def run(out: Path, *, updates: int = 6, disturbed: int | None = None, lr: float = 0.1) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    loss = ls.supervised(nn.functional.cross_entropy)
    batches = ls.BatchIterator(vectors(), 8, shuffle=True)
    updater = ls.ParallelUpdater(batches, optimizer, model, devices=1, num_shards=2, loss_fn=loss)
    trainer = ls.Trainer(updater, (updates, "update"), out=out)

    def disturb(_: ls.Trainer) -> None:
        if updater.iteration == disturbed:
            optimizer.state[model[2].bias]["momentum_buffer"].view(torch.int32)[0] ^= 1 << 20  # not rounded away later

    trainer.extend(disturb, trigger=(1, "update"))
    trainer.extend(PatientSnapshot(keep=2, digest_every=1), trigger=(2, "update"))
    trainer.run()


def test_list_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    assert main(["snapshots", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["00000004", "00000006"]
    assert all("interval" in line and "whole" not in line for line in lines)
    assert main(["snapshots", str(tmp_path), "--verify"]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    path = tmp_path / "snapshots/00000006/model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["snapshots", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["snapshots", str(tmp_path), "--verify"]) == 1
    assert "damaged: " in capsys.readouterr().out.splitlines()[1]
    assert path.exists()  # a command that lists renames nothing


def test_values_that_are_not_finite_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, small_content(metrics={"loss": math.inf, "accuracy": 0.5}))
    assert main(["snapshots", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("  loss = inf  accuracy = 0.5\n")


def test_the_value_of_the_best_one_is_listed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SnapshotWriter(tmp_path, run_id=RUN) as writer:
        writer.save(
            small_content(metrics={"loss": 0.25, "accuracy": 0.5}), reasons=["interval", "best: accuracy = 0.5"]
        )
    assert main(["snapshots", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("  interval, best: accuracy = 0.5  loss = 0.25\n")


def test_a_run_without_snapshots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshots", str(tmp_path)]) == 1
    assert "There are no snapshots" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert capsys.readouterr().err == "The runs have logged no update in common.\n"
    assert main(["compare", str(tmp_path), str(tmp_path / "typo")]) == 2
    assert capsys.readouterr().err.endswith(f"no update in common. There is no folder {tmp_path / 'typo'}.\n")


def test_a_file_instead_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.touch()
    assert main(["snapshots", str(file)]) == 1
    assert capsys.readouterr().err == f"There are no snapshots in {file}.\n"
    assert main(["compare", str(tmp_path), str(file)]) == 2
    assert capsys.readouterr().err.endswith(f"no update in common. There is no folder {file}.\n")


def test_equal_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", updates=5)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out == "Equal: all 5 updates that both runs have logged, 1 to 5.\n"


@pytest.mark.parametrize("logged", [True, False])
def test_the_first_difference_is_found_without_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, logged: bool
) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", disturbed=3)
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    if not logged:
        (tmp_path / "a/digests.jsonl").unlink()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"Different: update {3 if logged else 4} is the first to differ, of {6 if logged else 2} ")
    if logged:
        assert "Update 2 is equal." in first
        assert second == "Tensors: state.optimizers.main.state.3.momentum_buffer."


def test_other_recipes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", lr=0.2)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert "The recipes differ in: optimizer.lr." in capsys.readouterr().out


def test_a_field_that_only_one_recipe_has_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "a", small_content(recipe={"batches_of": None, "seed": 1}))
    write(tmp_path / "b", small_content(recipe={"seed": 1}))
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "The recipes differ in: batches_of." in capsys.readouterr().out
