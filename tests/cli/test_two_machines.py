"""Two machines: two network namespaces with a cable between them, an agent in each.

The test makes the namespaces and removes them. Where it may not, it is skipped, which is no pass.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import zygote

RENDEZVOUS = "10.77.0.1:29477"
# Namespaces have their own addresses, interfaces and ports, but share their names with all processes.
FIRST, SECOND = (f"lockstep-{os.getpid()}-{letter}" for letter in "ab")
HOSTS = {FIRST: "10.77.0.1", SECOND: "10.77.0.2"}

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


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=240)


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Make two machines with a cable between them, and take them away."""
    if shutil.which("ip") is None:
        pytest.skip("not run: iproute2 is not installed")
    try:
        for name in HOSTS:
            ip("netns", "add", name)
        cable = f"link add lsa netns {FIRST} type veth peer name lsb netns {SECOND}"
        ip(*cable.split())
        for (name, address), link in zip(HOSTS.items(), ("lsa", "lsb"), strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        _remove()
        pytest.skip(f"not run: no network namespaces here: {error.stderr.decode().strip()}")
    yield HOSTS
    _remove()


def _remove() -> None:
    for name in HOSTS:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True, timeout=240)


def agent(host: str, interface: str, script: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        "ip",
        "netns",
        "exec",
        host,
        sys.executable,
        "-m",
        "lockstep",
        "run",
        "-n",
        "1",
        "--nnodes",
        "2",
    ]
    return subprocess.Popen(
        [*command, "--rdzv", RENDEZVOUS, "--local-addr", HOSTS[host], *options, script],
        env=os.environ | {"GLOO_SOCKET_IFNAME": interface},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_machines_give_the_bits_of_one_process(hosts: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    alone = zygote.run([sys.executable, script], check=True)
    size, digest = alone.stdout.strip("<>\n").split()
    assert size == "1"
    agents = [agent(host, link, script) for host, link in zip(hosts, ("lsa", "lsb"), strict=True)]
    said = [each.communicate(timeout=600) for each in agents]
    assert [each.returncode for each in agents] == [0, 0], said
    assert [out.strip() for out, _ in said] == [f"<2 {digest}>"] * 2
