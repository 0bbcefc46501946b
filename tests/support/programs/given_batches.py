"""A script for torchrun that gives its ranks other batches, in each of the ways in which that happens.

Writes what came of each way to a file of the folder that it is called with.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
)

import lockstep as ls

RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
BATCH = 8
NUM_UPDATES = 8

generator = torch.Generator().manual_seed(3)
INPUTS, TARGETS = torch.randn(64, 6, generator=generator), torch.randint(3, (64,), generator=generator)
DATA = TensorDataset(INPUTS, TARGETS)
LOSS = ls.supervised(nn.functional.cross_entropy)


class ByRank(IterableDataset[Any]):
    """What many scripts do with a stream of samples: every rank takes each SIZE-th of them."""

    def __iter__(self) -> Iterator[Any]:
        return iter([DATA[index] for index in range(RANK, len(DATA), SIZE)])


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def updater(source: Any, model: nn.Module | None = None, **options: Any) -> ls.ParallelUpdater:
    model = network() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return ls.ParallelUpdater(source, optimizer, model, devices=["cpu"], num_shards=4, **{"loss_fn": LOSS, **options})


def train(source: Any, **options: Any) -> dict[str, Any]:
    """Train until the end of an epoch; tell what was raised, after how many updates, and whether anything moved."""
    made = updater(source, **options)
    before = ""
    try:
        while made.epoch == 0 and made.iteration < NUM_UPDATES:
            before = ls.digest(made.get_all_models()["main"])
            made.update()
            before = ls.digest(made.get_all_models()["main"])
    finally:
        STATE["updates"] = made.iteration
        STATE["unchanged"] = before == ls.digest(made.get_all_models()["main"])
        made.finalize()
    return {"end": before}


STATE: dict[str, Any] = {}


def halves(batch: int = BATCH) -> list[Any]:
    """Cut every batch into parts, one for each rank."""
    own = range(RANK, 64, SIZE)
    return [(INPUTS[own][at : at + batch], TARGETS[own][at : at + batch]) for at in range(0, 64 // SIZE, batch)]


def seeded(seed: int) -> DataLoader[Any]:
    torch.manual_seed(seed)
    return DataLoader(DATA, BATCH, shuffle=True)


def nano_gpt() -> Iterator[Any]:
    """Draw batches as nanoGPT's `get_batch` does, whose seed has the rank as its offset."""
    draws = torch.Generator().manual_seed(1337 + RANK)
    while True:
        places = torch.randint(len(DATA), (BATCH,), generator=draws)
        yield INPUTS[places], TARGETS[places]


def by_hand() -> dict[str, Any]:
    made = updater(DATA_BATCHES())
    made.compute_gradients(halves()[0])
    return {}


def DATA_BATCHES() -> ls.BatchIterator:  # noqa: N802 - a new one for each program
    return ls.BatchIterator(DATA, BATCH)


def step_on_parts(made: Any, batch: Any) -> None:
    inputs, targets = (torch.stack(part) for part in zip(*batch, strict=True))
    mine = slice(RANK, None, SIZE)
    made.compute_gradients((inputs[mine], targets[mine]))
    made.apply_gradients()


def step_on_another(made: Any, batch: Any) -> None:
    made.next_batch("noise")  # which is no part of a gradient
    made.compute_gradients(batch)
    made.apply_gradients()


def wrapped() -> dict[str, Any]:
    ls.find_communicator()
    updater(DATA_BATCHES(), DistributedDataParallel(network()))
    return {}


PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {
    "sampler": lambda: train(DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, SIZE, RANK))),
    "batch sampler": lambda: train(
        DataLoader(DATA, batch_sampler=BatchSampler(DistributedSampler(DATA, SIZE, RANK), BATCH, drop_last=False))
    ),
    "sampler in a function": lambda: train(lambda: DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, SIZE))),
    "iterable": lambda: train(DataLoader(ByRank(), BATCH)),
    "seed of a loader": lambda: train(seeded(1337 + RANK)),
    "seed of an iterator": lambda: train(ls.BatchIterator(DATA, BATCH, shuffle=True, seed=1337 + RANK)),
    "get_batch": lambda: train(nano_gpt()),
    "list": lambda: train(halves()),
    "last batch": lambda: train([(INPUTS[:8], TARGETS[:8])] * 3 + [(INPUTS[: 8 - 4 * RANK], TARGETS[: 8 - 4 * RANK])]),
    "subset": lambda: train(ls.BatchIterator(Subset(DATA, range(RANK, 64, SIZE)), BATCH)),
    "dataset": lambda: train(ls.BatchIterator(TensorDataset(INPUTS[RANK::SIZE], TARGETS[RANK::SIZE]), BATCH)),
    "order": lambda: train(ls.BatchIterator(DATA, BATCH, order_sampler=lambda order, _: order[:: 1 - 2 * RANK])),
    "samples": lambda: train(
        ls.IterableBatches([[DATA[RANK + 2 * k] for k in range(BATCH)]] * 2, batches_of="samples")
    ),
    "accumulated": lambda: train([(INPUTS[:8], TARGETS[:8]), halves()[1]], accumulate=2),
    "by hand": by_hand,
    "part in a step": lambda: train(DATA_BATCHES(), step_fn=step_on_parts),
    "other iterator": lambda: train(
        {"main": DATA_BATCHES(), "noise": [torch.full((4,), float(RANK))]}, step_fn=step_on_another
    ),
    "wrapped model": wrapped,
    "same": lambda: train(seeded(1337)),
    "same samplers": lambda: train(
        DataLoader(DATA, BATCH, sampler=RandomSampler(DATA, generator=torch.Generator().manual_seed(1)))
    ),
    "sampler of one": lambda: train(DataLoader(DATA, BATCH, sampler=DistributedSampler(DATA, 1, 0))),
}


def outcome(program: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    STATE.clear()
    try:
        found = program()
    except Exception as error:  # noqa: BLE001 - what is raised is the answer
        found = {"kind": type(error).__name__, "message": str(error), "rank": getattr(error, "rank", None)}
    return {"kind": "nothing", **found, **STATE}


if __name__ == "__main__":
    found = {name: outcome(program) for name, program in PROGRAMS.items()}
    (Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(found))
