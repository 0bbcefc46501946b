"""Save and load the state of objects, with errors that name missing and unknown keys, and change it for a while."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, runtime_checkable

from lockstep.errors import StateError


def check_keys(state: Mapping[str, object], keys: Iterable[str], *, of: str) -> None:
    """Check that a saved state holds exactly the keys that its owner reads.

    Args:
        state: The saved state. It is not changed.
        keys: The keys that the owner reads.
        of: The name of the owner in the error message.

    Raises:
        StateError: If keys are missing or unknown. The message lists all of them.

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
    """The base class of objects whose state consists of some of their attributes.

    A subclass lists the keys of its state in `_saved`. The value of a key is the attribute with that name after an
    underscore. An attribute that is `Stateful` itself is saved as its own state.

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
        """Return the state as numbers, text, None and tensors, and lists and dicts of these."""
        values = {key: getattr(self, f"_{key}") for key in self._saved}
        return {key: part.state_dict() if isinstance(part, Stateful) else part for key, part in values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state. After an error nothing has been changed.

        Args:
            state: A state that `state_dict` returned.

        Raises:
            StateError: If a key is missing or unknown, here or in a part.
        """
        check_keys(state, self._saved, of=type(self).__name__)
        # Parts are loaded into copies, and assigned only after all of them have accepted their state.
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


@runtime_checkable
class Loadable(Protocol):
    """An object with a state that can be saved and loaded, such as a hook of an optimizer or a source of batches."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Load a saved state; after an error nothing has changed."""


@contextmanager
def temporarily(owner: Any, /, **values: Any) -> Iterator[None]:
    """Set attributes of an object, and restore them at the end, also after an error.

    >>> class Options: number = 1
    >>> with temporarily(Options, number=2):
    ...     print(Options.number)
    2
    >>> Options.number
    1

    Args:
        owner: The object, class or module.
        values: The values by the names of attributes that there are.
    """
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def load_all(parts: Sequence[tuple[Loadable, Mapping[str, Any]]]) -> None:
    """Load a saved state into each object; if one raises, restore those that were already loaded.

    Args:
        parts: The objects with their states. The last one is never restored, because it is the last that can fail, so
            its current state is not copied.
    """
    before = [(part, copy.deepcopy(part.state_dict())) for part, _ in parts[:-1]]
    try:
        for part, saved in parts:
            part.load_state_dict(saved)
    except BaseException:
        for part, saved in before:
            part.load_state_dict(saved)
        raise
