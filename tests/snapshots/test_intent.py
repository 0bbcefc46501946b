"""Manifests that were made with intent: whatever is done with them ends in a named error or in a right load."""

from __future__ import annotations

import json
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.cli import main
from lockstep.snapshots import export_torch, list as list_snapshots, load, newest_whole, restore
from tests.snapshots.test_hostile import NAMES, VALUES, mutate, sealed
from tests.support.resuming import vectors

PARTS = ("state", "state", "state", "surroundings", "surroundings", "progress", "recipe", "metrics", "models", "files")


def trainer(out: Path, updates: int = 3) -> ls.Trainer:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    updater = ls.ParallelUpdater(
        ls.BatchIterator(vectors(), 8, shuffle=True),
        optimizer,
        model,
        devices=1,
        num_shards=2,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
        scheduler=schedule,
        loss_scale=ls.DynamicLossScale(8.0, interval=2),
    )
    made = ls.Trainer(updater, (updates, "update"), out=out)
    made.extend(ls.extensions.LogReport(trigger=(1, "update")))
    made.extend(ls.extensions.Snapshot(best="main/loss", mode="min"), trigger=(3, "update"))
    return made


def made_with_intent(raw: bytes, draw: random.Random) -> bytes:
    """Change parts of a manifest, and seal it again."""
    document = json.loads(raw)
    for _ in range(draw.randint(1, 2)):
        part = draw.choice(PARTS)
        document[part] = mutate(document[part], draw)
    if draw.random() < 0.2:
        document[draw.choice(["writer", "run_id", "parent", "reasons", "format"])] = draw.choice(VALUES)(draw)
    if draw.random() < 0.1:
        document["reasons"] = [draw.choice(NAMES)]
    return sealed(document)


class Uses:
    """What a run and the commands do with a snapshot."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder.parent.parent
        self.made = trainer(self.out / "other")
        self.calls: dict[str, Callable[[], object]] = {
            "load": lambda: load(folder),
            "list": lambda: list_snapshots(self.out),
            "newest": lambda: newest_whole(self.out),
            "restore": self.restore,
            "resume": self.resume,
            "snapshots": lambda: main(["snapshots", str(self.out), "--verify"]),
            "compare": lambda: main(["compare", str(self.out), str(self.out)]),
            "report": lambda: main(["report", str(self.out), "--output", str(self.out / "report.html")]),
            "export": self.export,
        }

    def restore(self) -> None:
        self._unchanged_after(lambda: restore(self.made.updater, self.folder))

    def resume(self) -> None:
        self._unchanged_after(lambda: self.made.run(resume=self.folder))

    def _unchanged_after(self, call: Callable[[], object]) -> None:
        before = ls.digest(self.made.updater.state_dict())
        try:
            call()
        except Exception:
            assert ls.digest(self.made.updater.state_dict()) == before
            raise

    def export(self) -> None:
        (self.out / "out.pt").unlink(missing_ok=True)
        export_torch(self.folder, self.out / "out.pt")

    def outcome(self, name: str) -> str:
        """Return what a call ends in, "right" for no error; print what it prints."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self.calls[name]()
            except (ls.SnapshotError, ls.StateError, ls.OrderError) as error:
                told = [str(error)]
                found = type(error).__name__
            except BaseException as error:  # noqa: BLE001 - the outcome of the test
                return f"raw {name}: {type(error).__name__} {traceback.format_exc()[-900:]}"
            else:
                told, found = [], "right"
        for each in [*told, *(str(warning.message) for warning in caught)]:
            assert each.replace("\n", "").isprintable(), each
        return found


def outcomes(tmp_path: Path, seed: int, count: int) -> Counter[str]:
    """Use manifests that were made with intent, and return how often which outcome was found."""
    trainer(tmp_path).run()
    [folder] = (tmp_path / "snapshots").glob("0*")
    manifest = folder / "snapshot.json"
    raw, draw, uses = manifest.read_bytes(), random.Random(seed), Uses(folder)  # noqa: S311
    found = Counter[str]()
    for _ in range(count):
        manifest.write_bytes(made_with_intent(raw, draw))
        name = draw.choice(list(uses.calls))
        out = StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            found[uses.outcome(name)] += 1
        assert all(line.isprintable() for line in out.getvalue().split("\n")), out.getvalue()
        for each in folder.parent.glob("damaged-*"):
            each.rename(folder)
    return found


def check(found: Counter[str]) -> None:
    raw = {outcome: count for outcome, count in found.items() if outcome.startswith("raw")}
    assert not raw, "\n".join(raw)
    # Some are refused, and some are snapshots like any other.
    assert found["SnapshotError"]
    assert found["right"]


@pytest.mark.parametrize(("name", "value"), [("iteration", [3]), ("iteration", 4), ("applied_updates", "3")])
def test_counts_that_are_not_those_of_the_snapshot_are_refused(tmp_path: Path, name: str, value: Any) -> None:
    trainer(tmp_path).run()
    [manifest] = (tmp_path / "snapshots").glob("0*/snapshot.json")
    document = json.loads(manifest.read_bytes())
    document["state"][name] = value
    manifest.write_bytes(sealed(document))
    made = trainer(tmp_path / "other")
    before = ls.digest(made.updater.state_dict())
    with pytest.raises(ls.StateError, match=f"`{name}` in the state of .* must be 3, got"):
        restore(made.updater, manifest.parent)
    assert ls.digest(made.updater.state_dict()) == before


def test_a_report_shows_text_that_has_no_bytes(tmp_path: Path) -> None:
    trainer(tmp_path).run()
    [manifest] = (tmp_path / "snapshots").glob("0*/snapshot.json")
    manifest.write_bytes(sealed({**json.loads(manifest.read_bytes()), "reasons": ["\ud800"]}))
    assert main(["report", str(tmp_path)]) == 0
    assert "\\ud800" in (tmp_path / "report.html").read_text()


def test_some_manifests_that_were_made_with_intent(memory_path: Path) -> None:
    check(outcomes(memory_path, 0, 300))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_many_manifests_that_were_made_with_intent(memory_path: Path, seed: int) -> None:
    check(outcomes(memory_path, seed, 2000))
