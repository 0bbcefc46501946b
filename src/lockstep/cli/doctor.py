"""Examine this machine.

Show what this machine offers, find settings that would break the determinism guarantee or keep a run from working, and
train a small model on one device, on two and in two processes, whose digests must be equal. The exit code is 0 if there
is no problem and all digests are equal, and 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from lockstep.doctor import Facts, Finding, Outcome, are_equal, describe_machine, find_problems, is_sound, run_self_test

COLUMNS: Final = 80
"""The width of the text."""
NAME: Final = 14
"""The width of the names of facts."""
PLACEMENT: Final = 37
DIGITS: Final = 16
"""The digits of a digest that are shown; all of them are compared."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--out", type=Path, default=Path(), help="folder for snapshots (default: the current one)")
    parser.add_argument("--no-self-test", action="store_true", help="do not train, which takes most of the time")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def call(options: argparse.Namespace) -> int:
    """Examine the machine, and return the exit code."""
    # The self-test takes a while, and the reader sees how far it is.
    show: Callable[[str], object] = (lambda _: None) if options.json else partial(print, end="", flush=True)
    machine = describe_machine(options.out)
    findings = find_problems(options.out)
    show(_machine_text(machine) + _findings_text(findings))
    groups: list[list[Outcome]] = []
    if not options.no_self_test:
        show("Self-test: one small model, trained at several placements\n")
        groups = run_self_test(on_outcome=lambda outcome: show(_outcome_text(outcome)))
    passed = is_sound(findings) and all(map(are_equal, groups))
    if options.json:
        listed = [[asdict(outcome) for outcome in group] for group in groups]
        about = {"machine": machine, "findings": [asdict(each) for each in findings], "self_test": listed}
        sys.stdout.write(f"{json.dumps({**about, 'passed': passed}, indent=1)}\n")
    else:
        show(_conclusion(findings, groups))
    return 0 if passed else 1


def _machine_text(machine: dict[str, Facts]) -> str:
    return "".join(
        f"{topic[0].upper()}{topic[1:]}\n{''.join(_fact(*fact) for fact in facts.items())}\n"
        for topic, facts in machine.items()
    )


def _fact(name: str, value: str) -> str:
    return _wrapped(f"  {name:{NAME}}  {value}", indent=NAME + 4)


def _findings_text(findings: Sequence[Finding]) -> str:
    if not findings:
        return "Findings\n  none\n\n"
    lines = (_wrapped(f"  {each.level:7}  {each.text} {each.cure}".rstrip(), indent=11) for each in findings)
    return f"Findings\n{''.join(lines)}\n"


def _outcome_text(outcome: Outcome) -> str:
    if outcome.error:
        return _wrapped(f"  {outcome.placement:{PLACEMENT}}  failed: {outcome.error}", indent=4)
    found = " and ".join(dict.fromkeys(digest[:DIGITS] for digest in outcome.digests))
    return f"  {outcome.placement:{PLACEMENT}}  {found}  {outcome.seconds:5.1f} s\n"


def _conclusion(findings: Sequence[Finding], groups: Sequence[Sequence[Outcome]]) -> str:
    problems = sum(finding.level == "problem" for finding in findings)
    if not groups:
        tested = "No self-test was made."
    elif all(map(are_equal, groups)):
        tested = "All digests are equal." if len(groups) == 1 else "All digests on devices of one kind are equal."
    elif any(outcome.error for group in groups for outcome in group):
        tested = "The self-test failed: a placement could not be trained."
    else:
        tested = "The self-test failed: digests of devices of one kind differ."
    counted = {0: "No problem was found.", 1: "1 problem was found."}.get(problems, f"{problems} problems were found.")
    return f"\n{counted} {tested}\n"


def _wrapped(text: str, *, indent: int) -> str:
    return textwrap.fill(text, COLUMNS, subsequent_indent=" " * indent) + "\n"
