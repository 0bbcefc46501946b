"""Refuse a saved state that does not fit, by the names of the keys that are missing or unknown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lockstep.errors import StateError


def check_keys(state: Mapping[str, object], keys: Iterable[str], *, of: str) -> None:
    """Check that a saved state holds exactly the keys its owner knows.

    Args:
        state: What is about to be loaded; left untouched.
        keys: The keys the owner reads.
        of: The owner, as the error names it.

    Raises:
        StateError: A key is missing or unknown; the message lists all of them.

    >>> check_keys({"count": 1}, ["count"], of="a counter")
    >>> check_keys({"cuont": 1}, ["count"], of="a counter")
    Traceback (most recent call last):
    lockstep.errors.StateError: The state of a counter must hold 'count'; missing: 'count'; unknown: 'cuont'.
    """
    wanted = list(keys)
    missing = [key for key in wanted if key not in state]
    unknown = [key for key in state if key not in wanted]
    if missing or unknown:
        parts = [f"The state of {of} must hold {_quoted(wanted) or 'no key'}"]
        parts += [f"missing: {_quoted(missing)}"] if missing else []
        parts += [f"unknown: {_quoted(unknown)}"] if unknown else []
        raise StateError("; ".join(parts) + ".")


def _quoted(keys: list[str]) -> str:
    return ", ".join(repr(key) for key in keys)
