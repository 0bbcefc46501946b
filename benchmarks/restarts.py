"""Measure how long a run needs from the loss of a worker to its next new update.

    python benchmarks/restarts.py [--rounds 5] [--workers 3]

Each round starts a small run by `lockstep run --max-restarts 1`, kills one worker with SIGKILL, and waits until an
update is finished that was not finished before. That includes to notice the loss, the emergency snapshot of the
survivors, the end of the processes, the start of new ones with their imports, and to resume. It prints the seconds of
each round, their median, and the load of the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import TextIO, cast

TRAINING = """
import os, sys
import torch
import lockstep as ls

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randint(10, (4096,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
loss = ls.supervised(torch.nn.functional.cross_entropy)
batches = ls.BatchIterator(data, 96, shuffle=True, seed=1)
updater = ls.ParallelUpdater(batches, optimizer, model, devices=["cpu"], num_shards=6, loss_fn=loss)
trainer = ls.Trainer(updater, (1_000_000, "update"), out=sys.argv[1])
trainer.extend(ls.extensions.Snapshot(), trigger=(100, "update"))
rank = os.environ["RANK"]
trainer.extend(lambda trainer: sys.stdout.write(f"{rank} {os.getpid()} {trainer.updater.iteration}\\n"), name="told")
trainer.run(resume="auto")
"""


def next_line(output: TextIO) -> tuple[int, int, int]:
    """Return the rank, the process and the update of the next line of a run."""
    rank, process, update = output.readline().split()
    return int(rank), int(process), int(update)


def seconds_of_round(workers: int, victim: int, updates: int) -> float:
    """Return the seconds from the kill of a rank after so many updates to the next new update."""
    with tempfile.TemporaryDirectory() as out:
        script = os.path.join(out, "training.py")  # noqa: PTH118 - a string for the command line
        with open(script, "w", encoding="utf-8") as file:  # noqa: PTH123 - as above
            file.write(TRAINING)
        command = [sys.executable, "-u", "-m", "lockstep", "run", "-n", str(workers), "--max-restarts", "1"]
        variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
        command += [script, out]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables) as run:  # noqa: S603 - our own
            output = cast("TextIO", run.stdout)
            newest, process, rank = 0, 0, -1
            first = set[int]()
            while newest < updates or rank != victim or len(first) < workers:
                rank, process, update = next_line(output)
                first.add(process)
                newest = max(newest, update)
            killed = time.monotonic()
            os.kill(process, signal.SIGKILL)
            # What survivors finish after the kill does not count: a new process has to go on from there.
            while process in first or update <= newest:
                _, process, update = next_line(output)
                newest = max(newest, update) if process in first else newest
            seconds = time.monotonic() - killed
            run.send_signal(signal.SIGTERM)
            run.communicate()
        return seconds


def main() -> None:
    """Run the rounds, and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=3)
    options = parser.parse_args()
    drawn = random.Random(1)  # noqa: S311 - which rank is killed when
    found = []
    for number in range(options.rounds):
        victim = number % options.workers
        found.append(seconds_of_round(options.workers, victim, drawn.randrange(20, 120)))
        sys.stdout.write(f"rank {victim} killed: {found[-1]:.1f} s, load {os.getloadavg()[0]:.1f}\n")
        sys.stdout.flush()
    sys.stdout.write(f"median {statistics.median(found):.1f} s, longest {max(found):.1f} s\n")


if __name__ == "__main__":
    main()
