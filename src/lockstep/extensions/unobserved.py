"""Names of values that an extension is given, and that nothing observes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import Final

from lockstep.arguments import check_instance
from lockstep.errors import warn
from lockstep.trainer import Trainer

_CUTOFF: Final = 0.8
"""How similar two names must be, from 0 to 1, for one to be a misspelling of the other."""


def check_names(argument: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names as a tuple, after checking that they are not a single text.

    Args:
        argument: The name of the argument in error messages.
        names: The names, or None.

    Raises:
        TypeError: If they are no list, or a text, whose letters would be taken for names.
    """
    if isinstance(names, str):
        raise TypeError(
            f"`{argument}` must be a list of names, got the text {names!r}. Pass "
            f"{[name.strip() for name in names.split(',')]}."
        )
    check_instance(argument, names, Iterable | None, "a list of names")
    return None if names is None else tuple(names)


class Unobserved:
    """Warns once of names that are not observed when they should be.

    An extension may observe its value later than others, such as an evaluation. A name is therefore only missed early
    if it is nearly that of a value, or has the last part of one; any other at the end of a run of an epoch at least.

    Args:
        of: What has been given the names, for the warning, such as ``"`keys` of LogReport"``.
        names: The names.
    """

    def __init__(self, of: str, names: Collection[str] | None) -> None:
        self._of = of
        self._names = set(names or ())
        self._known: set[str] = set()

    def check(self, trainer: Trainer, known: Collection[str], *, at_end: bool = False) -> None:
        """Compare the names with those of values that are known by now.

        Args:
            trainer: The trainer.
            known: The names of values.
            at_end: Whether no further value will be observed.
        """
        if not self._names:
            return
        self._known.update(known)
        self._names -= self._known
        # While an error ends the run, what is missing may only have come later.
        at_end = at_end and trainer.updater.epoch > 0 and trainer.error is None
        missed = [name for name in sorted(self._names) if at_end or self._nearest(name)]
        if not missed:
            return
        self._names.difference_update(missed)
        if not trainer.is_main:
            return
        close = [match for name in missed for match in self._nearest(name)]
        remedy = f" Did you mean {', '.join(map(repr, dict.fromkeys(close)))}?" if close else ""
        warn(
            f"{self._of} must name observed values, got {', '.join(map(repr, missed))}; at update "
            f"{trainer.updater.iteration} there is {', '.join(map(repr, sorted(self._known)))}.{remedy}"
        )

    def _nearest(self, name: str) -> list[str]:
        """Return a known name that is meant, if there is one."""
        last = name.rsplit("/", maxsplit=1)[-1]
        same = [each for each in sorted(self._known) if each.split("/")[-1] == last and "/" not in name]
        return same[:1] or get_close_matches(name, sorted(self._known), 1, _CUTOFF)
