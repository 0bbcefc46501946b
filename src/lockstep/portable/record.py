"""Print the digests of the installed version of torch on this machine, in the format of the files in `digests`.

    python -m lockstep.portable.record [--merge FILE ...]

Compare what it prints on processors of at least two vendors before you trust it. With files of other C libraries, it
tells which cases depend on the library.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.portable.cases import CASES
from lockstep.portable.golden import digests_of, libc_version
from lockstep.portable.overrides import install
from lockstep.portable.settings import apply_settings


def merged(found: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    """Separate the cases that depend on the C library from those that do not.

    Args:
        found: All digests, by the version of the C library.

    >>> merged({"glibc 2.36": {"a": "1", "b": "2"}, "glibc 2.41": {"a": "1", "b": "3"}})
    {'common': {'a': '1'}, 'C library': {'glibc 2.36': {'b': '2'}, 'glibc 2.41': {'b': '3'}}}
    """
    names = next(iter(found.values()))
    common = {name: value for name, value in names.items() if all(each[name] == value for each in found.values())}
    rest = {version: {name: each[name] for name in names if name not in common} for version, each in found.items()}
    return {"common": common, "C library": rest}


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute all cases, and print their digests."""
    parser = argparse.ArgumentParser(description="Print the digests of portable kernels.")
    parser.add_argument(
        "--merge", nargs="*", type=Path, default=[], help="files that it printed with other C libraries"
    )
    options = parser.parse_args(arguments)
    apply_settings()
    # Kept in a variable, because the registrations end with it.
    library = install()
    found: dict[str, Mapping[str, str]] = {}
    for path in options.merge:
        read = json.loads(path.read_text(encoding="utf-8"))
        found |= {version: {**read["common"], **rest} for version, rest in read["C library"].items()}
    found[libc_version()] = digests_of(CASES)
    library._destroy()  # type: ignore[no-untyped-call]  # noqa: SLF001 - torch has no other way
    sys.stdout.write(json.dumps(merged(found), indent=0) + "\n")


if __name__ == "__main__":
    main()
