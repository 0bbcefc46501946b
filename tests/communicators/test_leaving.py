"""How a process leaves its group when Python ends: exit codes are true, whatever it still holds."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from tests.support import zygote

SCRIPT = """
import atexit, os, sys, weakref
import torch, torch.distributed as dist
import lockstep as ls

way = sys.argv[1]
atexit.register(lambda: print("alive" if group() else "gone"))  # runs after what is registered later
communicator = ls.find_communicator()
group = weakref.ref(dist.group.WORLD)
torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)  # the first one imports much of torch
if way == "forked":
    child = os.fork()
    if child == 0:
        sys.exit(0)
works = [dist.all_reduce(torch.ones(30_000), async_op=True) for _ in range(60)]
works[10].wait()
del works  # gloo's threads let go of the last 49, one after the other
if way == "raise":
    raise ArithmeticError("at the end")
if way == "exit":
    sys.exit(5)
"""


SUM = """
import sys
import torch
import lockstep as ls
from lockstep.communicators import Contribution

communicator = ls.find_communicator()
like = [torch.zeros(300_000), torch.zeros(10)]
shards = (0, 2), (5,)  # two nodes of the tree on one rank: a thread sends them
pending = communicator.begin_sum([Contribution(each, (3,) * len(each)) for each in shards], like)
assert pending._thread.is_alive()
print("waits")
if sys.argv[1] == "added in part":
    pending.add(1, [torch.ones(10) for _ in shards[communicator.rank]])
raise ArithmeticError("in the middle")
"""


def start(script: str, way: str, rank: int, port: int) -> subprocess.Popen[str]:
    # One rank with all that Python itself does.
    start_process = subprocess.Popen if way == "return" and rank == 0 else zygote.Popen
    return start_process(
        [sys.executable, "-c", script, way],
        env=os.environ
        | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        | {"GLOO_SOCKET_IFNAME": "lo", "LOCKSTEP_TIMEOUT": "120", zygote.WHOLE_END: "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(script: str, way: str) -> list[tuple[int, str]]:
    """Run a script on two ranks; give their exit codes, and whether the group outlived its end."""
    with socket.socket() as kept:
        # Bound while the ranks live, the port is nobody else's; rank 0, which asks alike, may listen there.
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        ranks = [start(script, way, rank, kept.getsockname()[1]) for rank in range(2)]
        try:
            said = [rank.communicate(timeout=240) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert not any("terminate called" in errors for _, errors in said), said
    return [(rank.returncode, out.strip()) for rank, (out, _) in zip(ranks, said, strict=True)]


@pytest.mark.parametrize(
    ("way", "code"), [("return", 0), pytest.param("raise", 1, marks=pytest.mark.slow), ("exit", 5)]
)
def test_the_group_ends_before_python_does(way: str, code: int) -> None:
    assert ends(SCRIPT, way) == [(code, "gone")] * 2


@pytest.mark.parametrize("way", [pytest.param("begun", marks=pytest.mark.slow), "added in part"])
def test_a_sum_that_nobody_finishes_keeps_no_process(way: str) -> None:
    """Its thread would wait for ever for tensors that are never added, and Python for the thread."""
    assert ends(SUM, way) == [(1, "waits")] * 2
