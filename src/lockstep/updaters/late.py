"""Catch what user code raises where the work must be brought to its end."""

from __future__ import annotations

from collections.abc import Callable


def raised(call: Callable[[], object]) -> list[BaseException]:
    """Call a function, and give what it raised, if anything, for the caller to raise later."""
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - raised by the caller when the update is complete
        return [error]
    return []
