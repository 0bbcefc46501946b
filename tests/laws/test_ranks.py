"""The placement law over processes: weights, buffers, state and measurements do not depend on the ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep import Communicator
from lockstep.plan import assign
from tests.support.programs.placement import (
    MUTANTS,
    NUM_UPDATES,
    RUNS,
    Restless,
    all_runs,
    in_one_process,
    mutated,
    trained,
)
from tests.support.ranks import launch_on_ranks, run_on_ranks
from tests.support.workloads import CONVNET

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def alone() -> dict[str, str]:
    return in_one_process(list(RUNS))


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3, 4])
def test_processes_are_only_places(size: int, alone: dict[str, str]) -> None:
    for rank, found in enumerate(run_on_ranks(all_runs, size, list(RUNS), [1, 2])):
        differing = [key for key, digest in found.items() if digest != alone[key[0]]]
        assert not differing, f"rank {rank}: {differing}"
        assert len(found) == 2 * len(alone)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_that_are_moved_about_do_move(size: int) -> None:
    timer, cuts = Restless(measuring=True), set()
    usual, places = assign(8, [1.0] * size), [[1.0]] * size
    for _ in range(3 * NUM_UPDATES):
        timer.adopt([None] * size)
        assert timer.speeds is not None
        cuts.add(tuple(map(len, timer.speeds.cut(range(8), usual, places))))
    assert len(cuts) > 2, cuts


def test_without_a_number_of_shards_the_places_of_all_ranks_are_the_shards() -> None:
    four = trained(1, work=CONVNET, num_shards=4)
    assert run_on_ranks(four_places, 2) == [four, four]
    assert trained(1, work=CONVNET, num_shards=2) != four


def four_places(communicator: Communicator) -> str:
    return trained(4 // communicator.size, work=CONVNET, num_shards=None)


@pytest.mark.parametrize("size", [2, 4])
def test_the_law_bites_each_way_to_break_it_is_caught(size: int, alone: dict[str, str]) -> None:
    names = [name for name, (_, needed, _) in MUTANTS.items() if needed == size]
    found, *_ = launch_on_ranks(mutated, size, names)
    assert {name for name, _ in found} == set(names)
    missed = [key for key, digest in found.items() if digest == alone[f"{key[1]}, fp32"]]
    assert not missed


def torchrun(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a script on two processes, as a user does."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    return subprocess.run(
        [*agent, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment,
    )


def test_a_script_runs_unchanged_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn ships the digits")
    script = ROOT / "examples" / "digits.py"
    options = ["--epochs", "2", "--devices", "1", "--out"]
    one = subprocess.run(
        [sys.executable, str(script), *options, str(tmp_path / "one")],
        capture_output=True,
        text=True,
        check=True,
    )
    two = torchrun(script, *options, str(tmp_path / "two"))
    assert two.returncode == 0, two.stderr
    (digest,) = re.findall(r"^weights ([0-9a-f]{64})$", one.stdout, flags=re.MULTILINE)
    assert re.findall(r"weights ([0-9a-f]{64})", two.stdout) == [digest, digest]  # each rank says so
    assert two.stdout.count("val/main/accuracy") == 1  # the heading of the table
    logs = [(tmp_path / name / "log.jsonl").read_text() for name in ("one", "two")]
    first, second = [re.sub(r'"elapsed_time": [^,}]*', "", log) for log in logs]
    assert first == second


SCRIPT = """
import os
if os.environ["RANK"] == "1":
    os.environ["ATEN_CPU_CAPABILITY"] = {capability!r}  # before torch chooses its kernels
from tests.support.workloads import MLP
from tests.support.runs import train
train(MLP, num_shards=5)
"""


def test_a_rank_with_another_vector_width_is_refused_with_the_field_named(tmp_path: Path) -> None:
    here = torch.backends.cpu.get_cpu_capability()
    if here not in ("AVX2", "AVX512"):
        pytest.skip(f"this processor has no narrower kernels than its own ({here})")
    capability = "avx2" if here == "AVX512" else "default"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(capability=capability))
    done = torchrun(script)
    assert done.returncode != 0
    assert "DisagreementError: Rank 1 must have rank 0's kernel class, but on it vector width is" in done.stderr
    assert f"not {here}" in done.stderr
