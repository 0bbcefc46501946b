"""Compare two processes with lockstep and with DistributedDataParallel, both over gloo.

    python benchmarks/processes.py                      all four workloads, about three minutes on two cores
    python benchmarks/processes.py --workload mlp --rounds 10

The contenders of `updates.py` that consist of two processes take turns in short rounds. It prints the median over
rounds of (time of the limit) / (time) in the same round, and of DDP's time divided by lockstep's in the same round,
which is above 1 if lockstep is faster.
"""

from __future__ import annotations

import argparse
import statistics

from updates import WORKLOADS, compare

NAMES = ["limit", "DDP, 2 processes", "lockstep, 2 processes", "lockstep, S=2"]


def main() -> None:
    """Parse the options and run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    behind = []
    for workload in WORKLOADS if options.workload == "all" else [options.workload]:
        seconds = compare(workload, NAMES, options.rounds)
        limit = seconds["limit"]
        print(f"\n{workload}: one update of the limit takes {statistics.median(limit) * 1e3:.2f} ms")
        for name, values in seconds.items():
            share = statistics.median(a / b for a, b in zip(limit, values, strict=True))
            print(f"  {name:24} {share:5.2f} of the limit   {statistics.median(values) * 1e3:8.2f} ms median")
        # Ratios within a round, because the speed of the machine may change between rounds.
        pairs = zip(seconds["DDP, 2 processes"], seconds["lockstep, 2 processes"], strict=True)
        ratio = statistics.median(ddp / ours for ddp, ours in pairs)
        print(f"  two processes are {ratio:.2f} times as fast as DDP (required: above 1)")
        if ratio <= 1:
            behind.append(workload)
    if behind:
        raise SystemExit(f"Slower than DDP on: {', '.join(behind)}.")


if __name__ == "__main__":
    main()
