"""The curve: a picture in the folder, drawn without touching the caller's own figures."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.extensions import LogReport, PlotReport
from lockstep.extensions.plots import _panels, draw, save_figure
from lockstep.side_files import SideFile
from lockstep.trainer import Trainer
from tests.support import zygote
from tests.support.plain_updaters import CountingUpdater


def size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def train(out: Path, plot: PlotReport, losses: list[float]) -> None:
    trainer = Trainer(CountingUpdater(2, losses), (len(losses), "iteration"), out, extensions=[LogReport(), plot])
    trainer.extend(lambda trainer: trainer.observe("validation/main/loss", 0.5), trigger=(1, "epoch"), priority=300)
    trainer.run()


def test_a_run_leaves_a_picture_and_nothing_beside_it(tmp_path: Path) -> None:
    train(tmp_path, PlotReport(), [1.0, 0.5, 0.25, 0.125])
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "curve.png"}
    assert size(tmp_path / "curve.png") == (605, 462)


def test_values_that_are_not_finite_leave_gaps(tmp_path: Path) -> None:
    train(tmp_path, PlotReport(filename="loss.svg"), [1.0, float("nan"), float("inf"), 1.0])
    assert b"<svg" in (tmp_path / "loss.svg").read_bytes()


def test_a_log_without_values_draws_nothing(tmp_path: Path) -> None:
    trainer = Trainer(CountingUpdater(2), (1, "epoch"), tmp_path, extensions=[LogReport(), PlotReport(["absent"])])
    with pytest.warns(UserWarning, match="`keys` of PlotReport must name observed values, got 'absent'"):
        trainer.run()
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl"}


def test_names_that_end_alike_share_a_panel() -> None:
    counters = {"epoch": 1, "iteration": 2, "epoch_detail": 1.0, "elapsed_time": 0.1}
    log = [
        {**counters, "main/loss": 1.0, "main/accuracy": 0.5},
        {**counters, "validation/main/loss": 1.0, "lr": 0.1},
    ]
    assert _panels(log, None) == {
        "loss": ["main/loss", "validation/main/loss"],
        "accuracy": ["main/accuracy"],
        "lr": ["lr"],
    }
    assert _panels(log, ["lr", "absent"]) == {"lr": ["lr"]}


def test_skipped_updates_have_a_panel_if_there_are_any() -> None:
    counters = {"epoch": 1, "iteration": 2, "epoch_detail": 1.0, "elapsed_time": 0.1}
    log = [{**counters, "main/loss": 1.0, "main/skipped": 0}, {**counters, "main/loss": 1.0, "main/skipped": 0}]
    assert _panels(log, None) == {"loss": ["main/loss"]}
    assert _panels(log, ["main/skipped"]) == {"skipped": ["main/skipped"]}
    log[1]["main/skipped"] = 2
    assert _panels(log, None) == {"loss": ["main/loss"], "skipped": ["main/skipped"]}


def test_each_panel_has_its_own_room(tmp_path: Path) -> None:
    log = [{"epoch_detail": float(n), "main/loss": 1.0 / n, "main/accuracy": n / 10} for n in range(1, 5)]
    save_figure(draw(log, _panels(log, None), title="two"), SideFile(tmp_path, "two.png"))
    assert size(tmp_path / "two.png") == (1210, 462)


def test_a_plot_without_a_log_is_refused_before_training(tmp_path: Path) -> None:
    trainer = Trainer(CountingUpdater(), out=tmp_path, extensions=[PlotReport()])
    with pytest.raises(TypeError, match="`log_report` must name a LogReport that PlotReport can read"):
        trainer.run()


def python(code: str) -> subprocess.CompletedProcess[str]:
    return zygote.run([sys.executable, "-W", "error", "-c", code])


def test_importing_the_extensions_imports_no_matplotlib_and_drawing_no_pyplot(tmp_path: Path) -> None:
    done = python(f"""
import sys
from pathlib import Path
from lockstep.extensions.plots import PlotReport, draw, save_figure
from lockstep.side_files import SideFile
assert "matplotlib" not in sys.modules
figure = draw([{{"epoch_detail": 1.0, "x": 2.0}}], {{"x": ["x"]}}, title="x")
save_figure(figure, SideFile(Path({str(tmp_path)!r}), "x.png"))
assert "matplotlib.pyplot" not in sys.modules
""")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_missing_matplotlib_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)  # Python's own way to say that a module is not there
    with pytest.raises(ImportError, match=r"Install it: pip install 'lockstep-torch\[plot\]'"):
        PlotReport()
