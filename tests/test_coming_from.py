"""The pages for those who come from elsewhere: made of the list, and their programs run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = DOCS / "coming-from"
HF = "hf_trainer_after.py"
GENERATOR: dict[str, Any] = runpy.run_path(str(DOCS / "coming_from.py"))


@pytest.mark.parametrize("file", GENERATOR["PAGES"])
@pytest.mark.parametrize("system", GENERATOR["SYSTEMS"])
def test_a_page_is_made_of_the_list_and_its_programs(system: str, file: str) -> None:
    made = GENERATOR["PAGES"][file](system)
    written = (PAGES / file.format(system)).read_text(encoding="utf-8")
    assert written == made, "run `python docs/coming_from.py`"


PEERS = {
    "accelerate": ["before.txt", "after.py"],
    "ddp": ["before.txt", "after.py", "loop.py"],
    "hf_trainer": ["before.txt", "after.py"],
    "ignite": ["before.txt", "after.py", "handlers.py"],
    "lightning": ["before.txt", "after.py"],
}
"""The programs on the pages for those who come from trainers of PyTorch, in the order of the page."""


@pytest.mark.parametrize("peer", PEERS)
def test_a_page_shows_the_programs_beside_it(peer: str) -> None:
    shown = re.findall(r"(?<=```python\n)(.*?)(?=```)", (PAGES / f"{peer}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown == [(PAGES / f"{peer}_{file}").read_text(encoding="utf-8") for file in PEERS[peer]]


def test_there_is_no_other_page_or_program() -> None:
    kinds = ["{}.md", "{}_names.md", "{}_before.txt", "{}_after.py", "{}_core.py"]
    wanted = {kind.format(system) for system in GENERATOR["SYSTEMS"] for kind in kinds}
    wanted |= {"pages.toml"} | {f"{peer}.md" for peer in PEERS}
    wanted |= {f"{peer}_{file}" for peer, files in PEERS.items() for file in files}
    assert {path.name for path in PAGES.iterdir() if path.is_file()} == wanted


@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.parametrize("program", sorted(path.name for path in PAGES.glob("*.py") if path.name != HF))
def test_a_program_runs_and_learns(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if program == "ignite_handlers.py":
        pytest.importorskip("ignite")
        # The bar of Ignite would start a thread that outlives it.
        monkeypatch.setattr("tqdm.std.tqdm.monitor_interval", 0)
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(PAGES / program))
    outputs = made["model"](made["inputs"]) if "Classifier" not in made else made["model"].layers(made["inputs"])
    right = outputs.argmax(dim=1) == (made["inputs"].sum(dim=1) > 0)
    assert right.float().mean() > 0.75
    assert made["model"].training


@pytest.mark.usefixtures("one_intra_op_thread")
def test_the_program_with_a_model_of_transformers_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    made = runpy.run_path(str(PAGES / HF))
    assert made["updater"].iteration == 20
    assert (tmp_path / "runs" / "hf" / "model" / "model.safetensors").exists()
