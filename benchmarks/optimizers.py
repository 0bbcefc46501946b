"""Compare the time of lockstep's momentum optimizers with torch's, by medians of ratios over short rounds.

    python benchmarks/optimizers.py [--rounds 100] [--threads 1]

Each round times both optimizers of a pair one after the other, in alternating order, so that disturbances affect
both. A ratio below 1 means that lockstep is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.optim.optimizer import Optimizer

from lockstep.optim import CorrectedMomentumSGD, MomentumSGD

# The shapes of the parameters, and the number of steps in one timing.
WORKLOADS = {
    "160 tensors of 100": ([(100,)] * 160, 60),
    "40 tensors of 64x64": ([(64, 64)] * 40, 60),
    "8 tensors of 512x512": ([(512, 512)] * 8, 10),
}
# After so many rounds the tensors are allocated again: their addresses make one or the other some percent faster.
ROUNDS_PER_ALLOCATION = 5
PAIRS: dict[str, tuple[Callable[..., Optimizer], Callable[..., Optimizer]]] = {
    "CorrectedMomentumSGD(fused=True) / SGD(fused=True)": (
        lambda weights: CorrectedMomentumSGD(weights, lr=1e-3, fused=True),
        lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, fused=True),
    ),
    "CorrectedMomentumSGD() / SGD(foreach=True)": (
        lambda weights: CorrectedMomentumSGD(weights, lr=1e-3),
        lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, foreach=True),
    ),
    "MomentumSGD(correction=True) / SGD(foreach=True)": (
        lambda weights: MomentumSGD(weights, lr=1e-3, correction=True),
        lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9, foreach=True),
    ),
}


def optimizer_of(make: Callable[..., Optimizer], shapes: list[tuple[int, ...]]) -> Optimizer:
    """Create an optimizer with its own weights and gradients, after its first steps."""
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer = make(weights)
    # The first steps create the state.
    for _ in range(5):
        optimizer.step()
    return optimizer


def seconds(optimizer: Optimizer, steps: int) -> float:
    """Return the mean time of a step in seconds."""
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.step()
    return (time.perf_counter() - start) / steps


def main() -> None:
    """Print a line for each pair and workload."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {arguments.threads} threads, {arguments.rounds} rounds")
    for pair, makers in PAIRS.items():
        for workload, (shapes, steps) in WORKLOADS.items():
            ratios: list[float] = []
            times: list[float] = []
            for number in range(arguments.rounds):
                # Alternating, so that neither always runs first.
                order = (0, 1) if number % 2 else (1, 0)
                if number % ROUNDS_PER_ALLOCATION == 0:
                    made = {which: optimizer_of(makers[which], shapes) for which in order}
                spent = {which: seconds(made[which], steps) for which in order}
                ratios.append(spent[0] / spent[1])
                times.append(spent[0])
            ratio, mine = statistics.median(ratios), statistics.median(times)
            print(f"{pair:52} {workload:22} {ratio:5.2f}   ({mine * 1e6:7.1f} us per step)", flush=True)


if __name__ == "__main__":
    main()
