"""Measure what the trainer and the usual extensions add to an update.

    python benchmarks/extensions.py                    8 rounds of 1000 updates
    python benchmarks/extensions.py --rounds 4 --updates 500

Each round runs the same updates of a small network on one device in turns: by calls of `update` alone, by a trainer
without extensions, with each extension, and with all of them. The bar draws to a pseudo-terminal; the log and
TensorBoard write the means of every 10 updates. A figure is the median over rounds of the time per update above that of
`update` alone. It covers the whole run, from the first update to the end of `finalize`.
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


def build() -> ls.ParallelUpdater:
    """Create a run on one device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    samples = TensorDataset(torch.randn(512, 32), torch.randint(10, (512,)))
    return ls.ParallelUpdater(
        ls.BatchIterator(samples, 32, shuffle=True),
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        model,
        devices=["cpu"],
        num_shards=1,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
    )


def alone(updates: int) -> float:
    """Return the seconds per update without a trainer."""
    updater = build()
    with ls.replicas.OneIntraOpThread():
        for _ in range(WARM_UP):
            updater.update()
        start = time.perf_counter()
        for _ in range(updates):
            updater.update()
        seconds = time.perf_counter() - start
    updater.finalize()
    return seconds / updates


def trained(updates: int, make: Callable[[TextIO], list[ls.Extension]]) -> float:
    """Return the seconds per update of a trainer with extensions."""
    updater = build()
    for _ in range(WARM_UP):
        updater.update()
    with tempfile.TemporaryDirectory() as out, terminal() as screen:
        trainer = ls.Trainer(updater, (WARM_UP + updates, "update"), out=Path(out), extensions=make(screen))
        start = time.perf_counter()
        trainer.run()
        return (time.perf_counter() - start) / updates


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
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--updates", type=int, default=1000)
    options = parser.parse_args()
    trained(20, CASES["trainer, all three"])  # imports TensorBoard
    added: dict[str, list[float]] = {name: [] for name in CASES}
    plain = []
    for _ in range(options.rounds):
        plain.append(alone(options.updates))
        for name, make in CASES.items():
            added[name].append(trained(options.updates, make) - plain[-1])
    print(f"{'update alone':24}{statistics.median(plain) * 1e6:7.1f} µs")
    for name, seconds in added.items():
        middle, least, most = (value * 1e6 for value in (statistics.median(seconds), min(seconds), max(seconds)))
        print(f"{name:24}{middle:+7.1f} µs   {least:+.1f}..{most:+.1f}")


if __name__ == "__main__":
    main()
