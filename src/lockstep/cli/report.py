"""Show a run as an HTML page.

Write one HTML page about a run, which opens without a network: curves, loss scale and retries, time per phase and
device, throughput, recipe, kernel class, digests and snapshots. With --compare, it shows two runs together, and marks
the first update that differs. What the page does not have was not recorded; it names the extension that records it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.html_report import LOG, read_run, render
from lockstep.side_files import SideFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="folder of a run to compare with")
    parser.add_argument(
        "-o", "--output", type=Path, help="file to write (default: report.html in the folder of the run)"
    )
    parser.add_argument("--log", default=LOG, help=f"name of the file that LogReport wrote (default: {LOG})")


def call(options: argparse.Namespace) -> int:
    """Write the page, and return the exit code."""
    path = options.output.resolve() if options.output else options.run / "report.html"
    runs = [read_run(each, log=options.log) for each in (options.run, options.compare) if each is not None]
    for run in runs:
        if run.is_empty():
            missing = "" if run.path.is_dir() else " There is no such folder."
            sys.stderr.write(f"lockstep report: {run.path} has no {options.log} and no snapshots.{missing}\n")
            return 1
    SideFile(path.parent, path.name, required=True).replace(render(*runs).encode(errors="backslashreplace"))
    sys.stdout.write(f"{options.output or path}\n")
    return 0
