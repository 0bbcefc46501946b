"""The placement law under torchrun: a script runs there unchanged, and ranks with other kernels are refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support import zygote

ROOT = Path(__file__).parents[2]


def torchrun(
    script: Path, *arguments: str, run: Callable[..., subprocess.CompletedProcess[str]] = zygote.run
) -> subprocess.CompletedProcess[str]:
    """Start a script on two processes, as a user does."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    return run([*agent, str(script), *arguments], env=environment)


def test_a_script_runs_unchanged_under_torchrun(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn ships the digits")
    script = ROOT / "examples" / "digits.py"
    options = ["--epochs", "1", "--devices", "1", "--out"]
    one = zygote.run([sys.executable, str(script), *options, str(tmp_path / "one")], check=True)
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


@pytest.mark.slow
def test_a_rank_with_another_vector_width_is_refused_with_the_field_named(tmp_path: Path) -> None:
    here = torch.backends.cpu.get_cpu_capability()
    if here not in ("AVX2", "AVX512"):
        pytest.skip(f"this processor has no narrower kernels than its own ({here})")
    capability = "avx2" if here == "AVX512" else "default"
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(capability=capability))
    # Torch is to be imported after the script has set the variable.
    done = torchrun(script, run=partial(subprocess.run, capture_output=True, text=True, check=False, timeout=600))
    assert done.returncode != 0
    assert "DisagreementError: Rank 1 must have rank 0's kernel class, but on it vector width is" in done.stderr
    assert f"not {here}" in done.stderr
