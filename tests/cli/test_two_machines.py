"""An agent on each of two machines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import zygote
from tests.support.machines import FIRST, MACHINES, Machine, two_machines

RENDEZVOUS = f"{FIRST.address}:29477"

SCRIPT = """
import sys, torch
import lockstep as ls

torch.manual_seed(0)
hidden = [torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Dropout(0.2)]
model = torch.nn.Sequential(torch.nn.Linear(6, 16), *hidden, torch.nn.Linear(16, 3))
x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
updater = ls.ParallelUpdater(
    ls.BatchIterator(data, batch_size=12, shuffle=True, seed=3, last_batch="drop"), optimizer, model,
    devices=["cpu"], num_shards=4,
    loss_fn=ls.supervised(torch.nn.functional.cross_entropy),
)
for _ in range(5):
    updater.update()
sys.stdout.write(f"<{ls.find_communicator().size} {ls.digest(model, optimizer)}>\\n")
updater.finalize()
"""


@pytest.fixture
def network() -> Iterator[None]:
    with two_machines():
        yield


def agent(machine: Machine, script: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "lockstep", "run", "-n", "1", "--nnodes", "2"]
    return zygote.Popen(
        [*command, "--rdzv", RENDEZVOUS, "--local-addr", machine.address, *options, script],
        env=os.environ | {zygote.NETWORK: machine.namespace, "GLOO_SOCKET_IFNAME": machine.interface},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("network")
def test_two_machines_give_the_bits_of_one_process(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = zygote.run([sys.executable, script], check=True)
    size, digest = alone.stdout.strip("<>\n").split()
    assert size == "1"
    agents = [agent(each, script) for each in MACHINES]
    said = [each.communicate(timeout=600) for each in agents]
    assert [each.returncode for each in agents] == [0, 0], said
    assert [out.strip() for out, _ in said] == [f"<2 {digest}>"] * 2
