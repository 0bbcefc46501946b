"""Classify graphs of different sizes with PyTorch Geometric, whose batches are one large graph, by a converter.

    python examples/libraries/graphs.py            on one CPU device
    python examples/libraries/graphs.py cpu cpu    on two: the same digest

The iterator yields lists of graphs. They are cut into shards by graph, and the converter joins those of a shard. The
task is to tell rings from stars.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GCNConv, global_mean_pool

import lockstep as ls


def graph(index: int) -> Data:
    """Return a ring for even numbers and a star for odd ones, each of 4 to 11 nodes."""
    nodes = 4 + index % 8
    ends = torch.arange(nodes)
    starts = (ends + 1) % nodes if index % 2 == 0 else torch.zeros_like(ends)
    edges = torch.stack([torch.cat([starts, ends]), torch.cat([ends, starts])])
    features = torch.randn(nodes, 8, generator=torch.Generator().manual_seed(index))
    return Data(x=features, edge_index=edges, y=torch.tensor([index % 2]))


class Network(nn.Module):
    """Two graph convolutions, and a classifier of the mean over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = GCNConv(8, 32)
        self.second = GCNConv(32, 32)
        self.last = nn.Linear(32, 2)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Return the scores of both classes for each graph."""
        hidden = self.first(batch.x, batch.edge_index).relu()
        hidden = self.second(hidden, batch.edge_index).relu()
        return self.last(global_mean_pool(hidden, batch.batch))


def join(graphs: Sequence[Data], device: torch.device | str) -> Batch:
    """Join the graphs of a shard into one, on the device of the shard."""
    return Batch.from_data_list(list(graphs)).to(device)


def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean loss over the graphs of a shard."""
    return nn.functional.cross_entropy(model(batch), batch.y)


def main(devices: list[str]) -> None:
    """Train for ten epochs, and print the digest of the weights."""
    torch.manual_seed(0)
    model = Network()
    updater = ls.ParallelUpdater(
        ls.BatchIterator([graph(index) for index in range(128)], batch_size=32, shuffle=True, seed=0),
        torch.optim.Adam(model.parameters(), lr=1e-2),
        model,
        devices=devices,
        num_shards=4,
        converter=join,
        loss_fn=loss_fn,
    )
    trainer = ls.Trainer(updater, until=(10, "epoch"), out="runs/graphs")
    trainer.extend(ls.extensions.LogReport(trigger=(5, "epoch")))
    trainer.extend(ls.extensions.PrintReport(["epoch", "main/loss"]), trigger=(5, "epoch"))
    trainer.run()
    print(ls.digest(model))


if __name__ == "__main__":
    main(sys.argv[1:] or ["cpu"])
