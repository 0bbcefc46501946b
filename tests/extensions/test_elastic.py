"""A run whose launcher restarts it goes on by itself, on what is left, and ends with the bits of an undisturbed one."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support import zygote
from tests.support.interrupting import UPDATES, await_points, check_ended, ending, lockstep_run, newest, start
from tests.support.machines import FIRST, MACHINES, SECOND, Machine, set_link, two_machines
from tests.support.processes import descendants
from tests.support.waiting import LONG, await_true

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "3"]
MEETING = [
    "--rdzv-backend",
    "c10d",
    "--rdzv-conf",
    "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=10",
]
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""With torchrun, restarted processes do not find those that are dead in the store."""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        port: int = opened.getsockname()[1]
        return port


def await_listener(port: int) -> None:
    """Wait until an agent hosts the meeting point. On the loopback the agent that comes first does."""

    def listens() -> bool:
        with socket.socket() as opened:
            return opened.connect_ex(("127.0.0.1", port)) == 0

    await_true(listens)


def kill(*processes: int) -> None:
    for each in processes:
        os.kill(each, signal.SIGKILL)


def finished_at(point: str) -> int:
    """Return the last update that survivors finish when a rank is killed at a point."""
    name, _, update = point.rpartition(".")[2].partition(":")
    return int(update) + (name == "step")


ONE_MACHINE = [
    ("lockstep", 2, ["rank0.loss:5"]),
    ("lockstep", 2, ["rank1.step:7"]),
    ("lockstep", 2, ["rank0.evaluation:3"]),
    ("lockstep", 2, ["rank1.extension:9"]),
    ("lockstep", 3, ["rank0.step:7", "rank1.step:7"]),
    ("lockstep", 3, ["rank2.sample:4"]),
    ("lockstep", 3, ["rank0.loss:8", "rank2.loss:8"]),
    ("torchrun", 2, ["rank1.step:5"]),
    ("torchrun", 2, ["rank0.loss:6"]),
    ("torchrun", 3, ["rank0.extension:4"]),
]


@pytest.mark.parametrize(
    ("launcher", "processes", "points"),
    [ONE_MACHINE[0], *(pytest.param(*each, marks=pytest.mark.slow) for each in ONE_MACHINE[1:])],
)
def test_killed_workers_are_restarted(tmp_path: Path, launcher: str, processes: int, points: list[str]) -> None:
    line = lockstep_run("-n", str(processes), "--max-restarts", "1")
    if launcher == "torchrun":
        line = [*TORCHRUN, "--standalone", "--nproc-per-node", str(processes)]
    with start(tmp_path, points, launcher=line, **OWN_STORE) as process:
        kill(*await_points(process, len(points)).processes.values())
        code, output, errors = ending(process)
    assert code == 0, errors
    # It went on where the survivor was.
    check_ended(tmp_path, output.splitlines()[-1], resumed_from=finished_at(points[0]))


@pytest.mark.slow
def test_each_restart_goes_on_from_the_one_before(tmp_path: Path) -> None:
    points = ["rank0.loss:3", "restart1.rank1.step:6", "restart2.rank0.evaluation:9"]
    launcher = lockstep_run("-n", "2", "--max-restarts", "3")
    with start(tmp_path, points, launcher=launcher) as process:
        for each in points:
            kill(await_points(process).processes[each])
        code, output, errors = ending(process)
    assert code == 0, errors
    check_ended(tmp_path, output.splitlines()[-1], resumed_from=9)


def agent(
    out: Path,
    number: int,
    *points: str,
    rendezvous: str,
    machine: Machine | None = None,
    torchrun: bool = False,
    machines: int = 2,
) -> subprocess.Popen[str]:
    """Start the agent of a machine, which has a folder of its own. The run begins once so many machines have met."""
    variables = {**OWN_STORE, "MACHINES": str(machines)}
    if machine is not None:
        variables |= {"NETWORK_NAMESPACE": machine.namespace, "GLOO_SOCKET_IFNAME": machine.interface}
    address = "127.0.0.1" if machine is None else machine.address
    launcher = ["-n", "1", "--nnodes", "1:3", "--rdzv", rendezvous, "--local-addr", address, "--max-restarts", "3"]
    launcher = lockstep_run(*launcher, "--shutdown-timeout", "10")
    if torchrun:
        launcher = [*TORCHRUN, *MEETING, "--nnodes", "1:3", "--nproc-per-node", "1", "--rdzv-endpoint", rendezvous]
        launcher += ["--local-addr", address]
    return start(out / str(number), points, launcher=launcher, **variables)


def check_went_on(process: subprocess.Popen[str], folder: Path, finished: int) -> None:
    """Check that a machine has gone on by itself from the last update that it had finished."""
    code, output, errors = ending(process)
    assert code == 0, errors
    check_ended(folder, output.splitlines()[-1], resumed_from=finished, is_shared=False)


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_the_run_goes_on_without_a_machine(tmp_path: Path, torchrun: bool) -> None:
    port = free_port()
    rendezvous = f"127.0.0.1:{port}"
    with agent(tmp_path, 0, rendezvous=rendezvous, torchrun=torchrun) as host:
        await_listener(port)
        with agent(tmp_path, 1, "loss:5", rendezvous=rendezvous, torchrun=torchrun) as other:
            await_points(other)
            kill(other.pid, *descendants(other.pid))
            ending(other)
        # The machines share no folder, so what the run goes on from was written by the survivor.
        check_went_on(host, tmp_path / "0", 5)


@pytest.mark.slow
def test_the_run_goes_on_without_an_agent(tmp_path: Path) -> None:
    port = free_port()
    rendezvous = f"127.0.0.1:{port}"
    with agent(tmp_path, 0, rendezvous=rendezvous) as host:
        await_listener(port)
        with agent(tmp_path, 1, "loss:5", rendezvous=rendezvous) as other:
            await_points(other)
            kill(other.pid)
            ending(other)
        # The process of the killed agent tells the others, and all finish the update.
        check_went_on(host, tmp_path / "0", 6)


@pytest.mark.slow
@pytest.mark.parametrize("torchrun", [False, True])
def test_a_machine_joins(tmp_path: Path, torchrun: bool) -> None:
    rendezvous = f"127.0.0.1:{free_port()}"
    with agent(tmp_path, 0, "rank0.loss:5", rendezvous=rendezvous, torchrun=torchrun, machines=1) as first:
        await_points(first)
        with agent(tmp_path, 1, rendezvous=rendezvous, torchrun=torchrun, machines=1) as second:
            endings = [ending(each) for each in (first, second)]
    assert [code for code, _, _ in endings] == [0, 0], endings
    lines = [output.splitlines()[-1] for _, output, _ in endings if output]
    check_ended(tmp_path / "0", lines[0], resumed_from=6, is_shared=False)
    assert updates_of(tmp_path / "1") == list(range(7, UPDATES + 1))


ENDS_SLOWLY = """
import os, signal, sys, time
from pathlib import Path

folder = Path(sys.argv[1])

def end(*_):
    (folder / "ending").touch()
    while not (folder / "ended").exists():
        time.sleep(0.01)
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
with (folder / "machines").open("a") as file:
    file.write(os.environ["WORLD_SIZE"])
while os.environ["WORLD_SIZE"] == "1":
    time.sleep(0.01)
"""


def met(store: dist.TCPStore) -> set[int]:
    """Return the process IDs of the agents that have joined the round in which machines meet."""
    state = pickle.loads(base64.b64decode(store.get("torch.rendezvous.lockstep")))  # noqa: S301 - our own agents'
    return set() if state.complete else {each.pid for each in state.participants}


@pytest.mark.slow
def test_machines_wait_for_one_that_is_thought_dead_while_it_ends_its_processes(tmp_path: Path) -> None:
    """A machine that is too busy to tell that it is alive leaves the round, in which the others then meet alone.

    If they began before its processes have ended, its coming would end theirs. With each of them too busy in turn to
    tell so, they would interrupt each other for ever.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = tmp_path / "script.py"
    script.write_text(ENDS_SLOWLY)
    seconds = 5
    options = ["-n", "1", "--nnodes", "1:3", "--rdzv", f"127.0.0.1:{store.port}", "--shutdown-timeout", str(seconds)]
    command = lockstep_run(*options, "--local-addr", "127.0.0.1", str(script))
    folders = [tmp_path / "busy", tmp_path / "joining"]
    for each in folders:
        each.mkdir()
    with zygote.Popen([*command, str(folders[0])]) as busy:
        await_true((folders[0] / "machines").exists)
        with zygote.Popen([*command, str(folders[1])]) as joining:
            await_true((folders[0] / "ending").exists)
            busy.send_signal(signal.SIGSTOP)
            await_true(lambda: met(store) == {joining.pid})
            # Less than the processes may take to end.
            time.sleep(seconds - 2)
            (folders[0] / "ended").touch()
            busy.send_signal(signal.SIGCONT)
            assert [busy.wait(LONG), joining.wait(LONG)] == [0, 0]
    assert [(each / "machines").read_text() for each in folders] == ["12", "2"]


def updates_of(folder: Path) -> list[int]:
    """Return the updates that the process of a machine has finished."""
    return [int(line.split()[2]) for line in (folder / "progress").read_text().splitlines()]


@pytest.fixture
def network() -> Iterator[None]:
    with two_machines():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("point", ["loss:5", "step:8"])
@pytest.mark.parametrize("lost", MACHINES, ids=["rank 0", "rank 1"])
def test_two_machines_lose_one(tmp_path: Path, lost: Machine, point: str) -> None:
    (left,) = set(MACHINES) - {lost}
    rendezvous = f"{left.address}:29488"
    with (
        agent(tmp_path, 0, rendezvous=rendezvous, machine=left) as host,
        agent(tmp_path, 1, point, rendezvous=rendezvous, machine=lost) as other,
    ):
        await_points(other)
        kill(other.pid, *descendants(other.pid))
        ending(other)
        check_went_on(host, tmp_path / "0", finished_at(point))


@pytest.mark.slow
@pytest.mark.usefixtures("network")
def test_two_machines_lose_an_agent(tmp_path: Path) -> None:
    rendezvous = f"{FIRST.address}:29488"
    with (
        agent(tmp_path, 0, rendezvous=rendezvous, machine=FIRST) as host,
        agent(tmp_path, 1, "loss:5", rendezvous=rendezvous, machine=SECOND) as other,
    ):
        await_points(other)
        kill(other.pid)
        ending(other)
        check_went_on(host, tmp_path / "0", 6)


@pytest.mark.slow
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("host", MACHINES, ids=["rank 0 hosts", "rank 1 hosts"])
def test_the_cable_is_cut(tmp_path: Path, host: Machine) -> None:
    (other,) = set(MACHINES) - {host}
    rendezvous = f"{host.address}:29488"
    with (
        agent(tmp_path, 0, rendezvous=rendezvous, machine=host) as left,
        agent(tmp_path, 1, "loss:5", rendezvous=rendezvous, machine=other) as cut_off,
    ):
        await_points(cut_off)
        set_link(host, "down")
        check_went_on(left, tmp_path / "0", 5)
        # Its rank has the same update and is told to go on, which it cannot do alone.
        cut_off.terminate()
        ending(cut_off)
        assert newest(tmp_path / "1") == (5, (f"emergency snapshot of rank {MACHINES.index(other)}",))


@pytest.mark.slow
@pytest.mark.usefixtures("network")
def test_the_cable_is_cut_and_mended(tmp_path: Path) -> None:
    rendezvous = f"{FIRST.address}:29488"
    with agent(tmp_path, 0, "restart1.rank0.loss:8", rendezvous=rendezvous, machine=FIRST) as left:
        with agent(tmp_path, 1, "loss:5", rendezvous=rendezvous, machine=SECOND) as cut_off:
            await_points(cut_off)
            set_link(FIRST, "down")
            await_points(left)
            kill(cut_off.pid, *descendants(cut_off.pid))
            ending(cut_off)
        set_link(FIRST, "up")
        (tmp_path / "1" / "progress").unlink()
        with agent(tmp_path, 1, rendezvous=rendezvous, machine=SECOND, machines=1) as back:
            assert ending(back)[0] == 0
            check_went_on(left, tmp_path / "0", 9)
    assert updates_of(tmp_path / "1") == [10, 11, 12]
