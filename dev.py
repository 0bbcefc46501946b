"""Make an environment in `.venv` and run one of the project's tasks in it; needs only Python 3.10 to 3.14 and git.

python3 dev.py digits [options]   the main job, examples/digits.py
python3 dev.py check              formatter, linter, type checker and contract of imports
python3 dev.py examples [names]   the programs with other libraries in examples/libraries, on one device and on two
python3 dev.py docs               the documentation site, in docs/_build/html; a warning is an error
python3 dev.py gpu CALL [options] check an accelerator, with the torch of this Python; CALL is bits, streams, ...
python3 dev.py quick [options]    these and the unit tests, side by side; options go to pytest
python3 dev.py slow [options]     the tests that are marked slow; options go to pytest
python3 dev.py test [options]     the checks and all tests but the slow ones; with options for pytest, in one process
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

# Before anything that an older Python does not know, and before minutes of downloads that end in a conflict.
if not (3, 10) <= sys.version_info < (3, 15):
    sys.exit(
        "dev.py must be run with Python 3.10, 3.11, 3.12, 3.13 or 3.14, with which the packages of constraints.txt "
        "were tried, got {}.{}.{}; for example `python3.12 dev.py digits`.".format(*sys.version_info[:3])
    )

ROOT = Path(__file__).resolve().parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

# As many processes as CI has cores. The tests of a file share fixtures, so one process runs them all. The files
# keep their order: the longest, which start processes, come early, and neither process waits for the other's last.
TWO_PROCESSES = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]

# One more than cores, because many of all tests wait for processes and for time limits.
THREE_PROCESSES = ["-n", "3", *TWO_PROCESSES[2:]]

MOST_SECOND_CHANCES = 5
"""The number of failed tests above which none is run again: what breaks more is no accident."""


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
    print(
        f"Installing lockstep-torch[{extra}] into {ENVIRONMENT.name}, which takes about 1.2 GB with a CPU build of "
        "torch, and 5.3 GB and some minutes with the CUDA build that pip downloads where it finds no other ...",
        flush=True,
    )
    constraints = [] if os.environ.get("LOCKSTEP_UNPINNED") else ["-c", "constraints.txt"]
    # Not quiet: the download takes minutes, and if pip fails, its messages say why.
    run("-m", "pip", "install", *constraints, "-e", f".[{extra}]")
    stamp.write_text(wanted)


def run(*arguments: str) -> None:
    """Run the environment's Python from the project's root; end with its exit status if that is not 0."""
    # Tests start Python often; without stored bytecode, each start would compile all modules again.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    status = subprocess.run([str(PYTHON), *arguments], cwd=ROOT, check=False).returncode
    if status != 0:
        sys.exit(status)


def digits(options: list[str]) -> None:
    """Run the main job."""
    prepare("examples")
    run("examples/digits.py", *options)


def examples(names: list[str]) -> None:
    """Run the examples with other libraries, and compare their digests."""
    prepare("libraries")
    run("examples/libraries/compare.py", *names)


def quick(options: list[str]) -> None:
    """Run the checks beside the unit tests, which two processes share, and then show what the checks printed."""
    prepare("test")
    with tempfile.TemporaryFile() as printed:
        checks = subprocess.Popen([sys.executable, __file__, "check"], stdout=printed, stderr=subprocess.STDOUT)
        command = [str(PYTHON), "-m", "pytest", "-m", "unit and not slow", *(options or TWO_PROCESSES)]
        tests = subprocess.run(command, cwd=ROOT, check=False)
        checks.wait()
        printed.seek(0)
        print(printed.read().decode())
    sys.exit(tests.returncode or checks.returncode)


def check(_: list[str]) -> None:
    """Run the formatter, the linter, the type checker and the contract of imports, cheapest first."""
    prepare("test")
    run("-m", "ruff", "format", "--check", ".")
    run("-m", "ruff", "check", ".")
    run("-m", "mypy")
    run("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")


def docs(_: list[str]) -> None:
    """Build the documentation site."""
    prepare("docs")
    site = "docs/_build/html"
    run("-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going", "--builder", "html", "docs", site)
    print(f"The site is in {site}; open {site}/index.html.")


def gpu(options: list[str]) -> None:
    """Check an accelerator. The environment is that of this Python, because `.venv` may hold a torch for CPUs."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    sys.exit(
        subprocess.run([sys.executable, "benchmarks/gpu", *options], cwd=ROOT, env=variables, check=False).returncode
    )


def slow(options: list[str]) -> None:
    """Run the tests that are left out everywhere else."""
    prepare("test")
    run("-m", "pytest", "-m", "slow", *options)


def test(options: list[str]) -> None:
    """Run all checks and tests, cheapest first; three processes share the tests unless there are options."""
    check([])
    if options:
        run("-m", "pytest", *options)
    else:
        options = [*THREE_PROCESSES, "--some-slow=2"]
        sys.exit(run_with_second_chance(PYTHON, ROOT, ENVIRONMENT / "pytest_cache", options))


def run_with_second_chance(python: Path, folder: Path, cache: Path, options: list[str]) -> int:
    """Run the tests of a folder, and run those that failed once more, alone, if they are few; return the exit status.

    Args:
        python: The interpreter.
        folder: The folder.
        cache: Where pytest is to write which tests have failed. What is there is removed.
        options: The options of pytest in the first run.
    """
    shutil.rmtree(cache, ignore_errors=True)
    command = [str(python), "-m", "pytest", "-o", f"cache_dir={cache}"]
    status = subprocess.run([*command, *options], cwd=folder, check=False).returncode
    noted = cache / "v" / "cache" / "lastfailed"
    failed = list(json.loads(noted.read_text())) if status == 1 and noted.exists() else []
    if not 0 < len(failed) <= MOST_SECOND_CHANCES:
        return status
    print("\nFAILED in the shared run, and run once more alone:", *failed, sep="\n  ", flush=True)
    # All markers are chosen, because a slow test may be among them.
    status = subprocess.run([*command, "-m", "", *failed], cwd=folder, check=False).returncode
    if status == 0:
        print("\nFAILED first and PASSED alone; find out why, and mend it:", *failed, sep="\n  ", flush=True)
    return status


TASKS = {
    "check": check,
    "digits": digits,
    "docs": docs,
    "examples": examples,
    "gpu": gpu,
    "quick": quick,
    "slow": slow,
    "test": test,
}


def main() -> None:
    """Read the task's name from the command line and run it."""
    name, *options = sys.argv[1:] or [""]
    if name in TASKS:
        TASKS[name](options)
        return
    print(__doc__)
    if name not in {"-h", "--help"}:
        sys.exit(f"The task must be one of {', '.join(TASKS)}, got {name!r}.")


if __name__ == "__main__":
    main()
