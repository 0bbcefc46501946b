"""Names of values that an extension is given, and that nothing observes."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import Final

from lockstep.trainer import Trainer

_CUTOFF: Final = 0.4
"""How similar a name must be to be suggested, from 0 to 1; the last parts of names are usually right."""


def check_names(argument: str, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return names as a tuple, after checking that they are not a single text.

    Args:
        argument: The name of the argument in error messages.
        names: The names, or None.

    Raises:
        TypeError: If they are a text, whose letters would be taken for names.
    """
    if isinstance(names, str):
        raise TypeError(f"`{argument}` must be a list of names, got the text {names!r}. Pass [{names!r}].")
    return None if names is None else tuple(names)


class Unobserved:
    """Warns once of names that are not observed when they should be.

    A value of an evaluation may come later than those of updates. A name that begins with that of an extension is
    therefore only missed when another value of that extension has been observed, or when the run ends.

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
        # After an update at least, or there is nothing to compare with.
        missed = [name for name in sorted(self._names) if at_end or self._is_due(trainer, name)] if self._known else []
        if not missed:
            return
        self._names.difference_update(missed)
        if not trainer.is_main:
            return
        close = [match for name in missed for match in get_close_matches(name, sorted(self._known), 1, _CUTOFF)]
        remedy = f" Did you mean {', '.join(map(repr, dict.fromkeys(close)))}?" if close else ""
        warnings.warn(
            f"{self._of} must name observed values, got {', '.join(map(repr, missed))}; at update "
            f"{trainer.updater.iteration} there is {', '.join(map(repr, sorted(self._known)))}.{remedy}",
            stacklevel=2,
        )

    def _is_due(self, trainer: Trainer, name: str) -> bool:
        first = name.split("/", maxsplit=1)[0]
        return first not in trainer.extensions or any(each.split("/")[0] == first for each in self._known)
