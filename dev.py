"""Make an environment in `.venv` and run one of the project's tasks in it; needs only Python 3.10+ and git.

python3 dev.py digits [options]   the main job, examples/digits.py
python3 dev.py test [options]     every check and every test; options go to pytest, which then runs in one process
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

# As many processes as CI has cores. The tests of a file share fixtures, so one process runs them all. The files
# keep their order: the longest, which start processes, come early, and neither process waits for the other's last.
WHOLE_SUITE = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]


def prepare(extra: str) -> None:
    """Create the environment, and install lockstep with one of its extras unless that is already done."""
    inputs = [ROOT / "pyproject.toml", ROOT / "constraints.txt"]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()
    stamp = ENVIRONMENT / f"installed-{extra}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if PYTHON.exists():
        # The name of lockstep-torch before; removed later, it would take the command of the new one with it.
        run("-m", "pip", "uninstall", "-qq", "--yes", "lockstep")
    else:
        venv.create(ENVIRONMENT, with_pip=True)
    print(f"installing lockstep-torch[{extra}] into {ENVIRONMENT.name} ...", flush=True)
    constraints = [] if os.environ.get("LOCKSTEP_UNPINNED") else ["-c", "constraints.txt"]
    run("-m", "pip", "install", "--quiet", *constraints, "-e", f".[{extra}]")
    stamp.write_text(wanted)


def run(*arguments: str) -> None:
    """Run the environment's Python from the project's root; end with its exit status if that is not 0."""
    status = subprocess.run([str(PYTHON), *arguments], cwd=ROOT, check=False).returncode
    if status != 0:
        sys.exit(status)


def digits(options: list[str]) -> None:
    """Run the main job."""
    prepare("examples")
    run("examples/digits.py", *options)


def test(options: list[str]) -> None:
    """Run the whole bar, cheapest check first; two processes share the tests unless there are options."""
    prepare("test")
    run("-m", "ruff", "format", "--check", ".")
    run("-m", "ruff", "check", ".")
    run("-m", "mypy")
    run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    run("-m", "pytest", *(options or WHOLE_SUITE))


TASKS = {"digits": digits, "test": test}


def main() -> None:
    """Read the task's name from the command line and run it."""
    name, *options = sys.argv[1:] or [""]
    if name not in TASKS:
        print(__doc__)
        sys.exit(f"The task must be one of {', '.join(TASKS)}, got {name!r}.")
    TASKS[name](options)


if __name__ == "__main__":
    main()
