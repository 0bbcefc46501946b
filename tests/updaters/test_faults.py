"""After a fault the state is that of the last update, and going on gives the bits of an undisturbed run."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.pool.worker import AUTO_TIMEOUT_SECONDS
from lockstep.streams.state import DEFAULT_GENERATOR
from tests.support import gan as several, zygote
from tests.support.backward import in_backward
from tests.support.faults import fail, interrupt
from tests.support.gan import snapshot
from tests.support.hanging import HUNG, here_it_hangs, wait_patiently
from tests.support.runs import (
    NUM_UPDATES,
    Placement,
    cross_entropy,
    finalized,
    state_digest,
    train,
    undisturbed,
    updater_for,
)
from tests.support.waiting import LONG
from tests.support.workloads import CONVNET, MLP, WIDE

__all__ = ["wait_patiently"]

NUM_SHARDS = 6
FAULT_AT = 3
"""The update that is disturbed, counted from 0."""


class Trap:
    """A loss function that does something once, in one shard of one update."""

    def __init__(self, action: Callable[[], None], *, where: str = "forward", thread: str | None = None) -> None:
        self.action = action
        self.where = where
        self.thread = thread
        self.armed = False
        self.sprung = 0

    def __call__(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            self.spring()
            return cross_entropy(model, x, target)
        # Made before the model's own nodes, so backward comes to it when other gradients are there already.
        tripwire = in_backward(next(model.parameters()), lambda _: self.spring()).sum()
        return cross_entropy(model, x, target) + 0.0 * tripwire

    def spring(self) -> None:
        mine = self.thread is None or threading.current_thread().name.startswith(self.thread)
        if self.armed and mine:
            self.armed = False
            self.sprung += 1
            self.action()


@pytest.mark.each_value
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_exception_in_a_shard_leaves_the_last_update(where: str, place: int) -> None:
    thread = "MainThread" if place == 0 else f"lockstep-{place}-"
    trap = Trap(fail, where=where, thread=thread)
    with finalized(updater_for(CONVNET, Placement(3), num_shards=NUM_SHARDS, loss_fn=trap)) as updater:
        for _ in range(FAULT_AT):
            updater.update()
        before = snapshot(updater), torch.get_rng_state()
        trap.armed = True
        with pytest.raises(ls.ReplicaError, match=f"The {where} of shard {2 * place} ") as caught:
            updater.update()
        assert trap.sprung == 1
        assert caught.value.device == "cpu"
        assert caught.value.shard == 2 * place
        assert str(caught.value).endswith(f"raised RuntimeError on cpu (device {place} of 0..2): sprung")
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert snapshot(updater) == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])
        for _ in range(NUM_UPDATES - FAULT_AT):
            updater.update()
        disturbed = state_digest(updater)
    undisturbed = Trap(fail, where=where)
    assert disturbed == train(CONVNET, num_shards=NUM_SHARDS, loss_fn=undisturbed)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_interrupt_in_a_shard_applies_nothing_or_all(where: str, devices: int) -> None:
    trap = Trap(interrupt, where=where, thread="MainThread" if devices == 1 else "lockstep-1-")
    with finalized(updater_for(CONVNET, Placement(devices), num_shards=NUM_SHARDS, loss_fn=trap)) as updater:
        for _ in range(FAULT_AT):
            updater.update()
        before = snapshot(updater)
        trap.armed = True
        with pytest.raises(KeyboardInterrupt):
            updater.update()
        assert trap.sprung == 1
        assert updater.iteration in {FAULT_AT, FAULT_AT + 1}
        if updater.iteration == FAULT_AT:
            assert snapshot(updater) == before
        while updater.iteration < NUM_UPDATES:
            updater.update()
        disturbed = state_digest(updater)
    assert disturbed == train(CONVNET, num_shards=NUM_SHARDS, loss_fn=Trap(interrupt, where=where))


@pytest.mark.each_value
@pytest.mark.parametrize("work", [CONVNET, WIDE], ids=repr)
@pytest.mark.parametrize("devices", [1, 3])
def test_an_interrupt_while_the_weights_move_waits_for_the_end(work: Any, devices: int) -> None:
    updater = updater_for(work, Placement(devices), num_shards=NUM_SHARDS)
    steps = 0

    def interrupted(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == FAULT_AT + 1:
            interrupt()

    updater.get_optimizer("main").register_step_pre_hook(interrupted)
    with finalized(updater):
        for _ in range(FAULT_AT):
            updater.update()
        with pytest.raises(KeyboardInterrupt):
            updater.update()
        assert updater.iteration == FAULT_AT + 1
        while updater.iteration < NUM_UPDATES:
            updater.update()
        assert state_digest(updater) == undisturbed(work, NUM_SHARDS)


def test_a_second_interrupt_is_not_kept_waiting() -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    trap = Trap(twice, thread="MainThread")
    with finalized(updater_for(CONVNET, Placement(2), num_shards=NUM_SHARDS, loss_fn=trap)) as updater:
        before = snapshot(updater)
        trap.armed = True
        with pytest.raises(KeyboardInterrupt):
            updater.update()
        assert snapshot(updater) == before
        while updater.iteration < NUM_UPDATES:
            updater.update()
        assert state_digest(updater) == undisturbed(CONVNET, NUM_SHARDS)


def test_an_interrupt_is_given_to_the_handler_that_was_there() -> None:
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))  # noqa: ARG005 - Python's interface
    try:
        trap = Trap(interrupt)
        with finalized(updater_for(CONVNET, Placement(2), loss_fn=trap, num_shards=NUM_SHARDS)) as updater:
            trap.armed = True
            while updater.iteration < NUM_UPDATES:
                updater.update()
            assert heard == [signal.SIGINT]
            assert state_digest(updater) == undisturbed(CONVNET, NUM_SHARDS)
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_in_a_hook_of_the_optimizer_moves_nothing() -> None:
    updater = updater_for(CONVNET, Placement(2), num_shards=NUM_SHARDS)
    with finalized(updater):
        for _ in range(FAULT_AT):
            updater.update()
        before = snapshot(updater)
        handle = updater.get_optimizer("main").register_step_pre_hook(lambda *_: fail())
        with pytest.raises(RuntimeError, match="sprung"):
            updater.update()
        handle.remove()
        assert snapshot(updater) == before
        while updater.iteration < NUM_UPDATES:
            updater.update()
        assert state_digest(updater) == undisturbed(CONVNET, NUM_SHARDS)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_hook_that_returns_something_else_is_refused_before_anything_has_moved(devices: int) -> None:
    updater = updater_for(WIDE, Placement(devices))
    with finalized(updater):
        handle = updater.get_optimizer("main").register_step_pre_hook(lambda *_: "something else")
        before = ls.digest(updater.get_all_models()["main"])
        with pytest.raises(RuntimeError, match="must return None or"):
            updater.update()
        assert ls.digest(updater.get_all_models()["main"]) == before
        handle.remove()
        updater.get_optimizer("main").register_step_pre_hook(lambda _, args, kwargs: (args, kwargs))
        assert updater.update().applied


@pytest.mark.usefixtures("patiently")
@pytest.mark.each_value
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("devices", "place"), [(1, 0), (2, 0), (2, 1)])
def test_a_device_that_hangs_is_named_and_leaves_the_last_update(devices: int, place: int, where: str) -> None:
    """Also the first one, which works in the calling thread where nobody watches."""
    trap = Trap(here_it_hangs, where=where, thread=f"lockstep-{place}-")
    with finalized(
        updater_for(CONVNET, Placement(devices), num_shards=NUM_SHARDS, loss_fn=trap, timeout=1.5)
    ) as updater:
        for _ in range(FAULT_AT):
            updater.update()
        before = snapshot(updater), torch.get_rng_state()
        trap.armed = True
        shard = NUM_SHARDS // devices * place
        what = rf"The {where} of shard {shard} \(samples .*\)"
        name = rf"cpu \(device {place} of 0..{devices - 1}\)"
        with pytest.raises(ls.ReplicaError, match=f"^{what} on {name} did not finish within 1.5 seconds.") as caught:
            updater.update()
        assert "in spring" in str(caught.value)
        assert (caught.value.device, caught.value.shard) == ("cpu", shard)
        assert snapshot(updater) == before[0]
        assert torch.equal(torch.get_rng_state(), before[1])
        for _ in range(NUM_UPDATES - FAULT_AT):
            updater.update()
        disturbed = state_digest(updater)
    assert disturbed == train(CONVNET, num_shards=NUM_SHARDS, loss_fn=Trap(fail, where=where))


@pytest.mark.usefixtures("patiently")
def test_a_thread_that_comes_back_later_draws_from_no_shard_but_its_own() -> None:
    hanging, released, drawn = threading.Event(), threading.Event(), threading.Event()

    def noise(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if trap.armed:
            trap.armed = False
            hanging.set()
            HUNG.add(threading.get_ident())
            released.wait(LONG)
            torch.rand(3)
            drawn.set()
        elif hanging.is_set():  # the thread comes back while another computes a shard
            released.set()
            drawn.wait(LONG)
        return cross_entropy(model, x + torch.rand_like(x), target)

    trap = Trap(fail)
    with finalized(updater_for(MLP, num_shards=2, loss_fn=noise, timeout=1.5)) as updater:
        trap.armed = True
        with pytest.raises(ls.ReplicaError, match="did not finish"):
            updater.update()
        updater.update()
        assert drawn.is_set()
        found = state_digest(updater)
    hanging.clear()
    assert found == train(MLP, num_shards=2, updates=1, loss_fn=noise)


def test_nobody_waits_for_ever_by_default() -> None:
    with finalized(updater_for(MLP, Placement(2))) as updater:
        assert updater._training.replicas._seconds == AUTO_TIMEOUT_SECONDS


def test_a_device_that_is_watched_computes_under_the_settings_of_the_caller() -> None:
    def trained(devices: int, timeout: float | None, *, autocast: bool) -> str:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return train(MLP, Placement(devices), num_shards=NUM_SHARDS, updates=2, timeout=timeout)

    found = {trained(devices, timeout, autocast=True) for devices in (1, 2) for timeout in (None, 60.0)}
    assert len(found) == 1
    assert trained(1, None, autocast=False) not in found


@pytest.mark.parametrize("devices", [1, 2])
def test_steps_of_ones_own_may_be_watched(devices: int) -> None:
    found = {several.run(several.gan(placement=Placement(devices), timeout=each), 4) for each in (None, 60.0)}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("timeout", "error"), [(0, ValueError), (-1.0, ValueError), ("soon", TypeError), (True, TypeError)]
)
def test_what_is_no_timeout_is_refused_before_anything_has_changed(timeout: Any, error: type[Exception]) -> None:
    model = MLP.model().bfloat16()
    optimizer = ls.MomentumSGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"loss_fn": cross_entropy, "precision": "bf16-true"}
    batches = ls.BatchIterator(MLP.data(), 9)
    with pytest.raises(error, match=f"^`timeout` must be .*, got {timeout!r}."):
        ls.StandardUpdater(batches, optimizer, model, timeout=timeout, **options)
    assert optimizer.masters is None
    with finalized(ls.StandardUpdater(batches, optimizer, model, timeout=60, **options)):
        assert optimizer.masters is not None


def test_an_updater_works_outside_of_the_main_thread() -> None:
    found: list[str] = []
    worker = threading.Thread(target=lambda: found.append(train(CONVNET, Placement(2), num_shards=NUM_SHARDS)))
    worker.start()
    worker.join()
    assert found == [undisturbed(CONVNET, NUM_SHARDS)]


FORGETFUL = """
import torch, lockstep as ls
model = torch.nn.Linear(2, 1)
data = torch.utils.data.TensorDataset(torch.ones(4, 2))
updater = ls.ParallelUpdater(
    ls.BatchIterator(data, 4), torch.optim.SGD(model.parameters(), lr=0.1), model,
    devices=["cpu"] * 3, num_shards=3, loss_fn=lambda model, x: model(x).mean(),
)
updater.update()
"""


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "1 / 0"])
def test_a_script_that_forgets_to_finalize_ends(ending: str) -> None:
    done = zygote.run([sys.executable, "-c", FORGETFUL + ending])
    assert done.returncode == {"": 0, "raise SystemExit(3)": 3, "1 / 0": 1}[ending], done.stderr
    assert ending.startswith("1 / 0") or not done.stderr


def test_a_forgotten_updater_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    updater = updater_for(CONVNET, Placement(4), num_shards=NUM_SHARDS)
    updater.update()
    threads = set(threading.enumerate()) - before
    assert len(threads) == 3
    reference = weakref.ref(updater)
    del updater
    gc.collect()
    assert reference() is None
    for thread in threads:
        thread.join(timeout=60)
    assert set(threading.enumerate()) <= before
    assert torch.random.default_generator is torch.default_generator is DEFAULT_GENERATOR


@pytest.mark.parametrize("devices", [(1, 1), (1, 2)])
def test_updaters_in_threads_of_the_users_do_not_disturb_each_other(devices: tuple[int, int]) -> None:
    """Where one device computes, its shards draw from the default generator, of which there is one."""
    together = threading.Barrier(len(devices))

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        noise = torch.rand_like(x)
        time.sleep(0.001)  # long enough for the other thread to draw in between
        return cross_entropy(model, x + noise, target)

    def work(updater: ls.ParallelUpdater) -> None:
        together.wait()
        for _ in range(NUM_UPDATES):
            updater.update()

    # Models are drawn from the default generator too, so they are made before.
    updaters = [updater_for(CONVNET, Placement(count), num_shards=NUM_SHARDS, loss_fn=loss_fn) for count in devices]
    threads = [threading.Thread(target=work, args=(updater,)) for updater in updaters]
    before = torch.get_rng_state()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(torch.get_rng_state(), before)
    expected = train(CONVNET, num_shards=NUM_SHARDS, loss_fn=loss_fn)
    assert [state_digest(updater) for updater in updaters] == [expected] * 2
    for updater in updaters:
        updater.finalize()
