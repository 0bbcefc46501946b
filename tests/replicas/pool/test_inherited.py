"""What the calling thread is inside of holds for every shard, on any devices."""

from __future__ import annotations

import decimal
import gc
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.nn.functional import mse_loss
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

import lockstep as ls
from lockstep.replicas.pool.worker import Worker

Context = Callable[[], AbstractContextManager[Any]]

FACTOR = ContextVar("FACTOR", default=1.0)
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = torch.randn(48, 2, generator=torch.Generator().manual_seed(1))
IGNORED = "ignore:`torch.jit.script:DeprecationWarning"  # torch's own rules for forward mode use it


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2))


def updater_of(loss_fn: Any, model: nn.Module, devices: int, **options: Any) -> ls.ParallelUpdater:
    return ls.ParallelUpdater(
        ls.BatchIterator(TensorDataset(X, Y), 16),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * devices,
        num_shards=4,
        loss_fn=loss_fn,
        **options,
    )


def trained(loss_fn: Any, context: Context, devices: int, **options: Any) -> str:
    model = network()
    updater = updater_of(loss_fn, model, devices, **options)
    try:
        with context():
            for _ in range(3):
                updater.update()
    finally:
        updater.finalize()
    return ls.digest(model)


def plain_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), y)


# Context variables -------------------------------------------------------------------------------------


@contextmanager
def doubled() -> Any:
    token = FACTOR.set(2.0)
    yield
    FACTOR.reset(token)


def by_variable(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), y) * FACTOR.get()


def by_decimal(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), y) * float(decimal.Decimal(1) / decimal.Decimal(3))


def by_errstate(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x), y) * (2.0 if np.geterr()["divide"] == "raise" else 1.0)


@pytest.mark.parametrize(
    ("loss_fn", "context"),
    [
        (by_variable, doubled),
        (by_decimal, lambda: decimal.localcontext(decimal.Context(prec=3))),
        (by_errstate, lambda: np.errstate(all="raise")),
    ],
)
def test_context_variables_of_the_caller_hold_on_every_device(loss_fn: Any, context: Context) -> None:
    one = trained(loss_fn, context, 1)
    assert one != trained(loss_fn, nullcontext, 1)
    assert [trained(loss_fn, context, devices) for devices in (2, 4)] == [one, one]


def test_a_thread_keeps_nothing_of_the_callers_context() -> None:
    class Held:
        pass

    held: ContextVar[Any] = ContextVar("held")

    def run() -> weakref.ref[Held]:
        held.set(Held())
        worker.append(Worker("lockstep-test"))
        group.run(lambda _: None)
        return weakref.ref(held.get())

    worker: list[Worker] = []
    with ls.ReplicaGroup(nn.Linear(1, 1), ["cpu"] * 2) as group:
        reference = copy_context().run(run)
        gc.collect()
        assert reference() is None
    worker[0].close()


# What other threads cannot be given --------------------------------------------------------------------


class Functions(TorchFunctionMode):
    """Changes every other linear layer."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is nn.functional.linear:
            self.count += 1
            out = out * (1.5 if self.count % 2 else 1.25)
        return out


class Operators(TorchDispatchMode):
    """Changes every other matrix product."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self.count += 1
            out = out * (1.5 if self.count % 2 else 1.25)
        return out


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor * 8).round() / 8


def rounding() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(rounded, lambda tensor: tensor)


def in_half() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(torch.Tensor.half, torch.Tensor.float)


@pytest.mark.parametrize(
    ("context", "changes"),
    [
        (Functions, True),
        (Operators, True),
        (rounding, True),
        (in_half, True),
        (save_on_cpu, False),
        (allow_mutation_on_saved_tensors, False),
        (lambda: FlopCounterMode(display=False), False),
    ],
)
def test_modes_and_hooks_of_the_caller_hold_on_every_device(context: Context, changes: bool) -> None:
    one = trained(plain_loss, context, 1)
    assert changes == (one != trained(plain_loss, nullcontext, 1))
    for devices in (2, 4):
        with pytest.warns(UserWarning, match="which no other thread can be given"):
            assert trained(plain_loss, context, devices) == one


@pytest.mark.parametrize("context", [lambda: torch.device("cpu"), lambda: torch.set_grad_enabled(False)])
def test_what_other_threads_are_given_needs_no_warning(context: Context) -> None:
    assert trained(plain_loss, context, 2) == trained(plain_loss, nullcontext, 1)


def test_flops_are_those_of_one_device() -> None:
    def flops(devices: int) -> int:
        counter = FlopCounterMode(display=False)
        with ls.ReplicaGroup(nn.Linear(6, 2), ["cpu"] * devices, num_shards=4) as group, counter:
            group.forward(X, training=False)
        return int(counter.get_total_flops())

    with pytest.warns(UserWarning, match="TorchDispatchMode"):
        assert flops(3) == flops(1) > 0


def gradients(net: nn.Module, inner: nn.Module, context: Context) -> list[Any]:
    inner.zero_grad()
    for rows in X.split(16):
        with context():
            output = net(rows)
        # Outside of the context, as a plain loop may do.
        output.square().sum().backward()
    return [parameter.grad for parameter in inner.parameters()]


@pytest.mark.filterwarnings("ignore:The calling thread is inside of")
@pytest.mark.parametrize("context", [rounding, in_half, Operators, Functions])
def test_a_data_parallel_is_a_module_like_others(context: Context) -> None:
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def found(devices: int, num_shards: int) -> list[Any]:
        net = ls.DataParallel(module, ["cpu"] * devices, num_shards=num_shards)
        try:
            return gradients(net, module, context)
        finally:
            net.release()

    assert all(map(torch.equal, found(1, 1), gradients(module, module, context)))
    assert all(map(torch.equal, found(3, 3), found(1, 3)))


def test_backward_stays_in_the_thread_of_a_forward_with_hooks() -> None:
    unpacked: list[tuple[float, int]] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append((float(tensor.sum()), threading.get_ident()))
        return tensor * len(unpacked)

    def found(devices: int) -> tuple[torch.Tensor, list[tuple[float, int]]]:
        unpacked.clear()
        model = network().eval()
        net = ls.DataParallel(model, ["cpu"] * devices, num_shards=4)
        with saved_tensors_hooks(lambda tensor: tensor, unpack):
            output = net(X)
        output.square().sum().backward()
        net.release()
        gradient = model[0].weight.grad  # type: ignore[index]
        return gradient, list(unpacked)

    one = found(1)
    with pytest.warns(UserWarning, match="saved_tensors_hooks"):
        several = found(4)
    assert torch.equal(one[0], several[0])
    assert one[1] == several[1]


@pytest.mark.parametrize("devices", [1, 2])
def test_they_hold_with_a_timeout_too(devices: int) -> None:
    one = trained(plain_loss, Operators, 1)
    with pytest.warns(UserWarning, match="one after another and without a timeout"):
        assert trained(plain_loss, Operators, devices, timeout=60.0) == one


# Forward-mode differentiation --------------------------------------------------------------------------


def slowly(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(x)
    # Levels of two threads overlap.
    time.sleep(0.002)
    return output


def by_jvp(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output, tangent = torch.func.jvp(lambda rows: slowly(model, rows), (x,), (torch.ones_like(x),))
    return mse_loss(output, y) + tangent.square().mean()


def by_dual_level(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        output, tangent = forward_ad.unpack_dual(slowly(model, forward_ad.make_dual(x, torch.ones_like(x))))
    assert tangent is not None
    return mse_loss(output, y) + tangent.square().mean()


def by_hessian(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hessian = torch.func.hessian(lambda row: slowly(model, row).square().sum())(x[0])
    return mse_loss(model(x), y) + hessian.square().mean()


def by_jacobian(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    jacobian = torch.autograd.functional.jacobian(
        lambda row: slowly(model, row), x[0], vectorize=True, strategy="forward-mode"
    )
    return mse_loss(model(x), y) + torch.as_tensor(jacobian).square().mean()


@pytest.mark.filterwarnings(IGNORED)
@pytest.mark.filterwarnings("ignore:`loss_fn` must return the mean:UserWarning")  # that of the first sample
@pytest.mark.parametrize("loss_fn", [by_jvp, by_dual_level, by_hessian, by_jacobian])
def test_forward_mode_differentiation_gives_the_same_bits_on_several_devices(loss_fn: Any) -> None:
    def found(devices: int) -> str:
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        # Audits are seen to let these functions be in `test_an_error_inside_of_a_level...`.
        updater = updater_of(loss_fn, model, devices, audit_every=0)
        for _ in range(3):
            updater.update()
        updater.finalize()
        return ls.digest(model)

    assert found(4) == found(2) == found(1)


@pytest.mark.filterwarnings(IGNORED)
def test_a_level_of_the_caller_keeps_the_work_in_its_thread() -> None:
    trained(by_variable, nullcontext, 2)  # from now on, threads wait for each other's levels
    one = trained(plain_loss, forward_ad.dual_level, 1)
    with pytest.warns(UserWarning, match="a level of forward-mode differentiation"):
        assert trained(plain_loss, forward_ad.dual_level, 2) == one


@pytest.mark.usefixtures("brief_turns")
@pytest.mark.filterwarnings(IGNORED)
def test_an_error_inside_of_a_level_leaves_the_next_update_as_it_would_be() -> None:
    broken = [True]

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = by_jvp(model, x, y)
        with forward_ad.dual_level():
            if broken[0]:
                raise RuntimeError("broken")
        return loss

    updater = updater_of(loss_fn, nn.Linear(6, 2), 2)
    try:
        with pytest.raises(ls.ReplicaError, match="broken"):
            updater.update()
        broken[0] = False
        updater.update()
    finally:
        updater.finalize()


# The shard that an error names -------------------------------------------------------------------------


class Failing(nn.Module):
    """Fails in shards 1, 4 and 6 of 8, in shard 1 after the other devices have failed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shard = int(x[0, 0])
        if shard == 0 and GROUP:
            deadline = time.monotonic() + 60
            while not GROUP[0].stopping and time.monotonic() < deadline:
                time.sleep(0.001)
        if shard in (1, 4, 6):
            raise RuntimeError(f"broken {shard}")
        output: torch.Tensor = self.layer(x)
        return output


GROUP: list[Any] = []
"""The group whose first device waits for the failure of another one."""


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_an_error_names_the_lowest_shard_that_fails(devices: int) -> None:
    with ls.ReplicaGroup(Failing(), ["cpu"] * devices, num_shards=8) as group:
        GROUP[:] = [group] if devices > 1 else []
        with pytest.raises(ls.ReplicaError, match=r"The forward of shard 1 .* broken 1") as caught:
            group.forward(torch.arange(8.0).reshape(8, 1))
    assert caught.value.shard == 1
