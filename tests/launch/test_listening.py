"""Where the processes of a run listen, and what one who reaches their store can do.

The runs are on a machine whose name stands for an address that others reach, as most machines have it: torch listens
there, or on all interfaces, unless it is told otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import zygote
from tests.support.machines import FIRST, SECOND, Machine, two_machines
from tests.support.processes import children, descendants, listening_at
from tests.support.waiting import await_true

SCRIPT = """
import sys, time
from pathlib import Path
import lockstep as ls

def main(folder):
    communicator = ls.find_communicator()
    communicator.barrier()
    Path(folder, f"came-{communicator.rank}").touch()
    while not Path(folder, "leave").exists():
        time.sleep(0.05)
    communicator.barrier()

if __name__ == "__main__":
    if sys.argv[2:] == ["launch"]:
        from tests.support.zygote import spawned_by_forks

        with spawned_by_forks():
            ls.launch(main, 2, args=(sys.argv[1],))
    else:
        main(sys.argv[1])
"""
ROOT = Path(__file__).parents[2]
RUN = ["-m", "lockstep", "run", "-n", "2"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node"]
TWO_MACHINES = [*RUN[:-1], "1", "--nnodes", "2", "--rdzv", f"{FIRST.address}:29478", "--local-addr"]

ATTACK = """
import base64, os, pickle, sys
from datetime import timedelta
import torch.distributed as dist

class Payload:
    def __reduce__(self):
        return os.mkdir, (sys.argv[3],)

# What torch's c10d rendezvous has under its key, and what whoever unpickles any other value would be given.
pickled = pickle.dumps(Payload())
store = dist.TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=timedelta(seconds=240))
for key in store.list_keys():
    store.set(key, base64.b64encode(pickled) if "torch.rendezvous" in key else pickled)
"""


Command = tuple[list[str], dict[str, str]]
"""The words of a command, and its variables."""


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    with two_machines():
        yield


def on(machine: Machine, *arguments: object) -> Command:
    """Give the command of a process of Python on a machine that is named by its address."""
    variables = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    paths = os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))
    place = {zygote.NETWORK: machine.namespace, zygote.HOST: machine.address}
    return [sys.executable, *map(str, arguments)], {**variables, **place, "PYTHONPATH": paths}


@contextmanager
def running(folder: Path, ranks: int, *commands: Command) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the processes of a run, and yield when the ranks have met; they end when one who is here lets them."""
    agents = [zygote.Popen(each, env=variables, stderr=subprocess.PIPE) for each, variables in commands]
    try:
        await_true(
            lambda: len(list(folder.glob("came-*"))) == ranks or any(agent.poll() is not None for agent in agents),
            seconds=240,
        )
        assert len(list(folder.glob("came-*"))) == ranks, [agent.communicate()[1] for agent in agents]
        yield agents
    finally:
        (folder / "leave").touch()
        for agent in agents:
            agent.communicate(timeout=240)


def script(folder: Path) -> Path:
    (folder / "script.py").write_text(SCRIPT)
    return folder / "script.py"


def run(machine: Machine, *arguments: object) -> subprocess.CompletedProcess[str]:
    line, variables = on(machine, *arguments)
    return zygote.run(line, env=variables, timeout=240)


def places(agent: subprocess.Popen[bytes]) -> set[tuple[str, int]]:
    return {place for pid in [agent.pid, *descendants(agent.pid)] for place in listening_at(pid)}


@pytest.mark.usefixtures("network")
@pytest.mark.parametrize(
    ("launcher", "ranks", "options"),
    [
        pytest.param([], 1, [], id="python", marks=pytest.mark.slow),
        pytest.param(RUN, 2, [], id="lockstep run"),
        pytest.param([], 2, ["launch"], id="launch"),
        pytest.param([*TORCHRUN, "2"], 2, [], id="torchrun", marks=pytest.mark.slow),
        pytest.param([*TORCHRUN, "1"], 1, [], id="torchrun of one", marks=pytest.mark.slow),
    ],
)
def test_on_one_machine_nothing_listens_beyond_the_loopback(
    launcher: list[str], ranks: int, options: list[str], tmp_path: Path
) -> None:
    with running(tmp_path, ranks, on(FIRST, *launcher, script(tmp_path), tmp_path, *options)) as (agent,):
        # torchrun's own process is torch's alone.
        pids = children(agent.pid) if launcher[1:2] == TORCHRUN[1:2] else [agent.pid, *descendants(agent.pid)]
        found = [place for pid in pids for place in listening_at(pid)]
    assert [place for place in found if not ipaddress.ip_address(place[0]).is_loopback] == []
    assert bool(found) == (ranks > 1)


@pytest.mark.usefixtures("network")
def test_whoever_reaches_the_store_of_one_machine_has_no_code_run(tmp_path: Path) -> None:
    done = tmp_path / "attacked"
    with running(tmp_path, 2, on(FIRST, *RUN, script(tmp_path), tmp_path)) as (agent,):
        found = places(agent)
        for _, port in found:
            connect = f"import socket; socket.create_connection(({FIRST.address!r}, {port}))"
            reached = run(SECOND, "-c", connect)
            assert "ConnectionRefusedError" in reached.stderr
        stores = [place for place in found if place in listening_at(agent.pid)]
        attacks = [run(FIRST, "-c", ATTACK, *store, done) for store in stores]
        assert attacks
        assert all(attack.returncode == 0 for attack in attacks), attacks
        # torch's own agent looks into its store several times a second.
        time.sleep(1)
    assert not done.exists()


@pytest.mark.usefixtures("network")
def test_two_machines_listen_at_the_addresses_that_were_given(tmp_path: Path) -> None:
    commands = [on(machine, *TWO_MACHINES, machine.address, script(tmp_path), tmp_path) for machine in (FIRST, SECOND)]
    with running(tmp_path, 2, *commands) as agents:
        found = [{address for address, _ in places(agent)} for agent in agents]
    assert found == [{FIRST.address}, {SECOND.address}]
