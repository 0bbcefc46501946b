"""Freed memory stays in the process, and the user's word goes before ours."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support import zygote

FAULTS = """
import resource
import torch
import lockstep as ls
from lockstep.replicas.pool.worker import keep_freed_memory

data = [(torch.randn(64, 512), torch.randn(64, 512))]
model = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 512))
updater = ls.ParallelUpdater(
    data, torch.optim.SGD(model.parameters(), lr=0.01), model,
    devices=["cpu", "cpu"], num_shards=2, loss_fn=ls.supervised(torch.nn.functional.mse_loss),
)
for _ in range(10):
    updater.update()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    updater.update()
after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
updater.finalize()
print((after - before) / 20, keep_freed_memory())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only the C library of Linux is asked")
def test_an_update_finds_the_memory_of_the_last_one() -> None:
    # Started anew: a fork would copy the pages that it has in common with others.
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=240)
    faults, kept = done.stdout.split()
    if kept != "True":
        pytest.skip("this C library cannot be asked")
    # Its gradients and activations alone have 4,000 pages.
    assert float(faults) < 400


@pytest.mark.skipif(sys.platform != "linux", reason="only the C library of Linux is asked")
def test_what_the_user_says_in_the_environment_stands() -> None:
    environment = os.environ | {"MALLOC_TRIM_THRESHOLD_": "131072"}
    done = zygote.run([sys.executable, "-c", FAULTS], env=environment, check=True)
    assert done.stdout.split()[1] == "False"
