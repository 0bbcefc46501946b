"""Ctrl-C and threads that hang: the devices at work are named, and everything can be used on."""

from __future__ import annotations

import _thread
import gc
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.pool.interrupts import CallSigint
from lockstep.replicas.pool.progress import DeviceProgress
from lockstep.streams import THREAD_STREAMS
from tests.support import zygote
from tests.support.waiting import LONG

SHARDS = 4


class Busy(nn.Module):
    """Does something in the middle of its work, once; the samples say in which shard."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.action: Callable[[], None] | None = None
        self.phase = "forward"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.norm(nn.functional.dropout(self.layer(x), 0.5, self.training))
        chosen = self.action is not None and bool((x[:, 0] == 5).any())
        if chosen and self.phase == "forward":
            self.act()
        if chosen and self.phase == "backward":
            output.register_hook(lambda _: self.act())
        return output

    def act(self) -> None:
        assert self.action is not None
        self.action()


def batch(shard: int) -> torch.Tensor:
    """Make 8 samples, those of one of four shards marked."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2)).clamp(-4, 4)
    x[2 * shard, 0] = 5
    return x


def grouped(module: Busy, **options: Any) -> tuple[Any, Callable[[torch.Tensor], None]]:
    group = ls.ReplicaGroup(module, ["cpu"] * 2, num_shards=SHARDS, **options)

    def step(x: torch.Tensor) -> None:
        group.backward(torch.ones_like(group.forward(x)))

    return group, step


def parallel(module: Busy, **options: Any) -> tuple[Any, Callable[[torch.Tensor], None]]:
    net = ls.DataParallel(module, ["cpu"] * 2, num_shards=SHARDS, **options)

    def step(x: torch.Tensor) -> None:
        module.zero_grad()
        net(x).sum().backward()

    return net, step


def state(module: nn.Module) -> str:
    return ls.digest(module, [parameter.grad for parameter in module.parameters()])


def undisturbed(make: Callable[..., Any], x: torch.Tensor) -> str:
    module = seeded()
    owner, step = make(module)
    torch.manual_seed(1)
    step(x)
    owner.release()
    return state(module)


def seeded() -> Busy:
    torch.manual_seed(0)
    return Busy()


MARKED = threading.Event()
"""Set once it is remembered who was at work when an interrupt came."""
MARK = DeviceProgress.mark


def mark(self: DeviceProgress) -> None:
    """Remember who is at work, and let those go on who have stayed for it."""
    MARK(self)
    MARKED.set()


@pytest.fixture
def _marking(monkeypatch: pytest.MonkeyPatch) -> None:
    MARKED.clear()
    monkeypatch.setattr(DeviceProgress, "mark", mark)


def press() -> None:
    """Interrupt the main thread from a worker, and stay at work until it has heard."""
    _thread.interrupt_main()
    MARKED.wait(LONG)


def here() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("_marking")
@pytest.mark.parametrize("make", [grouped, parallel])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("shard", "action"), [(0, here), (1, here), (2, press), (3, press)])
def test_ctrl_c_names_who_was_at_work_and_changes_nothing(
    make: Callable[..., Any], phase: str, shard: int, action: Callable[[], None]
) -> None:
    module, x = seeded(), batch(shard)
    expected = undisturbed(make, x)
    before = state(module)
    owner, step = make(module)
    module.action, module.phase = action, phase
    with pytest.raises(KeyboardInterrupt, match=f"the {phase} of shard {shard} ") as caught:
        step(x)
    assert isinstance(caught.value, ls.ReplicaInterrupt)
    assert f"(samples {2 * shard}..{2 * shard + 1}) on cpu (device {shard // 2} of 0..1)" in str(caught.value)
    assert set(caught.value.devices) == {"cpu"}
    assert type(caught.value.__cause__) is KeyboardInterrupt
    if phase == "forward":
        assert state(module) == before
    assert all(parameter.grad is None for parameter in module.parameters())
    assert THREAD_STREAMS.generator is None
    module.action = None
    module.load_state_dict(seeded().state_dict())
    torch.manual_seed(1)
    step(x)
    assert state(module) == expected
    owner.release()


def test_an_interrupt_of_a_users_own_kind_passes_as_it_is() -> None:
    class Preempted(KeyboardInterrupt):
        pass

    def preempt(number: int, frame: object) -> None:
        raise Preempted(number, frame)

    module = seeded()
    owner, step = grouped(module)
    module.action = here
    before = signal.signal(signal.SIGINT, preempt)
    try:
        with pytest.raises(Preempted):
            step(batch(0))
        assert signal.getsignal(signal.SIGINT) is preempt
    finally:
        signal.signal(signal.SIGINT, before)
    owner.close()


def test_a_handler_that_lets_the_work_go_on_leaves_no_shard_out() -> None:
    heard = []
    module, x = seeded(), batch(0)
    expected = undisturbed(grouped, x)
    owner, step = grouped(module)
    module.action = here
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        torch.manual_seed(1)
        step(x)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard
    assert state(module) == expected
    owner.close()


def test_what_may_not_be_interrupted_is_done_first() -> None:
    done = []

    def work(*, opened: bool) -> None:
        with CallSigint() as interrupts:
            here()
            done.append("whole")
            with interrupts.interruptible if opened else nullcontext():
                done.append("in the window")

    with pytest.raises(KeyboardInterrupt):
        work(opened=False)
    assert done == ["whole", "in the window"]
    with pytest.raises(KeyboardInterrupt):
        work(opened=True)
    assert done == ["whole", "in the window", "whole"]


# Python reports an exception in the callback of a weak reference, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_any_moment_leave_all_or_nothing() -> None:
    """Which moments those are is left to chance; none may leave something half done."""
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    before = torch.get_num_threads(), signal.getsignal(signal.SIGINT)
    threads = set(threading.enumerate())

    def press(delay: float, raised: threading.Event) -> None:
        time.sleep(delay)
        _thread.interrupt_main()
        while not raised.wait(5.0):  # the first one was dropped in such a callback
            _thread.interrupt_main()

    def work(group: ls.ReplicaGroup, presser: threading.Thread) -> None:
        presser.start()
        while True:
            group.backward(torch.ones_like(group.forward(batch(0))))

    with ls.ReplicaGroup(module, ["cpu"] * 2) as group:
        for number in range(60):
            module.zero_grad()
            raised = threading.Event()
            presser = threading.Thread(target=press, args=(number * 1e-4, raised))
            with pytest.raises(KeyboardInterrupt):
                work(group, presser)
            raised.set()
            presser.join()
            assert len({parameter.grad is None for parameter in module.parameters()}) == 1
            assert not module.training
            assert torch.is_grad_enabled()
            assert THREAD_STREAMS.generator is None
            assert (torch.get_num_threads(), signal.getsignal(signal.SIGINT)) == before
    for thread in set(threading.enumerate()) - threads:
        thread.join(LONG)
        assert not thread.is_alive(), "abandoned threads end by themselves"


SCRIPT = """
import sys
import torch
from torch import nn
import lockstep as ls
from lockstep.replicas.pool.progress import DeviceProgress
from tests.replicas.pool.test_interrupts import MARKED, SHARDS, batch, grouped, mark, parallel, seeded, state
from tests.support.waiting import LONG

DeviceProgress.mark = mark

module, x = seeded(), batch(3)
if sys.argv[1] == "updater":
    samples = [(row, torch.zeros(3)) for row in x]
    updater = ls.ParallelUpdater(
        ls.BatchIterator(samples, 8, shuffle=False), torch.optim.SGD(module.parameters(), lr=0.1), module,
        devices=["cpu"] * 2, num_shards=SHARDS, loss_fn=ls.supervised(nn.functional.mse_loss),
    )
    step = lambda _: updater.update()
else:
    owner, step = {"group": grouped, "parallel": parallel}[sys.argv[1]](module)

def work():
    print("working", flush=True)
    MARKED.wait(LONG)

step(x)
before = ls.digest(module)
module.action, module.phase = work, sys.argv[2]
try:
    step(x)
except KeyboardInterrupt as error:
    module.action = None
    print(type(error).__name__, error, flush=True)
assert ls.digest(module) == before or sys.argv[2] == "backward" and sys.argv[1] != "updater"
step(x)
print("went on", flush=True)
"""


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("which", ["group", "parallel", "updater"])
def test_a_signal_from_outside(which: str, phase: str) -> None:
    """Ctrl-C at the terminal, while a worker is busy for long."""
    told = interrupted_script(which, phase)
    assert told[0].startswith("ReplicaInterrupt Interrupted during ")  # device 0 may be at work as well
    assert f"the {phase} of shard 3 (samples 6..7) on cpu (device 1 of 0..1)" in told[0]
    assert told[1] == "went on"


def interrupted_script(which: str, phase: str) -> list[str]:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), which, phase]
    with zygote.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert child.stdout.readline() == "working\n", child.stderr.read()
        child.send_signal(signal.SIGINT)
        told = child.stdout.read().splitlines()
        assert child.wait(4 * LONG) == 0, child.stderr.read()
    return told


@pytest.mark.parametrize("devices", [1, 2])
def test_forward_and_backward_leave_nothing_to_the_cycle_collector(devices: int) -> None:
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    x = torch.randn(6, 2, requires_grad=True)
    net = ls.DataParallel(module, ["cpu"] * devices)
    with ls.ReplicaGroup(module, ["cpu"] * devices, input_grads=True) as group:

        def work() -> None:
            group.forward(x.detach())
            group.backward(torch.ones(6, 3))
            net(x).square().sum().backward()
            with torch.no_grad():
                net(x)

        work()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                work()
            left = gc.collect()
        finally:
            gc.enable()
        net.release()
    assert left == 0
