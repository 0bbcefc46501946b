"""Running statistics: what batch norm writes, it writes past the version counter of its buffers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls

BATCH = 16


class Net(nn.Module):
    """Batch norm, and a buffer that no forward writes, with a value that no mean of itself would keep."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("table", torch.rand(5, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


@pytest.fixture(autouse=True)
def one_thread():
    """What is computed here for comparison must round as replicas do: on one intra-op thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(num_devices: int, num_shards: int, num_updates: int = 3) -> tuple[nn.Module, nn.Module]:
    """Return the model and a copy of what it was before the last update."""
    generator = torch.Generator().manual_seed(1)
    dataset = TensorDataset(
        torch.randn(4 * BATCH, 4, generator=generator), torch.randn(4 * BATCH, 3, generator=generator)
    )
    torch.manual_seed(2)
    model = Net()
    updater = ls.ParallelUpdater(
        ls.BatchIterator(dataset, BATCH),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * num_devices,
        num_shards=num_shards,
        loss_fn=ls.supervised(nn.functional.mse_loss),
    )
    for _ in range(num_updates - 1):
        updater.update()
    before = copy.deepcopy(model)
    before.inputs = dataset.tensors[0][(num_updates - 1) * BATCH : num_updates * BATCH]
    updater.update()
    updater.finalize()
    return model, before


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_running_statistics_are_the_mean_over_shards_that_all_began_alike(num_devices, num_shards):
    model, before = train(num_devices, num_shards)
    made = []
    for part in before.inputs.chunk(num_shards):
        replica = copy.deepcopy(before)
        replica(part)
        made.append(replica.norm)
    # Shards of 16, 8 or 4 samples: weights are powers of two, so every product and quotient is exact,
    # and the tree of up to four is two levels of pairs.
    for name in ("running_mean", "running_var"):
        values = [getattr(norm, name) for norm in made]
        while len(values) > 1:
            values = [(left + right) / 2 for left, right in zip(values[::2], values[1::2], strict=True)]
        assert torch.equal(getattr(model.norm, name), values[0])
    assert int(model.norm.num_batches_tracked) == 3


def test_a_buffer_that_no_shard_writes_keeps_its_bits():
    # Three shards of 6, 5 and 5 samples: a weighted mean of equal numbers would round.
    model, before = train(num_devices=2, num_shards=3)
    assert torch.equal(model.table, before.table)


def test_running_statistics_of_one_shard_are_those_of_a_plain_loop():
    model, before = train(num_devices=1, num_shards=1)
    before(before.inputs)
    assert torch.equal(model.norm.running_mean, before.norm.running_mean)
    assert torch.equal(model.norm.running_var, before.norm.running_var)
