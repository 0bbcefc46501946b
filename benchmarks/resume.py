"""Measure how much later the first update of a resumed run ends than that of a run that starts from scratch.

    python benchmarks/resume.py                        a state of 100 MB, 10 rounds, about a minute
    python benchmarks/resume.py --megabytes 15 --rounds 20

Both runs alternate in one process: each builds model, updater and trainer anew and runs one update on two devices. The
resumed run chooses the newest snapshot of its folder, verifies the SHA-256 of every tensor and loads it. It prints the
medians over rounds, and the difference beside the target of 3 ms per MB and 50 ms.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lockstep as ls

MS_PER_MEGABYTE = 3.0
FIXED_MS = 50.0
BATCH_SIZE = 8


def build(out: Path, megabytes: float, updates: int) -> ls.Trainer:
    """Create a run whose weights and momentum take so many megabytes, most of them in one square layer."""
    torch.manual_seed(0)
    width = round((megabytes * 1e6 / 8) ** 0.5)
    model = nn.Linear(width, width, bias=False)
    data = TensorDataset(torch.randn(BATCH_SIZE, width), torch.randn(BATCH_SIZE, width))
    updater = ls.ParallelUpdater(
        ls.BatchIterator(data, BATCH_SIZE),
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model,
        devices=["cpu", "cpu"],
        num_shards=2,
        loss_fn=ls.supervised(mse_loss),
    )
    return ls.Trainer(updater, (updates, "update"), out=out)


def time_of_first_update(out: Path, megabytes: float, *, resume: bool) -> float:
    """Return the seconds from building a run to the end of its first update."""
    start = time.perf_counter()
    trainer = build(out, megabytes, 2 if resume else 1)
    ended: list[float] = []
    trainer.extend(lambda _: ended.append(time.perf_counter()), trigger=(1, "update"))
    trainer.run(resume="auto" if resume else None)
    if len(ended) != 1:
        raise RuntimeError(f"The run must make one update, made {len(ended)}.")
    return ended[0] - start


def main() -> None:
    """Parse the options, measure, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of weights and momentum")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        saved, fresh = Path(folder, "saved"), Path(folder, "fresh")
        trainer = build(saved, options.megabytes, 1)
        trainer.extend(ls.extensions.Snapshot(), trigger=(1, "update"))
        trainer.run()
        # The first round allocates memory, and does not count.
        rounds = [
            [time_of_first_update(out, options.megabytes, resume=out is saved) for out in (fresh, saved)]
            for _ in range(1 + options.rounds)
        ][1:]
    scratch, resumed = (1e3 * statistics.median(times) for times in zip(*rounds, strict=True))
    difference = 1e3 * statistics.median([after - before for before, after in rounds])
    target = MS_PER_MEGABYTE * options.megabytes + FIXED_MS
    print(f"first update from scratch {scratch:.0f} ms, resumed {resumed:.0f} ms: {difference:.0f} ms later")
    print(f"target {target:.0f} ms for {options.megabytes:g} MB: {'met' if difference <= target else 'MISSED'}")
    sys.exit(0 if difference <= target else 1)


if __name__ == "__main__":
    main()
