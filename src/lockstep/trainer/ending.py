"""What is said at the end of a run, and errors of the calls there, each of which is made even if another one fails."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable


def call_and_catch(call: Callable[[], object]) -> BaseException | None:
    """Call a function, and return the exception that it raises, if any."""
    try:
        call()
    except BaseException as failure:  # noqa: BLE001 - the caller raises or reports it
        return failure
    return None


def report_failure(what: str, failure: BaseException, *, original: BaseException) -> None:
    """Print to stderr that something failed while the run was ending, and add a note to the original exception."""
    lines = traceback.format_exception(type(failure), failure, failure.__traceback__, chain=False)
    sys.stderr.write(f"{what} raised while the run ended with {type(original).__name__}:\n{''.join(lines)}")
    if sys.version_info >= (3, 11):
        original.add_note(f"{what} raised, too: {lines[-1].strip()}")


def say(message: str) -> None:
    """Print to stderr what a user in front of a terminal, or who reads the log of a job, should know of the run.

    Args:
        message: The sentences.
    """
    sys.stderr.write(f"lockstep: {message}\n")
    sys.stderr.flush()
