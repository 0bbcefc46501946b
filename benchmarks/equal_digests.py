"""Tell whether two checkouts train to the same bits: a table of recipes, run on each, one after the other.

    python benchmarks/equal_digests.py --checkout ../before --checkout .
    python benchmarks/equal_digests.py --checkout ../before --checkout . --only 'images*' --only '*overflow*'
    python benchmarks/equal_digests.py --list

Each checkout runs in processes of its own, with its `src` first on the path, over the same recipes: those
in `equal/`, which use the public face alone. Each recipe runs at several places (so many ranks x so many
devices), and after each update all bits are hashed. The exit status is 1 if a hash differs or a recipe fails.
Compare on one processor: another may round otherwise.
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
from equal.runs import Place

import lockstep as ls

Found = dict[str, list[str]]
"""Digests by recipe and place; those of a recipe that failed are the error."""

FAILED = "failed: "
LONGEST = 600.0
"""Seconds that a rank waits for another."""


def chosen(patterns: Sequence[str]) -> list[str]:
    """List the recipes whose name matches one of some patterns; all, where there are none."""
    return [name for name in RECIPES if not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]


def run_one(name: str, place: Place) -> list[str]:
    """Run a recipe; where it fails, return the error in the place of digests."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        return RECIPES[name].run(place)
    except Exception as error:  # noqa: BLE001 - told in the table, and the others go on
        traceback.print_exc()
        return [f"{FAILED}{type(error).__name__}: {error}"]


def run_on_rank(names: Sequence[str], ranks: int) -> list[tuple[str, str, list[str]]]:
    """Run recipes on one of several ranks."""
    warnings.simplefilter("ignore")
    return [
        (name, str(place), run_one(name, place))
        for name in names
        for place in RECIPES[name].places
        if place.ranks == ranks
    ]


def run_here(patterns: Sequence[str]) -> Found:
    """Run recipes with the lockstep that this process has imported."""
    found: Found = defaultdict(list)
    names = chosen(patterns)
    for ranks in sorted({place.ranks for name in names for place in RECIPES[name].places}):
        said = (
            [run_on_rank(names, ranks)]
            if ranks == 1
            else ls.launch(run_on_rank, ranks, args=(names, ranks), timeout=LONGEST)
        )
        for each in said:
            for name, place, digests in each:
                found[f"{name} @ {place}"] += digests
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
    """Say how the digests of two checkouts compare."""
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
    """Print the table, and return whether all is equal."""
    keys = list(left) + [key for key in right if key not in left]
    verdicts: dict[str, dict[str, str]] = defaultdict(dict)
    for key in keys:
        name, place = key.split(" @ ")
        verdicts[name][place] = verdict(left.get(key, []), right.get(key, []))
    width = max(map(len, verdicts), default=0)
    equal = 0
    for name, places in verdicts.items():
        differing: dict[str, list[str]] = defaultdict(list)
        for place, said in places.items():
            if said != "equal":
                differing[said].append(place)
        equal += not differing
        told = "; ".join(f"{said} on {', '.join(where)}" for said, where in differing.items())
        print(f"{name:{width}}  {told or 'equal'}  [{', '.join(places)}]")
    print(f"\n{equal} of {len(verdicts)} recipes are equal.")
    return equal == len(verdicts) > 0


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", action="append", type=Path, default=[], help="give it twice")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="repeat; default all")
    parser.add_argument("--list", action="store_true", help="list the recipes with their places, and end")
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not chosen(options.only):
        parser.error(f"--only must match a recipe of --list, got {options.only}.")
    if options.list:
        for name in chosen(options.only):
            print(f"{name}  [{', '.join(map(str, RECIPES[name].places))}]")
    elif options.into is not None:
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
