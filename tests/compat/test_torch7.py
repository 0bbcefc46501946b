"""Torch7's names do what its document says, on CPU devices."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.compat import torch7

TWO = ["cpu", "cpu"]


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4 * 4, 2, bias=False), nn.Tanh())


def images(n: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, 1, 6, 6, generator=generator), torch.randn(n, 2, generator=generator)


@pytest.fixture
def tables() -> Iterator[Any]:
    """Make tables, and end their threads."""
    made: list[torch7.DataParallelTable] = []

    def make(module: nn.Module | None = None, *args: Any, devices: Any = TWO) -> torch7.DataParallelTable:
        table = torch7.DataParallelTable(*(args or (1,)))
        made.append(table)
        return table if module is None else table.add(module, devices)

    yield make
    for table in made:
        table.release()


def test_the_loop_of_the_document_on_two_devices(tables: Any) -> None:
    net = tables(None, 1)  # split along the first (batch) dimension
    net.add(conv_net(), TWO)
    plain, criterion = conv_net(), nn.MSELoss()
    x, target = images()
    first_error = None
    for _ in range(5):
        output = net.forward(x)
        error = criterion(output.detach().requires_grad_(), target)
        net.zero_grad_parameters()
        grad_output = 2 * (output.detach() - target) / output.numel()
        net.backward(x, grad_output)
        net.update_parameters(0.5)
        plain.zero_grad()
        criterion(plain(x), target).backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.sub_(parameter.grad, alpha=0.5)
        first_error = first_error or error.item()
    assert error.item() < 0.9 * first_error
    # One device computes all samples at once, and rounds otherwise.
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_the_same_through_autograd(tables: Any) -> None:
    nets = [tables(conv_net()), tables(conv_net())]
    x, target = images()
    for _ in range(3):
        for net in nets:
            net.zero_grad_parameters()
        output = nets[0].forward(x)
        nets[0].backward(x, 2 * (output.detach() - target) / output.numel())
        nn.functional.mse_loss(nets[1](x), target).backward()
        for net in nets:
            net.update_parameters(0.5)
    pairs = zip(nets[0].parameters(), nets[1].parameters(), strict=True)
    assert all(torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7) for ours, theirs in pairs)


def test_gradients_of_parts_are_summed_on_the_first_replica(tables: Any) -> None:
    net = tables(nn.Linear(2, 1), devices=["cpu"] * 3)
    x = torch.ones(7, 2, requires_grad=True)
    for _ in range(2):
        net.forward(x)
        given = net.backward(x, torch.ones(7, 1), scale=0.5)
    weight, bias = net.parameters()
    assert torch.equal(weight.grad, torch.full((1, 2), 7.0))
    assert torch.equal(bias.grad, torch.full((1,), 7.0))
    assert torch.equal(given, weight.detach().expand(7, 2))
    net.zero_grad_parameters()
    assert not weight.grad.any()


@pytest.mark.parametrize(("dim", "shape"), [(1, (6, 4)), (2, (4, 6)), (-1, (4, 6))])
def test_dimensions_count_from_one(tables: Any, dim: int, shape: tuple[int, ...]) -> None:
    seen = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(x.shape))
            return x

    x = torch.arange(24.0).reshape(shape)
    assert torch.equal(tables(Looking(), dim)(x), x)
    assert sorted(seen) == [tuple(3 if size == 6 else size for size in shape)] * 2
    with pytest.raises(ValueError, match="`dim` must count from 1"):
        torch7.DataParallelTable(0)


def test_nested_inputs_and_their_gradients(tables: Any) -> None:
    class Two(nn.Module):
        def forward(self, pair: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            return pair["a"] * pair["b"], pair["a"] + 1

    net = tables(Two())
    x = {"a": torch.ones(4, 1, requires_grad=True), "b": torch.full((4, 1), 2.0)}
    output = net.forward(x)
    given = net.backward(x, (torch.ones(4, 1), torch.ones(4, 1)))
    assert isinstance(output, tuple)
    assert torch.equal(given["a"], torch.full((4, 1), 3.0))
    assert given["b"] is None
    with pytest.raises(ls.OrderError, match="`backward` must follow a forward"):
        net.backward(x, output)


@pytest.mark.parametrize("flatten", [False, True])
def test_parameters_are_one_flat_tensor(tables: Any, flatten: bool) -> None:
    net = tables(conv_net(), 1, flatten)
    x, _ = images()
    before = net.forward(x).detach()
    values, gradients = net.get_parameters()
    count = sum(parameter.numel() for parameter in net.parameters())
    assert values.shape == gradients.shape == (count,)
    net.forward(x)
    net.backward(x, torch.ones(7, 2))
    assert torch.equal(gradients, torch.cat([each.grad.reshape(-1) for each in net.parameters()]))
    assert gradients.any()
    values.zero_()
    assert not any(parameter.any() for parameter in net.parameters())
    assert not net.forward(x).any()
    assert before.any()


def test_writes_from_outside_reach_the_replicas_without_a_call(tables: Any) -> None:
    net = tables(nn.Linear(2, 1))
    net.forward(torch.ones(4, 2))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(1.0)
    assert torch.equal(net.forward(torch.ones(4, 2)), torch.full((4, 1), 3.0))
    net.sync_parameters()
    assert torch.equal(net.forward(torch.ones(4, 2)), torch.full((4, 1), 3.0))


@pytest.mark.parametrize("late", [False, True])
def test_a_function_prepares_each_thread_once(tables: Any, late: bool) -> None:
    seen = []

    def init() -> None:
        seen.append(threading.get_ident())

    net = tables()
    if not late:
        assert net.threads(init) is net
    net.add(nn.Linear(2, 1), ["cpu"] * 3)
    if late:
        net.forward(torch.ones(4, 2))
        net.threads(init)
    for _ in range(2):
        net.forward(torch.ones(4, 2))
    assert len(seen) == len(set(seen)) == 3
    net.threads()
    net.forward(torch.ones(4, 2))
    assert len(seen) == 3


def test_devices_may_be_added_one_by_one(tables: Any) -> None:
    net, first = tables(), nn.Linear(2, 1)
    assert net.add(first, "cpu").add(nn.Linear(9, 9), "cpu").add(nn.Linear(9, 9), "cpu") is net
    assert len(net.table.devices) == 3
    assert net.table.module is first
    with pytest.raises(ls.OrderError, match="once with a list"):
        net.add(first, TWO)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda table: table.forward(torch.ones(1)), ls.OrderError, "`add` must be called"),
        (lambda table: table.add(nn.Linear(1, 1), []), ValueError, "at least one device"),
        (lambda table: table.add(1, TWO), TypeError, "must be a torch.nn.Module"),
        (
            lambda table: table.add(nn.Linear(1, 1), TWO).add(nn.Linear(1, 1), TWO),
            ls.OrderError,
            "once with a list",
        ),
        (
            lambda table: table.add(nn.Linear(1, 1), TWO).add(nn.Linear(1, 1), "cpu"),
            ls.OrderError,
            "once with a list",
        ),
        (lambda table: table.add(nn.Linear(1, 1), [0]), ValueError, "count GPUs from 1"),
        (lambda _: torch7.DataParallelTable(1, False, True), ValueError, "`flatten_params` must be True"),
        (lambda _: torch7.DataParallelTable(), TypeError, "dim"),
        (lambda _: torch7.GPU(nn.Linear(1, 1), 0), ValueError, "count GPUs from 1"),
        (lambda _: torch7.GPU(1, 1), TypeError, "must be a torch.nn.Module"),
    ],
)
def test_what_torch7_refuses(tables: Any, call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(tables())


def test_one_value_for_each_device_is_averaged_where_you_say_so(tables: Any) -> None:
    class Mean(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mean().reshape(1)

    table, x = tables(Mean()), torch.arange(3.0).reshape(3, 1)
    with pytest.raises(ValueError, match=r"`table\.output_dim` in lockstep\.compat\.torch7"):
        table.forward(x)
    table.table.output_dim = None
    assert table.forward(x).item() == 1.0


def test_a_number_is_that_of_a_gpu() -> None:
    if torch.cuda.is_available():
        assert torch7.GPU(nn.Linear(1, 1), 1).device == torch.device("cuda", 0)
    else:
        with pytest.raises(ValueError, match=r"cuda:0|cuda device"):
            torch7.GPU(nn.Linear(1, 1), 1)


def test_a_table_is_copied_and_saved_as_its_module(tables: Any) -> None:
    net = tables(conv_net())
    x, _ = images()
    output = net.forward(x)
    twin = copy.deepcopy(net)
    assert torch.equal(twin.forward(x), output)
    twin.release()
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    plain = conv_net()
    assert list(net.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(torch.load(file))
    assert ls.digest(plain) == ls.digest(net.table.module)


def test_a_module_stays_on_its_device() -> None:
    module = nn.Linear(3, 2)
    gpu = torch7.GPU(module, "cpu", "meta")
    assert gpu(torch.ones(4, 3)).device.type == "meta"
    assert (gpu.device.type, gpu.output_device.type) == ("cpu", "meta")
    net = nn.Sequential(torch7.GPU(module, "cpu"), torch7.GPU(nn.Linear(2, 1), "cpu"))
    net(torch.ones(4, 3)).sum().backward()
    assert module.weight.grad is not None
    assert list(net.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.gpu
def test_two_gpus(tables: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than two CUDA devices")
    net = tables(conv_net(), devices=[1, 2])
    x, _ = images()
    assert net.forward(x.cuda()).device == torch.device("cuda", 0)
