"""After a fork: updaters and groups say what to do, modules begin anew, and workers of a DataLoader are unaffected."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.runs import Placement, finalized, updater_for
from tests.support.workloads import MLP

pytestmark = [
    pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system does not fork"),
    # Python warns of any fork of a process with threads, which this is about.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

SECONDS = 120


def in_a_fork(action: Callable[[], Any]) -> Any:
    """Return what an action returns in a forked process, or the name and message of what it raises."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        try:
            sender.send(action())
        except Exception as error:  # noqa: BLE001 - what is raised is the answer
            sender.send((type(error).__name__, str(error)))

    process = context.Process(target=work)
    process.start()
    try:
        assert receiver.poll(SECONDS), "the forked process hangs"
        return receiver.recv()
    finally:
        process.kill()
        process.join()


RULE = "cannot be used in a process forked from the one that created it"


@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_updater_says_what_to_do(num_devices: int) -> None:
    with finalized(updater_for(MLP, Placement(num_devices), num_shards=4)) as updater:
        updater.update()
        batch = updater.get_iterator("main").peek()
        updater.compute_gradients(batch)
        actions = [
            updater.update,
            updater.find_nonfinite,
            updater.apply_gradients,
            lambda: updater.compute_gradients(batch),
        ]
        for action in actions:
            kind, message = in_a_fork(action)
            assert kind == "OrderError"
            assert message.startswith(f"A ParallelUpdater {RULE}")
            assert message.endswith("start that process with multiprocessing's 'spawn' or with lockstep.launch.")
        assert updater.iteration == 1


def test_an_updater_may_be_built_in_the_child_and_saved_there() -> None:
    def train() -> str:
        with finalized(updater_for(MLP, num_shards=4)) as updater:
            updater.update()
            return ls.digest(updater.state_dict())

    with finalized(updater_for(MLP, num_shards=4)) as updater:
        updater.update()
        assert in_a_fork(lambda: ls.digest(updater.state_dict())) == train() == in_a_fork(train)


def test_a_group_says_what_to_do() -> None:
    with ls.ReplicaGroup(nn.Linear(3, 2), devices=["cpu", "cpu"]) as group:
        group.forward(torch.ones(4, 3))
        kind, message = in_a_fork(lambda: group.forward(torch.ones(4, 3)))
        assert kind == "OrderError"
        assert message.startswith(f"A ReplicaGroup {RULE}")


def test_a_module_starts_threads_of_its_own() -> None:
    torch.manual_seed(3)
    module = ls.DataParallel(nn.Linear(3, 2), devices=["cpu", "cpu"])

    def gradient() -> list[Any]:
        module.zero_grad()
        output = module(torch.arange(12.0).view(4, 3))
        output.square().sum().backward()
        return [output.tolist(), module.module.weight.grad.tolist()]

    try:
        expected = gradient()
        assert in_a_fork(gradient) == expected
        assert gradient() == expected
    finally:
        module.release()


@pytest.mark.slow
def test_the_first_backward_of_a_fork_is_safe_in_threads() -> None:
    """Torch builds its autograd engine anew in a fork, without a lock: one process in a hundred ended by a signal."""
    module = ls.DataParallel(nn.Linear(3, 2), devices=["cpu", "cpu"])

    def backward() -> int:
        module(torch.arange(12.0).view(4, 3)).square().sum().backward()
        return 0

    try:
        for _ in range(400):
            backward()
            child = os.fork()
            if child == 0:
                os._exit(backward())
            assert os.waitpid(child, 0)[1] == 0
    finally:
        module.release()


class Doubled:
    """A dataset in the process of an updater, whose workers are forked while the updater's threads wait."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((6,), float(index)), index % 3


def test_workers_of_a_data_loader_are_unaffected() -> None:
    loader = torch.utils.data.DataLoader(Doubled(), 6, num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = ls.supervised(nn.functional.cross_entropy)
    with finalized(ls.ParallelUpdater(loader, optimizer, model, devices=["cpu"] * 2, loss_fn=loss)) as updater:
        for _ in range(5):  # more than an epoch, so workers are forked a second time
            updater.update()
        assert updater.epoch == 1
