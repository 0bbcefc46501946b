"""`python3 dev.py gpu` as far as it runs without a GPU: on emulated devices, and `cores` on two cores."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from lockstep import DeterminismWarning
from tests.support import zygote
from tests.support.emulated.pool import build_or_skip

PROJECT = Path(__file__).parents[1]
PROGRAMS = PROJECT / "benchmarks" / "gpu"
MODULES = ["bits", "cores", "models", "report", "streams", "timings", "training"]
ON_EMULATED = "from tests.support import emulated; emulated.load(); "
RUN = "import runpy, sys; sys.argv[0] = 'gpu'; runpy.run_path('benchmarks/gpu', run_name='__main__')"


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """The modules of the checks, which are imported by their bare names."""
    monkeypatch.syspath_prepend(str(PROGRAMS))
    yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        del sys.modules[name]


def run(*options: str, first: str = "") -> Any:
    return zygote.run([sys.executable, "-c", first + RUN, *options], cwd=PROJECT)


def rows(folder: Path, call: str) -> list[dict[str, Any]]:
    lines = (folder / f"{call}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
@pytest.mark.parametrize("call", ["bits", "streams", "timings"])
def test_a_machine_without_an_accelerator_is_refused(call: str, tmp_path: Path) -> None:
    done = run(call, "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert f"`{call}` needs an accelerator, but torch {torch.__version__} finds none on this machine." in done.stderr
    assert not (tmp_path / "out").exists()


EVERYWHERE = ["MLP, S = 4, fp32", "convnet, S = 4, bf16-true", "checkpointing, S = 4, fp16-true"]


@pytest.mark.parametrize(
    ("call", "only", "count"),
    [
        pytest.param(
            "bits",
            ["_version", *EVERYWHERE, "fp16-true overflows", "beside a CPU", "stale replica", "for a CPU", "self-test"],
            12,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "streams",
            ["side stream", "without a kernel", "ReplicaGroup", "DataParallel", "memory"],
            5,
            marks=pytest.mark.slow,
        ),
        ("streams", ["side stream", "without a kernel"], 2),
    ],
)
def test_the_checks_hold_on_emulated_devices(call: str, only: list[str], count: int, tmp_path: Path) -> None:
    build_or_skip()
    head = check_that_all_hold(call, only, count, tmp_path, first=ON_EMULATED)
    assert head["device"] == "emulated:0"


@pytest.mark.parametrize(
    ("only", "count"),
    [(["tiny MLP"], 2), pytest.param(["tiny MLP", "transformer"], 4, marks=pytest.mark.slow)],
)
def test_timings_run_on_a_cpu(only: list[str], count: int, tmp_path: Path) -> None:
    """The emulated devices have no autocast."""
    check_that_all_hold("timings", only, count, tmp_path, "--device", "cpu")


def check_that_all_hold(
    call: str, only: list[str], count: int, tmp_path: Path, *more: str, first: str = ""
) -> dict[str, Any]:
    options = [word for each in only for word in ("--only", each)]
    done = run(call, "--small", "--out", str(tmp_path), *options, *more, first=first)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *checks = rows(tmp_path, call)
    assert {"date", "torch", "Python", "processor"} <= head.keys()
    assert [each["outcome"] for each in checks] == ["ok"] * count, done.stdout
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert all(f"| {each['check']} |" in table for each in checks)
    return head


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
@pytest.mark.usefixtures("spawned_by_forks")
def test_cores_gives_one_digest_on_one_core_and_two(programs: dict[str, ModuleType], tmp_path: Path) -> None:
    report = programs["report"].Report("cores", tmp_path, "cpu", ["MLP"])
    programs["cores"].run(report, Namespace(cores=[1, 2, 10_000], small=True))
    assert report.end() == 0
    *figures, law = rows(tmp_path, "cores")[1:]
    assert len(figures) == 2 * 4
    assert (law["found"], law["outcome"]) == ("1", "ok")


def test_a_check_that_fails_or_raises_ends_nothing_and_sets_the_status(
    programs: dict[str, ModuleType], tmp_path: Path
) -> None:
    def broken() -> None:
        raise ArithmeticError("no kernel")

    report = programs["report"].Report("bits", tmp_path, "cpu", [])
    report.check("equal", "1 digest", lambda: "2 digests")
    report.check("broken", "1 digest", broken)
    report.check("good", 1, lambda: 1)
    assert report.end() == 1
    outcomes = {each["check"]: (each["found"], each["outcome"]) for each in rows(tmp_path, "bits")[1:]}
    assert outcomes == {
        "equal": ("2 digests", "FAILED"),
        "broken": ("ArithmeticError: no kernel", "FAILED"),
        "good": ("1", "ok"),
    }


def test_a_call_without_checks_is_not_a_success(programs: dict[str, ModuleType], tmp_path: Path) -> None:
    assert programs["report"].Report("bits", tmp_path, "cpu", ["nothing"]).end() == 1


class Drifting(nn.Module):
    """A model whose results depend on when they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1.0 + time.perf_counter_ns() % 1_000_003 / 1e6)


def test_placements_that_differ_are_seen(programs: dict[str, ModuleType]) -> None:
    placements, task = programs["bits"].placements, programs["models"].Task
    with pytest.warns(DeterminismWarning, match="no two of them are equal"):
        assert placements(task(Drifting, (32,)), "cpu", 4, "fp32") == "6 digests"
    assert placements(programs["models"].TASKS["MLP"], "cpu", 4, "fp32") == "1 digest"
