"""The programs on the pages of `docs/` and in the README run, from the first to the last of a page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

PAGES = {"group.md": 3, "modules.md": 5}
"""How many programs each page holds."""


@pytest.mark.parametrize("page", PAGES)
def test_the_programs_of_a_page_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert len(programs) == PAGES[page]
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        for program in programs:
            exec(compile(program, page, "exec"), names)  # noqa: S102 - our own page
    assert capsys.readouterr().out


def test_the_pages_point_to_what_is_there() -> None:
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#:]+)\)", text)
        assert [link for link in links if not (DOCS / link).exists()] == []


TWO_DEVICES = 'devices=["cpu", "cpu"]'
PLACEMENTS = {
    "as it is pasted": ([], TWO_DEVICES),
    "on one device": ([], 'devices=["cpu"]'),
    "on three devices": ([], 'devices=["cpu"] * 3'),
    "torchrun": (["-m", "torch.distributed.run", "--nproc-per-node", "2"], TWO_DEVICES),
    "lockstep run": (["-m", "lockstep", "run", "-n", "2"], 'devices=["cpu"]'),
}
"""How the README's program is started, and on which devices."""


def test_the_program_of_the_readme_prints_one_digest_wherever_it_runs(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = readme.split("```python\n")[1].split("```\n")[0]
    assert TWO_DEVICES in program
    printed = {}
    for name, (start, devices) in PLACEMENTS.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(program.replace(TWO_DEVICES, devices), encoding="utf-8")
        lines = output_of([sys.executable, *start, "train.py"], folder).splitlines()
        assert lines[0].split()[:4] == ["epoch", "iteration", "main/loss", "validation/main/accuracy"]
        assert [line.split()[0] for line in lines[1:11]] == [str(epoch) for epoch in range(1, 11)]
        assert float(lines[10].split()[3]) > 0.8
        (printed[name],) = lines[11:]
    assert len(set(printed.values())) == 1, printed
    assert re.fullmatch("[0-9a-f]{64}", printed["torchrun"])


def output_of(command: list[str], folder: Path) -> str:
    """Run a command in a folder, with what this interpreter finds, as if it were installed."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", *sys.path)))}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
