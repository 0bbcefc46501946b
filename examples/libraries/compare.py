"""Run each program of this folder on one device and on two, and compare the digests that they print.

python examples/libraries/compare.py [name ...]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def digest_of(program: Path, devices: list[str]) -> str:
    """Run a program in an empty folder, and return the last line that it prints."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(  # noqa: S603 - our own programs
            [sys.executable, str(program), *devices], cwd=folder, capture_output=True, text=True, check=False
        )
    if done.returncode != 0:
        sys.exit(f"{program.name} {' '.join(devices)} ended with {done.returncode}:\n{done.stderr}")
    return done.stdout.splitlines()[-1]


def main(names: list[str]) -> None:
    """Run the programs of these names, by default all."""
    programs = [path for path in sorted(FOLDER.glob("*.py")) if path != Path(__file__).resolve()]
    unknown = set(names) - {path.stem for path in programs}
    if unknown:
        sys.exit(f"The names must be among {', '.join(path.stem for path in programs)}, got {', '.join(unknown)}.")
    failed = False
    for program in programs:
        if names and program.stem not in names:
            continue
        began = time.monotonic()
        one, two = digest_of(program, ["cpu"]), digest_of(program, ["cpu", "cpu"])
        failed |= one != two
        equal = "equal" if one == two else "DIFFERENT"
        print(f"{program.stem:26}{one[:16]}  {equal} on two devices  {time.monotonic() - began:6.1f} s", flush=True)
    if failed:
        sys.exit("Some digests differ.")


if __name__ == "__main__":
    main(sys.argv[1:])
