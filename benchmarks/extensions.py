"""Measure what the trainer and the usual extensions add to an update.

    python benchmarks/extensions.py                    100 rounds of 100 updates
    python benchmarks/extensions.py --rounds 20 --updates 500

Each round runs the same updates of a small network on one device in turns: by calls of `update` alone, by a trainer
without extensions, with each extension, and with all of them. The bar draws to a pseudo-terminal; the log and
TensorBoard write the means of every 10 updates.

"Between updates" is the time from the start of the first update to the end of the last call of an extension before the
last update, less the time within updates. Most of what an extension costs is there, and the noise of a machine hardly
reaches it. "In all" is the difference to `update` alone, which is much noisier. Both are means over the updates of a
round, of which the table has the median over rounds, and the smallest and the largest one. What extensions do once, at
the start and at the end of a run, is left out.
"""

from __future__ import annotations

import argparse
import os
import pty
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.extensions import LogReport, ProgressBar, TensorBoardLogger, Throughput

EVERY = (10, "update")
WARM_UP = 20
"""Updates that are not measured."""


@contextmanager
def terminal() -> Iterator[TextIO]:
    """Open a pseudo-terminal that something reads, as a window would."""
    reader, writer = pty.openpty()

    def read() -> None:
        try:
            while os.read(reader, 1 << 16):
                pass
        except OSError:  # the terminal is closed
            pass

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(writer, "w") as out:
        yield out
    thread.join()
    os.close(reader)


class Timed(ls.ParallelUpdater):
    """Measures how long its updates take."""

    began = ended = within = 0.0

    def update(self) -> ls.UpdateResult:
        """Run one update, and add up its time."""
        start = time.perf_counter()
        result = super().update()
        self.ended = time.perf_counter()
        self.began = self.began or start
        self.within += self.ended - start
        return result


def build() -> Timed:
    """Create a run on one device that is warm."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    samples = TensorDataset(torch.randn(512, 32), torch.randint(10, (512,)))
    updater = Timed(
        ls.BatchIterator(samples, 32, shuffle=True),
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model,
        devices=["cpu"],
        num_shards=1,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
    )
    for _ in range(WARM_UP):
        updater.update()
    updater.began = updater.within = 0.0
    return updater


def alone(updates: int) -> float:
    """Return the seconds per update without a trainer."""
    updater, threads = build(), torch.get_num_threads()
    torch.set_num_threads(1)  # as a trainer does
    for _ in range(updates):
        updater.update()
    torch.set_num_threads(threads)
    updater.finalize()
    return (updater.ended - updater.began) / updates


def trained(updates: int, make: Callable[[TextIO], list[ls.Extension]]) -> tuple[float, float]:
    """Return the seconds per update of a trainer with extensions, and those between updates."""
    updater = build()
    with tempfile.TemporaryDirectory() as out, terminal() as screen:
        ls.Trainer(updater, (WARM_UP + updates, "update"), out=Path(out), extensions=make(screen)).run()
    seconds = updater.ended - updater.began
    return seconds / updates, (seconds - updater.within) / (updates - 1)


USUAL: dict[str, Callable[[TextIO], ls.Extension]] = {
    "bar": lambda screen: ProgressBar(out=screen),
    "JSON lines": lambda _: LogReport(trigger=EVERY),
    "TensorBoard": lambda _: TensorBoardLogger(trigger=EVERY),
}
CASES: dict[str, Callable[[TextIO], list[ls.Extension]]] = {
    "trainer": lambda _: [],
    **{f"trainer, {name}": lambda screen, make=make: [make(screen)] for name, make in USUAL.items()},
    "trainer, all three": lambda screen: [make(screen) for make in USUAL.values()],
    "trainer, Throughput": lambda _: [Throughput(trigger=EVERY)],
}


def main() -> None:
    """Measure all cases in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--updates", type=int, default=100)
    options = parser.parse_args()
    trained(20, CASES["trainer, all three"])  # imports TensorBoard
    plain: list[float] = []
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        plain.append(alone(options.updates))
        for name, make in CASES.items():
            found[name].append(trained(options.updates, make))
    print(f"{'update alone':24}{statistics.median(plain) * 1e6:7.1f} µs")
    for name, seconds in found.items():
        between = [each * 1e6 for _, each in seconds]
        added = [(total - base) * 1e6 for (total, _), base in zip(seconds, plain, strict=True)]
        columns = [
            f"{statistics.median(each):+8.1f} ({min(each):+.1f}..{max(each):+.1f}) µs" for each in (between, added)
        ]
        print(f"{name:24}between updates {columns[0]:34}in all {columns[1]}")


if __name__ == "__main__":
    main()
