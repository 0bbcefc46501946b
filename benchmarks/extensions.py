"""Measure what the trainer and the usual extensions add to an update.

    python benchmarks/extensions.py                    100 rounds of 100 updates
    python benchmarks/extensions.py --rounds 20 --updates 500

Each round runs updates of a small network on one device in turns: by calls of `update` alone, by a trainer without
extensions, with each extension, and with all of them. All of them train the same network. The bar draws to a
pseudo-terminal; the log and TensorBoard write the means of every 10 updates.

"Between updates" is the time from the start of the first update to the end of the last call of an extension before the
last update, less the time within updates. Most of what an extension costs is there, and the noise of a machine hardly
reaches it. "Beyond update" and "beyond the trainer" are the differences to `update` alone and to the trainer without
extensions, which are much noisier. All are means over the updates of a round, of which the table has the median over
rounds and the quartiles. What extensions do once, at the start and at the end of a run, is left out.
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
    """Create an updater on one device that is warm."""
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
    return updater


def alone(updater: Timed, updates: int) -> float:
    """Return the seconds per update without a trainer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a trainer does
    updater.began = 0.0
    for _ in range(updates):
        updater.update()
    torch.set_num_threads(threads)
    return (updater.ended - updater.began) / updates


def trained(updater: Timed, updates: int, make: Callable[[TextIO], list[ls.Extension]]) -> tuple[float, float]:
    """Return the seconds per update of a trainer with extensions, and those between updates."""
    updater.began = updater.within = 0.0
    until = (updater.iteration + updates, "update")
    with tempfile.TemporaryDirectory() as out, terminal() as screen:
        ls.Trainer(updater, until, out=Path(out), extensions=make(screen)).run()
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
    updater = build()
    trained(updater, 20, CASES["trainer, all three"])  # imports TensorBoard
    plain: list[float] = []
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        plain.append(alone(updater, options.updates))
        for name, make in CASES.items():
            found[name].append(trained(updater, options.updates, make))
    updater.finalize()
    print(f"{'update alone':24}{statistics.median(plain) * 1e6:7.1f} µs")
    print(f"{'in µs':24}{'between updates':>22}{'beyond update':>22}{'beyond the trainer':>22}")
    trainer = [total for total, _ in found["trainer"]]
    for name, seconds in found.items():
        totals = [total for total, _ in seconds]
        columns = [[between for _, between in seconds], differences(totals, plain), differences(totals, trainer)]
        print(f"{name:24}{''.join(f'{in_microseconds(each):>22}' for each in columns)}")


def differences(seconds: list[float], base: list[float]) -> list[float]:
    """Return by how much each round took longer than the same round of another case."""
    return [ours - theirs for ours, theirs in zip(seconds, base, strict=True)]


def in_microseconds(seconds: list[float]) -> str:
    """Return the median and the quartiles of times."""
    low, median, high = (1e6 * each for each in statistics.quantiles(seconds, n=4))
    return f"{median:+.0f} ({low:+.0f}..{high:+.0f})"


if __name__ == "__main__":
    main()
