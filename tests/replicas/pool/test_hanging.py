"""A device that hangs is named with what it does and where it is, and the group goes on with a new thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.plan import Shard
from lockstep.replicas.pool.replica_set import ReplicaSet
from lockstep.replicas.pool.worker import AUTO_TIMEOUT_SECONDS
from tests.support.hanging import HUNG, here_it_hangs
from tests.support.waiting import LONG


class Hanging(nn.Module):
    """Waits in the shard with a marked sample until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.phase = "neither"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = nn.functional.dropout(self.layer(x), 0.5)
        if self.phase == "forward" and bool((x == 5).any()):
            here_it_hangs()
        if self.phase == "backward" and bool((x == 5).any()):
            output.register_hook(lambda _: here_it_hangs())
        return output


def batch(shard: int) -> torch.Tensor:
    x = torch.arange(16.0).reshape(4, 4) / 16
    x[shard, 0] = 5
    return x


def grouped(module: nn.Module, devices: list[str], timeout: Any) -> tuple[Any, Callable[[torch.Tensor], None]]:
    group = ls.ReplicaGroup(module, devices, num_shards=4, timeout=timeout)
    return group, lambda x: group.backward(torch.ones_like(group.forward(x)))


def parallel(module: nn.Module, devices: list[str], timeout: Any) -> tuple[Any, Callable[[torch.Tensor], None]]:
    net = ls.DataParallel(module, devices, num_shards=4, timeout=timeout)
    return net, lambda x: net(x).sum().backward()


def gradients(module: nn.Module, step: Callable[[torch.Tensor], None], x: torch.Tensor) -> str:
    module.zero_grad()
    torch.manual_seed(1)
    step(x)
    return ls.digest([parameter.grad for parameter in module.parameters()])


@pytest.mark.usefixtures("patiently")
@pytest.mark.each_value
@pytest.mark.parametrize("make", [grouped, parallel])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("devices", "shard"), [(1, 0), (1, 3), (2, 0), (2, 3)])
def test_a_device_that_hangs_is_named(make: Callable[..., Any], phase: str, devices: int, shard: int) -> None:
    """Also the first one, whose work is done in the calling thread where nobody watches."""
    module = Hanging()
    unwatched, step = make(module, ["cpu"], None)
    expected = gradients(module, step, batch(shard))
    unwatched.release()
    owner, step = make(module, ["cpu"] * devices, 0.5)
    assert gradients(module, step, batch(shard)) == expected
    module.zero_grad()
    module.phase = phase
    place = shard * devices // 4
    what = rf"The {phase} of shard {shard} \(samples {shard}..{shard}\)"
    where = rf"cpu \(device {place} of 0..{devices - 1}\)"
    with pytest.raises(ls.ReplicaError, match=f"{what} on {where} did not finish within 0.5 seconds.") as caught:
        step(batch(shard))
    assert "in here_it_hangs" in str(caught.value)
    assert (caught.value.device, caught.value.shard) == ("cpu", shard)
    assert module.layer.weight.grad is None
    module.phase = "neither"
    assert gradients(module, step, batch(shard)) == expected
    owner.release()


@pytest.mark.usefixtures("patiently")
def test_a_device_that_hangs_where_shards_run_one_at_a_time() -> None:
    module = nn.Sequential(Hanging(), Outside())
    with ls.ReplicaGroup(module, ["cpu"] * 2, timeout=0.5) as group:
        with pytest.warns(ls.RandomStreamWarning):
            group.forward(batch(3))
        module[0].phase = "forward"
        with pytest.raises(ls.ReplicaError, match=r"shard 1 .*\(device 1 of 0..1\) did not finish"):
            group.forward(batch(3))


@pytest.mark.usefixtures("patiently")
def test_a_thread_that_was_given_up_stops_and_disturbs_nothing() -> None:
    shard = Shard(0, 0, range(1))
    released, late, told = threading.Event(), list[threading.Thread](), dict[str, bool]()

    def hanging(place: int) -> None:
        if place == 1:
            late.append(threading.current_thread())
            HUNG.add(threading.get_ident())
            released.wait(LONG)
            told["late"] = not replicas.progress.enter_phase(place, "forward", shard)
            raise RuntimeError("too late")

    def following(place: int) -> None:
        released.set()
        late[0].join(LONG)
        told[f"place {place}"] = not replicas.progress.enter_phase(place, "forward", shard)

    with ReplicaSet(nn.Linear(2, 1), ["cpu"] * 2, timeout=0.3) as replicas:
        with pytest.raises(ls.ReplicaError, match=r"did not finish within 0\.3 seconds"):
            replicas.run(hanging)
        replicas.run(following)
    assert told == {"late": True, "place 0": False, "place 1": False}


def test_a_batch_of_one_shard_may_come_before_one_of_several() -> None:
    """The first is one thread's affair, the second two threads'."""
    with ls.ReplicaGroup(nn.Linear(4, 3), ["cpu"] * 2, num_shards=2, timeout=LONG) as group:
        for samples in (1, 4, 1):
            assert group.forward(torch.ones(samples, 4)).shape == (samples, 3)


class Outside(nn.Module):
    """Draws past the stream of its shard, in a thread of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=torch.rand, args=(1,))
        thread.start()
        thread.join()
        return x


def test_a_caller_that_waits_for_ever_is_not_the_default() -> None:
    assert AUTO_TIMEOUT_SECONDS == 30 * 60
    with ReplicaSet(nn.Linear(2, 1), ["cpu"] * 2) as replicas:
        assert replicas._seconds == AUTO_TIMEOUT_SECONDS
        places: list[str] = []
        replicas.run(lambda _: places.append(threading.current_thread().name))
        assert sorted(places) == ["MainThread", "lockstep-1-cpu"]


def test_a_wait_may_be_longer_than_a_glance() -> None:
    with ReplicaSet(nn.Linear(2, 1), ["cpu"] * 2, timeout=None) as replicas:
        replicas.run(lambda place: time.sleep(0.25 * place))


@pytest.mark.parametrize("timeout", [-1, 0, float("nan")])
def test_the_timeout_must_be_above_zero(timeout: float) -> None:
    with pytest.raises(ValueError, match=f"`timeout` must be above 0 seconds, got {timeout}."):
        ReplicaSet(nn.Linear(2, 1), ["cpu"], timeout=timeout)


@pytest.mark.parametrize("timeout", ["soon", True])
def test_the_timeout_must_be_a_number(timeout: Any) -> None:
    rule = 'must be a number of seconds, "auto" or None'
    with pytest.raises(TypeError, match=f"`timeout` {rule}, got {timeout!r}."):
        ReplicaSet(nn.Linear(2, 1), ["cpu"], timeout=timeout)
