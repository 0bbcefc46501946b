"""Parse the command line, and call the function of the command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lockstep._version import __version__
from lockstep.cli import compare, doctor, export, report, run, snapshots, verify
from lockstep.errors import SideFileError, SnapshotError

COMMANDS = (run, snapshots, compare, report, doctor, verify, export)
"""The modules of the commands. Each adds its parser, and sets `call` to a function from options to exit code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the `lockstep` command.

    Args:
        arguments: The command-line arguments; by default those of this process.

    Returns:
        The exit code.
    """
    options = parser().parse_args(arguments)
    known = {name for action in options.parser._actions for name in action.option_strings} - {"-h", "--help"}  # noqa: SLF001 - argparse has no other way to it
    passed = [each for each in getattr(options, "arguments", ()) if each.partition("=")[0] in known]
    if passed:
        name = options.parser.prog
        sys.stderr.write(f"{name}: {passed[0]} is passed to the script; options of {name} come before the script.\n")
    try:
        exit_code: int = options.call(options)
    except (SideFileError, SnapshotError) as error:
        sys.stderr.write(f"{options.parser.prog}: {error}\n")
        return 2
    return exit_code


def parser() -> argparse.ArgumentParser:
    """Create the parser of all commands."""
    purpose = "Synchronous data-parallel training, the same bits on any placement."
    made = argparse.ArgumentParser(prog="lockstep", description=purpose)
    made.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = made.add_subparsers(required=True, metavar="command")
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        summary, _, description = (command.__doc__ or "").partition("\n\n")
        own = commands.add_parser(name, help=f"{summary[:1].lower()}{summary[1:-1]}", description=description)
        own.set_defaults(call=command.call, parser=own)
        command.add_arguments(own)
    return made
