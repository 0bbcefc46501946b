"""Find where two runs differ.

Compare two runs by the digests that they have logged and by the manifests of their snapshots. No tensor is read. The
exit code is 0 if all updates that both runs have logged are equal, 1 if one differs, and 2 if they have none in common
or a log is damaged.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.snapshots import compare_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("first", type=Path, help="folder of one run")
    parser.add_argument("second", type=Path, help="folder of the other run")


def call(options: argparse.Namespace) -> int:
    """Compare the runs, and return the exit code."""
    found = compare_runs(options.first, options.second)
    if not found.common:
        missing = "".join(
            f" There is no folder {each}." for each in (options.first, options.second) if not each.is_dir()
        )
        sys.stderr.write(f"The runs have logged no update in common.{missing}\n")
        return 2
    for what, names in (("The recipes differ in", found.recipe), ("The kernels differ in", found.kernel_class)):
        if names:
            sys.stdout.write(f"{what}: {found.listed(names)}.\n")
    sys.stdout.write(f"{found.result()}\n")
    return 0 if found.first is None else 1
