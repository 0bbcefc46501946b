"""The places where lockstep differs from the originals on purpose, and which cases each is about.

An entry of ``differences.toml``::

    [[difference]]
    file = "chainer-cunn/serial_iterator.json"
    case = "empty_dataset_*"          # a pattern for names of cases
    field = "nexts"                   # a pattern for paths; what lies below is not compared further
    ours = "ValueError: ..."          # the value in our record instead; left out, it is None
    reason = "Why it is better so."

Where ours is what the original recorded in another case, ``as_in`` names that case in the place of ``ours``::

    case = "parallel2_loss_scale_clip"
    field = "steps.*.param"
    as_in = "parallel2_clip"          # what stands there at the same path

``as_without = "loss_scale"`` means the case that was given the same but for this, and ``as_at`` another place
of the same case; ``{}`` stands for what a ``*`` of the field stood for. Where the original has the same at
both places nothing differs::

    field = "steps.*.events.4.2"
    as_at = "steps.{}.events.3.2"

Where a formula says what ours is, ``rule`` names it: a function in `difference_rules.py` of what the case
holds. It may come to what the original has; then nothing differs there::

    field = "lengths"
    rule = "fair_slices"

Which cases an entry is for, their name may say, or what they hold: ``where`` has a pattern for the value (as
Python writes it) of some place, which may be a pattern, too::

    where = { mode = "static", "hooks.*.hook" = "GradientClipping" }

Where that is one trace's numbers, ``elsewhere`` has what stands for it in traces of another variant, in which
a listed place is passed over::

    where = { contexts = "2", "work_load_list.1" = "3" }
    elsewhere = { where = { contexts = "[!1]*" } }

An entry is for every replay of its file, unless it says ``through = "core"`` or ``through = "compat"``: the
same trace may be replayed through the originals' own names, where less differs.

Such an entry is checked: ours must be that value, it must differ from the original's, and each case the
entry is for must come past it (by a rule: some case). An entry for no case at all is an error.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from difference_rules import RULES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DIFFERENCES = Path(__file__).with_name("differences.toml")


@dataclass(frozen=True)
class Difference:
    """A place where lockstep differs from the original on purpose.

    Attributes:
        is_known: Whether what ours comes to is known; it is for the traces that the list was made with, and
            wherever it follows from what a case holds.
        is_required: Whether each of its cases must come past it; so it is in the traces of the list.
    """

    file: str
    case: str = "*"
    field: str = "*"
    ours: Any = None
    reason: str = ""
    as_in: str | None = None
    as_without: str | None = None
    as_at: str | None = None
    rule: str | None = None
    where: Mapping[str, str] = dataclasses.field(default_factory=dict)
    elsewhere: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    through: str | None = None
    is_known: bool = True
    is_required: bool = True

    def __post_init__(self) -> None:
        assert self.through in {None, "core", "compat"}, f"{self} must be through one of the two."
        assert self.reason, f"{self} must have a reason."
        assert self.rule is None or self.rule in RULES, f"{self} must have a rule of `difference_rules.py`."
        assert self.elsewhere.keys() <= {"case", "field", "where"}, f"{self} must say elsewhere what it is for."
        given = [self.ours, self.as_in, self.as_without, self.as_at, self.rule]
        assert given.count(None) >= len(given) - 1, f"{self} must say in one way what ours is."

    @property
    def must_occur(self) -> bool:
        """Whether each case must come past it; one that a rule is for may come to what the original has."""
        return self.is_required and self.rule is None

    @property
    def is_elsewhere(self) -> bool:
        """Whether ours is what the original has at another place, or follows from what the case holds."""
        return not (self.as_at is None and self.as_without is None and self.rule is None)

    def is_for(self, name: str, held: Sequence[tuple[str, Any]]) -> bool:
        """Return whether this is about a case, by its name and by the `leaves` that it holds."""
        return fnmatchcase(name, self.case) and all(
            any(fnmatchcase(path, place) and fnmatchcase(str(value), wanted) for path, value in held)
            for place, wanted in self.where.items()
        )

    def other_place(self, path: str) -> str:
        """Give the place that `as_at` names, for one that the entry's field fits."""
        assert self.as_at is not None
        pattern = "(.*)".join(map(re.escape, self.field.split("*")))
        found = re.fullmatch(pattern, path)
        assert found is not None, f"`field` of {self} must have no pattern but `*`, for `as_at`."
        return self.as_at.format(*found.groups())


@cache
def read_differences(path: Path = DIFFERENCES) -> tuple[Difference, ...]:
    """Read the list of the places where lockstep differs on purpose."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["difference"]
    return tuple(Difference(**entry) for entry in entries)


def for_replay(differences: Iterable[Difference], through: str) -> list[Difference]:
    """Choose the differences that are for one of two replays, or for both."""
    return [each for each in differences if each.through in {None, through}]


def leaves(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """List what is no container, by its path."""
    if isinstance(content, Mapping):
        parts: Iterable[tuple[Any, Any]] = content.items()
    elif isinstance(content, Sequence) and not isinstance(content, str):
        parts = enumerate(content)
    else:
        yield path, content
        return
    for key, part in parts:
        yield from leaves(part, f"{path}.{key}".lstrip("."))


def look_up(content: Any, path: str) -> Any:
    """Find what stands at a path."""
    for key in path.split("."):
        content = content[key] if isinstance(content, Mapping) else content[int(key)]
    return content
