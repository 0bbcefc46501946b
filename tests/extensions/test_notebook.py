"""A notebook shows a widget and the plot, in a real kernel."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.extensions.plots import in_notebook

CELL = """
from pathlib import Path
from lockstep.extensions import LogReport, PlotReport, ProgressBar
from lockstep.trainer import Trainer
from tests.support.plain_updaters import CountingUpdater

trainer = Trainer(CountingUpdater(2, [1.0, 0.5, 0.25, 0.125]), (2, "epoch"), Path({out!r}))
plot = PlotReport()
for extension in (LogReport(), ProgressBar(), plot):
    trainer.extend(extension)
trainer.run()
"""
ANOTHER_RUN = """
trainer = Trainer(CountingUpdater(2, [1.0, 3.0, 2.0, 5.0]), (2, "epoch"), Path({out!r}))
for extension in (LogReport(), plot):
    trainer.extend(extension)
trainer.run()
"""


def test_a_script_is_no_notebook() -> None:
    assert not in_notebook()


@pytest.mark.slow
def test_the_bar_is_a_widget_and_the_plot_is_inline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ipykernel", "ipywidgets", "nbformat"):
        pytest.importorskip(name)
    nbclient = pytest.importorskip("nbclient")
    from nbformat import v4  # noqa: PLC0415 - only where it is installed

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    codes = [CELL.format(out=str(tmp_path / "run")), ANOTHER_RUN.format(out=str(tmp_path / "other"))]
    notebook = v4.new_notebook(cells=list(map(v4.new_code_cell, codes)))
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    outputs: list[Any] = notebook.cells[0].outputs
    shown = [key for output in outputs for key in output.get("data", {})]
    assert shown.count("application/vnd.jupyter.widget-view+json") == 1
    assert shown.count("image/png") == 1  # one that was replaced, and not one for each plot
    assert not [output for output in outputs if output.output_type == "error"]
    # The plot of another run is below its own cell, and leaves that of the first run as it is.
    images = [each.outputs[-1]["data"]["image/png"] for each in notebook.cells]
    assert images[0] != images[1]
    states = notebook.metadata["widgets"]["application/vnd.jupyter.widget-state+json"]["state"].values()
    # tqdm shows figure spaces, which a browser does not collapse.
    texts = [str(state["state"].get("value")).replace("\u2007", " ") for state in states]
    assert [text for text in texts if "epoch 2.00, iteration 4, main/loss 0.125, " in text]
