"""The placement law under torchrun: ranks with other kernels are refused. `tests/test_pages.py` runs scripts there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


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
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    # Started anew: torch is to be imported after the script has set the variable.
    done = subprocess.run([*agent, script], env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode != 0
    assert "DisagreementError: Rank 1 must have rank 0's kernel class, but on it vector width is" in done.stderr
    assert f"not {here}" in done.stderr
