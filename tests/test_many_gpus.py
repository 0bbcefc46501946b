"""The tables of docs/many-gpus.md are those that the program beside it computes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
PAGE = PROJECT / "docs" / "many-gpus.md"


@pytest.mark.parametrize("options", [[], ["--shards", "4"]], ids=str)
def test_the_page_has_the_tables_that_are_computed(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["many_gpus.py", *options])
    runpy.run_path(str(PROJECT / "benchmarks" / "many_gpus.py"), run_name="__main__")
    page = PAGE.read_text(encoding="utf-8").splitlines()
    tables = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(tables) > 10
    wanted = tables if not options else [line for line in tables if "tokens" in line or "images" in line]
    assert [line for line in wanted if line not in page] == []


def test_the_times_are_those_of_the_formulas() -> None:
    program = runpy.run_path(str(PROJECT / "benchmarks" / "many_gpus.py"))
    cluster = program["Cluster"](1, nvlink=1e9, memory=1e9, latency=(0.0, 0.0))
    # By hand, for 8 GPUs and 8 MB: a ring sends 14 MB, an all-to-all 7 MB; 7 additions of 1 MB move 21 MB.
    assert program["all_reduce"](cluster, 8e6) == pytest.approx(0.014)
    assert program["flat"](cluster, 8e6) == pytest.approx(0.007 + 0.021 + 0.007)
    assert program["in_two_steps"](cluster, 8e6) == pytest.approx(program["flat"](cluster, 8e6))
    # On two machines of two GPUs, 4 MB: 2 MB inside and 1 MB between them, each way; additions of 6 + 3 MB.
    small = program["Cluster"](2, 2, nvlink=1e9, network=1e8, memory=1e9, latency=(0.0, 0.0))
    assert program["in_two_steps"](small, 4e6) == pytest.approx(2 * 0.002 + 2 * 0.01 + 0.006 + 0.003)
    # Flat, 2 MB leave the machine by a GPU's own adapter, which takes longer than the 1 MB inside.
    assert program["flat"](small, 4e6) == pytest.approx(2 * 0.02 + 0.009)
