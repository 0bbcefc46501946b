"""Compare two checkouts bit for bit, by training a table of recipes with each.

    python benchmarks/equal_digests.py --checkout ../before --checkout .
    python benchmarks/equal_digests.py --checkout ../before --checkout . --only 'images*' --only '*overflow*'
    python benchmarks/equal_digests.py --list

Each checkout runs in its own processes, with its `src` first on the path. Both run the same recipes, those in
`equal/`, which use only the public API. Each recipe runs at several placements (ranks x devices), and all bits are
hashed after each update. The exit status is 1 if a hash differs or a recipe fails. Compare on one processor
model, because another may round differently.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from equal.recipes import RECIPES
from equal.runs import Placement

import lockstep as ls

Found = dict[str, list[str]]
"""The digests by recipe and placement; for a recipe that failed, the error."""

FAILED = "failed: "
RANK_TIMEOUT = 600.0
"""The time in seconds that a rank waits for another."""


def matching_recipes(patterns: Sequence[str]) -> list[str]:
    """List the recipes whose name matches one of the patterns; all recipes if there are none."""
    return [name for name in RECIPES if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def run_one(name: str, placement: Placement) -> list[str]:
    """Run a recipe and return its digests; if it fails, return the error instead."""
    # The bits of reductions on a CPU may depend on the number of threads.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        return RECIPES[name].run(placement)
    except Exception as error:  # noqa: BLE001 - reported in the table, and the other recipes still run
        traceback.print_exc()
        return [f"{FAILED}{type(error).__name__}: {error}"]


def run_on_rank(names: Sequence[str], ranks: int) -> list[tuple[str, str, list[str]]]:
    """Run recipes on one of several ranks."""
    # The recipes cause warnings on purpose, which would hide the errors of a recipe.
    warnings.simplefilter("ignore")
    return [
        (name, str(placement), run_one(name, placement))
        for name in names
        for placement in RECIPES[name].placements
        if placement.ranks == ranks
    ]


def run_here(patterns: Sequence[str]) -> Found:
    """Run recipes with the lockstep that this process has imported."""
    found: Found = defaultdict(list)
    names = matching_recipes(patterns)
    for ranks in sorted({placement.ranks for name in names for placement in RECIPES[name].placements}):
        by_rank = (
            [run_on_rank(names, ranks)]
            if ranks == 1
            else ls.launch(run_on_rank, ranks, args=(names, ranks), timeout=RANK_TIMEOUT)
        )
        for rows in by_rank:
            for name, placement, digests in rows:
                found[f"{name} @ {placement}"] += digests
    return found


def run_checkout(checkout: Path, patterns: Sequence[str]) -> Found:
    """Run recipes in a new process with the sources of a checkout."""
    source = (checkout / "src").resolve()
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "found.json"
        only = [f"--only={pattern}" for pattern in patterns]
        environment = {
            **os.environ,
            "PYTHONPATH": str(source),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        begin = time.perf_counter()
        subprocess.run(  # noqa: S603 - this script itself
            [sys.executable, __file__, *only, "--source", str(source), "--into", str(result)],
            env=environment,
            check=True,
        )
        print(f"{checkout}: {time.perf_counter() - begin:.0f} s", flush=True)
        found: Found = json.loads(result.read_text())
        return found


def verdict(left: Sequence[str], right: Sequence[str]) -> str:
    """Describe how the digests of two checkouts compare."""
    for side in (left, right):
        failures = [digest for digest in side if digest.startswith(FAILED)]
        if failures or not side:
            return failures[0] if failures else "not run"
    pairs = zip(left, right, strict=False)
    first = next((number for number, (one, other) in enumerate(pairs) if one != other), None)
    if first is None and len(left) == len(right):
        return "equal"
    return f"DIFFERS from digest {min(len(left), len(right)) if first is None else first}"


def report(left: Mapping[str, Sequence[str]], right: Mapping[str, Sequence[str]]) -> bool:
    """Print the table, and return whether all digests are equal."""
    keys = list(left) + [key for key in right if key not in left]
    verdicts: dict[str, dict[str, str]] = defaultdict(dict)
    for key in keys:
        name, placement = key.split(" @ ")
        verdicts[name][placement] = verdict(left.get(key, []), right.get(key, []))
    width = max(map(len, verdicts), default=0)
    equal = 0
    for name, placements in verdicts.items():
        differing: dict[str, list[str]] = defaultdict(list)
        for placement, result in placements.items():
            if result != "equal":
                differing[result].append(placement)
        equal += not differing
        text = "; ".join(f"{result} on {', '.join(where)}" for result, where in differing.items())
        print(f"{name:{width}}  {text or 'equal'}  [{', '.join(placements)}]")
    print(f"\n{equal} of {len(verdicts)} recipes are equal.")
    return equal == len(verdicts) > 0


def main() -> None:
    """Parse the options and run the recipes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", action="append", type=Path, default=[], help="to be given twice")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="repeat; default all")
    parser.add_argument("--list", action="store_true", help="list the recipes with their placements, and exit")
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not matching_recipes(options.only):
        parser.error(f"--only must match a recipe of --list, got {options.only}.")
    if options.list:
        for name in matching_recipes(options.only):
            print(f"{name}  [{', '.join(map(str, RECIPES[name].placements))}]")
    elif options.into is not None:
        # An installed lockstep could take precedence, and would be compared with itself.
        imported = Path(ls.__file__).parents[1].resolve()
        if imported != options.source:
            parser.error(f"lockstep must come from {options.source}, got that of {imported}.")
        options.into.write_text(json.dumps(run_here(options.only)))
    elif len(options.checkout) != 2:
        parser.error(f"--checkout must be given twice, got {len(options.checkout)}.")
    else:
        left, right = (run_checkout(checkout, options.only) for checkout in options.checkout)
        sys.exit(0 if report(left, right) else 1)


if __name__ == "__main__":
    main()
