"""Save and load what objects hold, and refuse a saved state with missing or unknown keys by their names."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

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


class Stateful:
    """A class whose state is the attributes that it names.

    A subclass lists in `_saved` the keys of its state; the value of a key is the attribute of that name with
    an underscore in front. An attribute that is `Stateful` itself is saved as its own state.

    >>> class Counter(Stateful):
    ...     _saved = ("count",)
    ...     _count = 0
    >>> counter = Counter()
    >>> counter.load_state_dict({"count": 3})
    >>> counter.state_dict()
    {'count': 3}
    """

    _saved: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, object]:
        """Return what it holds, as numbers, text, None, tensors, and lists and dicts of these."""
        values = {key: getattr(self, f"_{key}") for key in self._saved}
        return {key: part.state_dict() if isinstance(part, Stateful) else part for key, part in values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; all of it or, after an error, nothing.

        Raises:
            StateError: A key is missing or unknown, here or in a part.
        """
        check_keys(state, self._saved, of=type(self).__name__)
        loaded: dict[str, Any] = {}
        for key in self._saved:
            part = getattr(self, f"_{key}")
            if isinstance(part, Stateful):
                loaded[key] = copy.deepcopy(part)
                loaded[key].load_state_dict(state[key])
            else:
                loaded[key] = state[key]
        for key, value in loaded.items():
            setattr(self, f"_{key}", value)
