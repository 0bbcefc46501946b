"""The hooks of an optimizer: their names, when each is called, and their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from lockstep.arguments import check_choice
from lockstep.errors import StateError
from lockstep.state import Loadable, load_all

TIMINGS = ("pre", "post")


@runtime_checkable
class StatefulHook(Loadable, Protocol):
    """A hook that has state between updates, which ``state_dict`` returns and ``load_state_dict`` loads.

    A state consists of plain values and tensors. One that does not fit must raise before anything has changed.
    """


@dataclass(frozen=True, slots=True)
class Registration:
    """A hook and the options it was added with.

    Args:
        name: The name of the hook, unique among the hooks of its owner.
        hook: The function, called as ``hook(optimizer)`` or as ``hook(optimizer, parameter)``.
        timing: When it is called: before the weights are updated ("pre") or after ("post").
        group: The index of the parameter group it belongs to; None for the whole optimizer.
        per_parameter: Whether it is called once for each parameter.
    """

    name: str
    hook: Callable[..., object]
    timing: str
    group: int | None
    per_parameter: bool

    @property
    def owner(self) -> str:
        """What the hook was added to, in words."""
        return "the optimizer" if self.group is None else f"group {self.group}"

    @property
    def label(self) -> str:
        """The name, with the options that must agree when a saved state is loaded."""
        return f"{self.name!r} ({self.timing}, on {self.owner})"


def describe(hook: Callable[..., object], name: str | None, timing: str, group: int | None) -> Registration:
    """Create a registration from the arguments of `add_hook` and the attributes of the hook.

    A hook may have the attributes ``name``, ``timing`` and ``per_parameter``. A plain function has none of
    them: it is called once, before the weights are updated, and is named by its definition.

    Raises:
        TypeError: If the hook is not callable.
        ValueError: If the timing is unknown, or there is no name.

    >>> def halve(optimizer):
    ...     ...
    >>> describe(halve, None, "auto", None).label
    "'halve' (pre, on the optimizer)"
    """
    if not callable(hook):
        raise TypeError(f"`hook` must be callable, got {type(hook).__name__}.")
    check_choice("timing", timing, (*TIMINGS, "auto"))
    if timing == "auto":
        timing = getattr(hook, "timing", "pre")
        check_choice("hook.timing", timing, TIMINGS)
    name = name or getattr(hook, "name", None) or getattr(hook, "__name__", None)
    if name is None:
        raise ValueError("`name` must be given for a hook that has neither `name` nor `__name__`, got None.")
    return Registration(name, hook, timing, group, bool(getattr(hook, "per_parameter", False)))


class HookList:
    """The hooks of one optimizer, in the order in which they were added.

    >>> hooks = HookList()
    >>> hooks.add(describe(print, None, "post", None))
    >>> [entry.label for entry in hooks.with_timing("post")]
    ["'print' (post, on the optimizer)"]
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[str, int | None], Registration] = {}

    def functions(self) -> list[Callable[..., object]]:
        """List the hooks in the order in which they were added."""
        return [entry.hook for entry in self._entries.values()]

    def add(self, entry: Registration) -> None:
        """Append a hook.

        Raises:
            KeyError: If its owner already has a hook of this name, at either timing.
        """
        if (entry.name, entry.group) in self._entries:
            rule = f"must be new among the hooks of {entry.owner}"
            raise KeyError(f"`name` {rule}, got {entry.name!r}. Pass another `name` for the second hook.")
        self._entries[entry.name, entry.group] = entry

    def remove(self, name: str, group: int | None) -> None:
        """Remove a hook.

        Raises:
            KeyError: If its owner has no hook of this name.
        """
        if (name, group) not in self._entries:
            names = [each for each, owner in self._entries if owner == group]
            raise KeyError(f"`name` must be one of {names}, got {name!r}.")
        del self._entries[name, group]

    def with_timing(self, timing: str) -> list[Registration]:
        """List the hooks of one timing in the order in which they are called.

        The hooks of the whole optimizer come before those of groups at "pre", and after them at "post".
        """
        entries = [entry for entry in self._entries.values() if entry.timing == timing]
        # The sort is stable: hooks of one owner stay in the order in which they were added.
        return sorted(entries, key=lambda entry: (entry.group is None) == (timing == "post"))

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the label and the state of every hook."""
        return [{"hook": entry.label, "state": _hook_state(entry.hook)} for entry in self._entries.values()]

    def check(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Check that a saved state was written with the same hooks.

        Raises:
            StateError: If the names, timings, owners or the order differ.
        """
        here = [entry.label for entry in self._entries.values()]
        there = [entry["hook"] for entry in saved]
        if here != there:
            raise StateError(
                f"The hooks must be those of the saved state, in its order ({', '.join(there) or 'none'}), "
                f"got {', '.join(here) or 'none'}. Add them before loading."
            )

    def load_state_dict(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of every hook, or of none if one of them raises."""
        hooks: list[Any] = self.functions()
        pairs = zip(hooks, saved, strict=True)
        load_all([(hook, dict(each["state"])) for hook, each in pairs if isinstance(hook, StatefulHook)])


def _hook_state(hook: object) -> Mapping[str, Any]:
    """Return the state of a hook, which is empty for a hook without one."""
    return hook.state_dict() if isinstance(hook, StatefulHook) else {}
