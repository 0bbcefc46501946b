"""What a monitor reports, when, and that it changes nothing."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.monitor import rms


def small(devices: int = 2, **options: Any) -> ls.DataParallel:
    torch.manual_seed(0)
    return ls.DataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Tanh()), ["cpu"] * devices, **options)


def watched(net: nn.Module, monitor: ls.Monitor, x: torch.Tensor) -> list[Any]:
    monitor.tic()
    net(x).square().sum().backward()
    return monitor.toc()


def data() -> torch.Tensor:
    return torch.randn(7, 3, generator=torch.Generator().manual_seed(1))


def test_rows_say_what_where_and_in_which_shard() -> None:
    net, monitor = small(num_shards=3), ls.Monitor()
    net.install_monitor(monitor)
    rows = watched(net, monitor, data().requires_grad_())
    outputs = ["input", "0.output", "1.output", "2.output", "output"]
    parameters = ["0.weight", "0.bias", "1.weight", "1.bias"]
    spots = [(0, 0), (0, 1), (1, 2)]
    found = [(row.name, row.replica, row.shard) for row in rows]
    forward, backward = found[: 3 * 5], found[3 * 5 : 3 * 5 + 3 * 9]
    assert forward == [(name, *spot) for spot in spots for name in outputs]
    assert sorted(backward) == sorted((f"{name}.grad", *spot) for spot in spots for name in outputs + parameters)
    assert [each[1:] for each in backward] == [spot for spot in spots for _ in range(9)]
    state = found[3 * 5 + 3 * 9 :]
    assert state[:8] == [(name, replica, None) for replica in (0, 1) for name in parameters]
    buffers = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert state[8:] == [(name, None, None) for name in buffers]
    assert {(row.step, row.device, row.nonfinite) for row in rows} == {(1, "cpu", 0)}


def test_the_numbers_are_those_of_the_tensors() -> None:
    net, monitor = small(), ls.Monitor(pattern=r"0\.")
    net.install_monitor(monitor)
    x = data()
    rows = {(row.name, row.shard): row.value for row in watched(net, monitor, x)}
    layer = net.module[0]
    for shard, part in enumerate((x[:4], x[4:])):
        output = layer(part)
        assert rows["0.output", shard] == pytest.approx(rms(output).item())
        (gradient,) = torch.autograd.grad(net.module(part).square().sum(), layer.weight)
        assert rows["0.weight.grad", shard] == pytest.approx(rms(gradient).item(), rel=1e-4)
    assert rows["0.weight", None] == pytest.approx(rms(layer.weight).item())


def test_what_is_not_finite_is_counted() -> None:
    net, monitor = small(), ls.Monitor(pattern="input|0.bias.grad")
    net.install_monitor(monitor)
    x = data()
    x[5] = torch.tensor([float("nan"), float("inf"), 0.0])
    rows = watched(net, monitor, x)
    assert [(row.name, row.shard, row.nonfinite) for row in rows] == [
        ("input", 0, 0),
        ("input", 1, 2),
        ("0.bias.grad", 0, 0),
        ("0.bias.grad", 1, 2),
    ]
    assert rows[1].value != rows[1].value  # no number


TIMES = [  # interval, what happens, the steps of the rows that each toc gives
    (1, "t c t c", [1, 2]),
    (2, "t c t c t c", [1, None, 3]),
    (3, "t c t c c t c t c", [1, None, None, None, 4]),
    (2, "c t c c", [None, 1, None]),
    (2, "t c t t c", [1, 3]),  # a step that is not watched needs no toc
]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(("interval", "events", "expected"), TIMES)
def test_it_watches_every_so_many_steps(interval: int, events: str, expected: list[int | None], resumed: bool) -> None:
    net = small(1)
    monitor = ls.Monitor(interval, pattern="0.weight$")
    net.install_monitor(monitor)
    found: list[int | None] = []
    for event in events.split():
        if event == "t":
            monitor.tic()
        else:
            steps = {row.step for row in monitor.toc()}
            found.append(steps.pop() if steps else None)
            if resumed:
                state = monitor.state_dict()
                monitor = ls.Monitor(interval, pattern="0.weight$")
                monitor.load_state_dict(state)
                net.install_monitor(monitor)
    assert found == expected


def test_a_watched_step_is_not_begun_twice() -> None:
    monitor = ls.Monitor()
    monitor.tic()
    with pytest.raises(ls.OrderError, match="must be read by `toc` before the next `tic`"):
        monitor.tic()


def test_rows_can_be_sorted_and_chosen() -> None:
    net, monitor = small(), ls.Monitor(pattern=".*weight", sort=True)
    net.install_monitor(monitor)
    names = [(row.name, row.replica) for row in watched(net, monitor, data())]
    kinds = ["0.weight", "0.weight.grad", "1.weight", "1.weight.grad"]
    assert names == [(name, replica) for name in kinds for replica in (0, 1)]


def hooks_of(net: ls.DataParallel) -> int:
    modules = [module for replica in net.replicas for module in replica.modules()]
    parameters = [parameter for replica in net.replicas for parameter in replica.parameters()]
    on_modules = sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in modules)
    return on_modules + sum(len(each._backward_hooks or ()) for each in parameters)


def test_it_changes_no_bit_and_leaves_no_hook() -> None:
    found = set()
    for monitored in (True, False):
        net = small(num_shards=3)
        net.module.append(nn.Dropout(0.5))
        monitor = ls.Monitor(2)
        net.install_monitor(monitor if monitored else None)
        torch.manual_seed(3)
        for _ in range(3):
            watched(net, monitor, data())
            assert hooks_of(net) == 0
        found.add(ls.digest(net, [parameter.grad for parameter in net.parameters()]))
    assert len(found) == 1


def test_what_comes_after_the_step_is_not_reported() -> None:
    net, monitor = small(), ls.Monitor(2, pattern="0.*grad")
    net.install_monitor(monitor)
    monitor.tic()
    loss = net(data()).sum()
    assert monitor.toc() == []
    monitor.tic()
    loss.backward()
    assert monitor.toc() == []


def test_it_can_be_taken_away_and_forgets_what_is_gone() -> None:
    net, monitor = small(), ls.Monitor()
    net.install_monitor(monitor)
    net(data())
    net.install_monitor(None)
    assert {row.shard for row in watched(net, monitor, data())} == {None}
    del net
    monitor.tic()
    assert monitor.toc() == []


def test_one_monitor_may_watch_several_groups() -> None:
    nets, monitor = [small(1), small(1)], ls.Monitor(pattern="output$|0.weight$")
    for net in nets:
        net.install_monitor(monitor)
        net.install_monitor(monitor)
    monitor.tic()
    for net in nets:
        net(data())
    assert [row.name for row in monitor.toc()] == ["output"] * 2 + ["0.weight"] * 2


def test_it_watches_a_group() -> None:
    model, monitor = nn.Linear(3, 2), ls.Monitor(pattern=".*grad$")
    with ls.ReplicaGroup(model, ["cpu"] * 2, workloads=[2, 1]) as group:
        group.install_monitor(monitor)
        monitor.tic()
        group.forward(torch.ones(6, 3))
        group.backward(torch.ones(6, 2))
        rows = monitor.toc()
    assert [(row.name, row.value) for row in rows if row.name == "bias.grad"] == [
        ("bias.grad", 4.0),
        ("bias.grad", 2.0),
    ]


def test_recomputed_forwards_are_reported_once() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=False)
            return output

    net, monitor = ls.DataParallel(Checkpointed(), ["cpu"] * 2), ls.Monitor(pattern=".*output$")
    net.install_monitor(monitor)
    assert [row.name for row in watched(net, monitor, data())] == ["layer.output", "output"] * 2


def test_rows_are_printed_as_lines() -> None:
    net, monitor = small(1), ls.Monitor(pattern="1.num_batches_tracked|output")
    net.install_monitor(monitor)
    monitor.tic()
    net(torch.full((2, 3), float("nan")))
    through = io.BytesIO()
    lines = io.TextIOWrapper(through, encoding="utf-8")  # gathers what it is given, as a pipe's file does
    monitor.toc_print(lines)
    assert through.getvalue().decode().splitlines() == [
        "      1  output                                     nan  cpu, replica 0, shard 0, 4 not finite",
        "      1  1.num_batches_tracked                        1  cpu",
    ]


def test_without_a_file_it_prints_to_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    net, monitor = small(1), ls.Monitor(pattern="0.weight$")
    net.install_monitor(monitor)
    monitor.tic()
    monitor.toc_print()
    assert capsys.readouterr().out.startswith("      1  0.weight")


def test_a_copy_of_the_module_is_not_watched() -> None:
    net, monitor = small(1), ls.Monitor()
    net.install_monitor(monitor)
    twins = [copy.deepcopy(net), pickle.loads(pickle.dumps(net))]  # noqa: S301 - our own bytes
    monitor.tic()
    for twin in twins:
        twin(data())
    assert {row.shard for row in monitor.toc()} == {None}


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="`interval` must be at least 1, got 0"):
        ls.Monitor(0)
    with pytest.raises(ValueError, match=r"`pattern` must be a regular expression, got '\('"):
        ls.Monitor(pattern="(")
    net, monitor = small(1), ls.Monitor(stat=lambda tensor: tensor)
    net.install_monitor(monitor)
    monitor.tic()
    with pytest.raises(ls.ReplicaError, match=r"`stat` must return one number for a tensor, got shape \(7, 3\)"):
        net(data())
    with pytest.raises(ls.StateError, match="unknown: 'steps'"):
        monitor.load_state_dict({"steps": 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int64])
def test_the_usual_statistic_is_the_root_mean_square(dtype: torch.dtype) -> None:
    assert rms(torch.tensor([3, 4, 5], dtype=dtype)).item() == pytest.approx((50 / 3) ** 0.5)
    assert rms(torch.zeros(0, dtype=dtype)).item() == 0.0
    assert rms(torch.full((10,), 1000, dtype=dtype)).item() == pytest.approx(1000)
