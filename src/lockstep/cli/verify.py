"""Test that a script gives the same bits.

Run a training script, unchanged, for a few updates in several ways: on one device, two and three, in two processes,
with worker processes, killed and resumed, and others. Compare the bits of weights, buffers, optimizer state and losses
after each update, and show the first update, tensor and shard that differ. Also compare the gradient of a batch with
that of the batch as a single shard. The files of the run are written to a folder of this command, not to yours. The
exit code is 0 if all ways are equal, 2 if an argument or the file of the page is refused, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.html_report import element, render_checks, table
from lockstep.side_files import SideFile
from lockstep.verify import CURES, WAYS, Report, Row, check_arguments, chosen, verify

NAMES = ", ".join(way.name for way in WAYS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--updates", type=int, default=10, help="number of updates of each run (default: 10)")
    parser.add_argument("--only", action="append", default=[], metavar="WAY", help=f"a way to run, of {NAMES}")
    parser.add_argument("--skip", action="append", default=[], metavar="WAY", help="a way to leave out")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--html", type=Path, metavar="FILE", help="file to write the result to as an HTML page")
    parser.add_argument("--folder", type=Path, help="folder to keep records and output in (default: none are kept)")
    parser.add_argument("script", type=Path, help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script").required = False


def call(options: argparse.Namespace) -> int:
    """Run the ways, and return the exit code."""
    try:
        ways = chosen(options.only, options.skip)
        check_arguments(options.script, options.updates)
    except ValueError as error:
        sys.stderr.write(f"lockstep verify: {error}\n")
        return 2
    seeds = {way.hash_seed for way in ways} | {"0"}
    # The ways take a while, and the reader sees how far they are.
    show: Callable[[str], None] = (lambda _: None) if options.json else partial(print, flush=True)
    show(f"{len(ways) + 1} ways, up to {options.updates} updates each, in {1 + len(seeds)} starts of Python")
    report = verify(
        options.script, options.arguments, ways=ways, updates=options.updates, folder=options.folder, say=show
    )
    if options.json:
        sys.stdout.write(f"{json.dumps(_as_json(report), indent=1)}\n")
    else:
        show(_text(report))
    if options.html is not None:
        path = options.html.resolve()
        content = _page(" ".join([str(options.script), *options.arguments]), report)
        SideFile(path.parent, path.name, required=True).replace(content.encode(errors="backslashreplace"))
    return 0 if report.passed else 1


def _text(report: Report) -> str:
    if report.error:
        return report.error
    width = max(len(row.way.name) for row in report.rows)
    lines = [f"{row.way.name:{width}}  {row.status:8} {_about(row)}" for row in report.rows]
    lines += ["", *causes] if (causes := _causes(report)) else []
    lines += ["", *report.findings] if report.findings else []
    return "\n".join(["", *lines, "", _result(report)])


def _page(command: str, report: Report) -> str:
    cells: list[list[object]] = [
        [element("span", row.way.name, class_="word"), element("span", row.status, class_="word"), _about(row)]
        for row in report.rows
    ]
    caption = "Each way, compared with the first one"
    tables = [table(["way", "result", "about it"], cells, caption=caption)] if cells else []
    notes = [*_causes(report), *report.findings]
    return render_checks(f"lockstep verify {command}", report.passed, report.error or _result(report), tables, notes)


def _causes(report: Report) -> list[str]:
    return list(dict.fromkeys(row.cause.describe() for row in report.rows if row.cause is not None))


def _result(report: Report) -> str:
    equal = sum(row.status == "equal" for row in report.rows)
    run = sum(row.status != "skipped" for row in report.rows)
    return f"{equal} of {run} ways agree with the first one, {report.seconds:.0f} s."


def _about(row: Row) -> str:
    return row.skipped or (row.way.meaning if row.difference is None else row.difference.describe())


def _as_json(report: Report) -> dict[str, Any]:
    about = {**asdict(report), "passed": report.passed}
    about["ways"] = about.pop("rows")
    for found, row in zip(about["ways"], report.rows, strict=True):
        found |= {"way": row.way.name, "status": row.status}
        if row.cause is not None:
            found["cause"]["cure"] = CURES[row.cause.kind]
    return about
