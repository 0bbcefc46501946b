"""Compare the processor time of an update with portable kernels and without, for the models of `workloads.py`.

    python benchmarks/portable.py [--rounds 5]

Each round times a plain loop with one thread in two processes in turns, so that disturbances affect both. A ratio above
1 says how many times as long portable kernels take. On AMD processors it should be at most 1.1 for `tiny`, `mlp` and
`encoder`, and 1.5 for `convnet`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Final

import torch
from torch.nn import functional
from workloads import WORKLOADS

import lockstep as ls
from lockstep.portable import PORTABLE_ENV

UPDATES: Final = {"tiny": 200, "mlp": 12, "convnet": 2, "encoder": 4}
"""The number of updates of one timing, about half a second."""


def serve(name: str) -> None:
    """Time updates whenever a line arrives, and answer with the milliseconds of an update."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    work = WORKLOADS[name]
    model = work.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = work.batches(slice(None))
    for line in sys.stdin:
        start = time.process_time()
        for index in range(int(line)):
            inputs, target = batches[index % len(batches)]
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        print((time.process_time() - start) / int(line) * 1e3, flush=True)


def started(name: str, *, portable: bool) -> subprocess.Popen[str]:
    """Start a process that times a workload."""
    command = [sys.executable, __file__, "--serve", name]
    variables = {**os.environ, PORTABLE_ENV: str(int(portable))}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=variables, text=True, **pipes)  # noqa: S603 - this file


def asked(process: subprocess.Popen[str], updates: int) -> float:
    """Ask a process for a timing."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{updates}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    """Print a line for each workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", choices=WORKLOADS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    print(f"lockstep {ls.__version__}, torch {torch.__version__}, {options.rounds} rounds, one thread")
    for name, updates in UPDATES.items():
        with started(name, portable=False) as plain, started(name, portable=True) as portable:
            for process in (plain, portable):
                asked(process, 2)
            rounds = [(asked(plain, updates), asked(portable, updates)) for _ in range(options.rounds)]
            for process in (plain, portable):
                assert process.stdin is not None
                process.stdin.close()
        own, other = (statistics.median(column) for column in zip(*rounds, strict=True))
        ratio = statistics.median(second / first for first, second in rounds)
        print(f"{name:8} {own:8.2f} ms {other:8.2f} ms with portable kernels, ratio {ratio:.2f}", flush=True)


if __name__ == "__main__":
    main()
