"""A DataLoader that shuffles cannot be resumed with equal bits, which the warning says; the one that it names can."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.errors import ReplayWarning

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it

CURE = "Use StatefulDataLoader of torchdata.stateful_dataloader instead"


@pytest.fixture(scope="module")
def stateful() -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader", reason="the loader is torchdata's").StatefulDataLoader


def updater_with(kind: Any, *, num_workers: int = 0) -> ls.ParallelUpdater:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(20, 4, generator=generator), torch.randint(3, (20,), generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    # Without a generator of its own, as most programs have it: the order is drawn from torch's default one.
    batches = kind(TensorDataset(inputs, targets), batch_size=4, shuffle=True, num_workers=num_workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_fn = ls.supervised(nn.functional.cross_entropy)
    return ls.ParallelUpdater(batches, optimizer, model, devices=["cpu", "cpu"], num_shards=4, loss_fn=loss_fn)


def weights_after(updater: ls.ParallelUpdater, iterations: int) -> str:
    while updater.iteration < iterations:
        updater.update()
    updater.finalize()
    return ls.digest(updater.get_all_models()["main"])


def resumed(kind: Any, at: int, iterations: int, *, num_workers: int = 0) -> tuple[str, list[str]]:
    """Return the weights of a run that was resumed, in a process with other random numbers, and its warnings."""
    first = updater_with(kind, num_workers=num_workers)
    weights_after(first, at)
    second = updater_with(kind, num_workers=num_workers)
    torch.manual_seed(77)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ReplayWarning)
        second.load_state_dict(first.state_dict())
        return weights_after(second, iterations), [str(each.message) for each in caught]


@pytest.mark.parametrize("at", [3, 5, 8])
def test_a_stateful_loader_resumes_with_equal_bits(stateful: Any, at: int) -> None:
    expected = weights_after(updater_with(stateful), 12)
    assert resumed(stateful, at, 12) == (expected, [])


def test_so_does_one_with_workers(stateful: Any) -> None:
    expected = weights_after(updater_with(stateful, num_workers=2), 8)
    assert resumed(stateful, 3, 8, num_workers=2) == (expected, [])


def test_a_plain_loader_does_not_and_the_warning_names_the_other() -> None:
    expected = weights_after(updater_with(DataLoader), 12)
    found, messages = resumed(DataLoader, 3, 12)
    assert found != expected
    assert len(messages) == 1
    assert CURE in messages[0]
