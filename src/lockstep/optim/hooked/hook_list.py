"""The hooks of one optimizer: their names, when each is called, and what they remember."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lockstep.errors import StateError

TIMINGS = ("pre", "post")


@runtime_checkable
class StatefulHook(Protocol):
    """A hook that remembers something between updates."""

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers, as plain values and tensors."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember this instead; refuse what does not fit, before anything has changed."""


@dataclass(frozen=True, slots=True)
class Registration:
    """A hook under the name it was added by.

    Args:
        name: Unique among the hooks of its place.
        hook: Called as ``hook(optimizer)``, or as ``hook(optimizer, parameter)``.
        timing: Before the weights move ("pre") or after ("post").
        group: The index of the parameter group it belongs to; None for the whole optimizer.
        per_parameter: Whether it is called once for each parameter.
    """

    name: str
    hook: Callable[..., object]
    timing: str
    group: int | None
    per_parameter: bool

    @property
    def place(self) -> str:
        """Where it is registered, in words."""
        return "the optimizer" if self.group is None else f"group {self.group}"

    @property
    def label(self) -> str:
        """The name and all that must agree when a saved state is loaded."""
        return f"{self.name!r} ({self.timing}, on {self.place})"


def describe(hook: Callable[..., object], name: str | None, timing: str, group: int | None) -> Registration:
    """Settle a hook's name and timing from the arguments and from what the hook says about itself.

    A hook may say its ``name``, ``timing`` and ``per_parameter``; a plain function says none of
    them, and is called once, before the weights move, by the name it was defined with.

    Raises:
        TypeError: The hook is not callable.
        ValueError: The timing is unknown, or there is no name.

    >>> def halve(optimizer):
    ...     ...
    >>> describe(halve, None, "auto", None).label
    "'halve' (pre, on the optimizer)"
    """
    if not callable(hook):
        raise TypeError(f"`hook` must be callable, got {type(hook).__name__}.")
    if timing not in {*TIMINGS, "auto"}:
        raise ValueError(f"`timing` must be 'pre', 'post' or 'auto', got {timing!r}.")
    if timing == "auto":
        timing = getattr(hook, "timing", "pre")
        if timing not in TIMINGS:
            raise ValueError(f"`hook.timing` must be 'pre' or 'post', got {timing!r}.")
    name = name or getattr(hook, "name", None) or getattr(hook, "__name__", None)
    if name is None:
        rule = "must be given for a hook that has neither `name` nor `__name__`"
        raise ValueError(f"`name` {rule}, got None.")
    return Registration(name, hook, timing, group, bool(getattr(hook, "per_parameter", False)))


class HookList:
    """The hooks of one optimizer, in the order they were added.

    >>> hooks = HookList()
    >>> hooks.add(describe(print, None, "post", None))
    >>> [entry.label for entry in hooks.due("post")]
    ["'print' (post, on the optimizer)"]
    """

    def __init__(self) -> None:
        self._entries: list[Registration] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Registration) -> None:
        """Append a hook.

        Raises:
            KeyError: Its place already has a hook of this name, at whatever timing.
        """
        if self._position(entry.name, entry.group) is not None:
            rule = f"must be new among the hooks of {entry.place}"
            raise KeyError(f"`name` {rule}, got {entry.name!r}. Give the second one a name of its own.")
        self._entries.append(entry)

    def remove(self, name: str, group: int | None) -> None:
        """Take a hook out.

        Raises:
            KeyError: Its place has no hook of this name.
        """
        position = self._position(name, group)
        if position is None:
            names = [entry.name for entry in self._entries if entry.group == group]
            raise KeyError(f"`name` must be one of {names}, got {name!r}.")
        del self._entries[position]

    def due(self, timing: str) -> list[Registration]:
        """List the hooks of one timing in the order of their calls.

        The optimizer's own come first before the update and last after it, around those of groups.
        """
        due = [entry for entry in self._entries if entry.timing == timing]
        return sorted(due, key=lambda entry: (entry.group is None) == (timing == "post"))

    def state_dict(self) -> list[dict[str, Any]]:
        """Describe every hook, with what it remembers."""
        return [
            {
                "hook": entry.label,
                "state": _memory(entry.hook),
            }
            for entry in self._entries
        ]

    def check(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a saved state that comes from other hooks.

        Raises:
            StateError: The names, timings or places differ; the first difference is named.
        """
        here = [entry.label for entry in self._entries]
        there = [entry["hook"] for entry in saved]
        if here != there:
            raise StateError(
                f"The hooks must be those of the saved state, in its order ({', '.join(there) or 'none'}), "
                f"got {', '.join(here) or 'none'}. Add them before loading."
            )

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Give every hook what it remembered, or none, if one of them refuses."""
        before = self.state_dict()
        try:
            self._remember(saved)
        except BaseException:
            self._remember(before)
            raise

    def _remember(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Hand out what was saved, hook by hook."""
        for entry, state in zip(self._entries, saved, strict=True):
            if isinstance(entry.hook, StatefulHook):
                entry.hook.load_state_dict(dict(state["state"]))

    def _position(self, name: str, group: int | None) -> int | None:
        """Find a hook by its place and name."""
        places = [(entry.name, entry.group) for entry in self._entries]
        return places.index((name, group)) if (name, group) in places else None


def _memory(hook: object) -> dict[str, Any]:
    """Ask a hook what it remembers; nothing, if it has no such thing."""
    return hook.state_dict() if isinstance(hook, StatefulHook) else {}
