"""Replay what the original systems computed: read their traces, compare ours, account for what differs.

A trace file holds cases; each records what was given to an original and what came out. A replay gives
the same to lockstep, builds a record of the same form, and has it compared, all in one call::

    from traces import Case, Tolerance, cases

    TRIGGERS = cases("chainer-cunn/triggers.json", num_cases=135, given=["trigger", "args"])

    @pytest.mark.parametrize("case", TRIGGERS)
    def test_triggers(case: Case) -> None:
        ours = {"fired": [...], "attrs": [...]}                 # same keys and lists as in the file
        case.check(ours, {"attrs.*.best": Tolerance(1e-5)})     # whatever has no tolerance is exact

A place in a record is called by its path, keys and indices joined by dots: ``steps.3.param.w``. Paths
are matched by patterns in which ``*`` stands for anything, dots included.

Nothing is left out in silence. Every field of a case must be named as given, or be in our record; our
record holds nothing else; the file holds the stated number of cases; and each place where lockstep
differs on purpose has an entry in ``differences.toml``; `differences.py` says how one is written, and what is
checked of it.

The reference folder is found by the environment variable LOCKSTEP_REFERENCE, or beside the repository as
``../shared/reference``. Where there is none, the replays are skipped. The cases of a file can be taken
for traces of the same kind, of another variant: those may have another number of cases and other names, so
that `where` tells them apart. What ours comes to at a listed place is not known there: it is passed over.

A few more cases lie in ``recorded``, in the form of the traces: they were recorded by running Chainer 7.8.1, MXNet
1.9.1 and NNabla 1.39.0 with random input, and lockstep, its replay or its list of differences had them wrong. They are
always replayed.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import pytest
import torch
from difference_rules import RULES
from differences import Difference, for_replay, leaves, look_up, read_differences
from tests.support.selection import chosen_cases

RECORDED = Path(__file__).with_name("recorded")
_MOST_SHOWN = 10
_ARRAY_KEYS = {"dtype", "shape", "data"}
_ABSENT = "<absent>"
_REMARKS = ("status", "note")


@dataclass(frozen=True)
class Tolerance:
    """How far a number may be from the original's.

    It may be so far::

        |ours - original| ≤ relative · max(floor, |original| + offset)

    or, in an array, a share of the largest magnitude there: where terms cancel, what is left has the rounding
    errors of the terms, which are others on another processor.

    Attributes:
        relative: The share of the number.
        floor: The least that the share is taken of.
        offset: What is added to the number before.
        peak: The share of the largest number of the array.
    """

    relative: float
    floor: float = 1.0
    offset: float = 0.0
    peak: float = 0.0

    def accepts(self, ours: float, original: float) -> bool:
        if math.isnan(ours) or math.isnan(original):
            return math.isnan(ours) and math.isnan(original)
        # A share of an infinity is infinite, and would accept every number.
        if math.isinf(ours) or math.isinf(original):
            return ours == original
        return abs(ours - original) <= self.relative * max(self.floor, abs(original) + self.offset)

    def in_array(self, numbers: torch.Tensor) -> Tolerance:
        """Give the tolerance for the elements of an array, whose largest magnitude is known then."""
        finite = numbers[numbers.isfinite()]
        if not self.peak or not finite.numel():
            return self
        return replace(self, floor=max(self.floor, self.peak / self.relative * float(finite.abs().max())))


EXACT = Tolerance(0.0)


@dataclass(frozen=True)
class Case:
    """One case of a trace.

    Attributes:
        name: What the case is called in `differences.toml` and in the test's name. No replay asks for it.
        content: The case as recorded, but for a field ``name``.
        shared: What the file says once for all cases.
        given: Patterns for the places that are no results.
        differences: The entries of `differences.toml` for this case.
        others: All cases of the file by name, for entries that point to one.
    """

    name: str
    content: Mapping[str, Any]
    shared: Mapping[str, Any]
    given: Sequence[str] = ()
    differences: Sequence[Difference] = ()
    others: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __contains__(self, key: str) -> bool:
        return key in self.content

    def in_columns(self) -> Case:
        """Turn the list of steps into a list for each field, so that one difference is about all steps."""
        return replace(self, content={**self.content, "steps": columns(self["steps"])})

    def check(self, ours: Mapping[str, object], tolerances: Mapping[str, Tolerance] | None = None) -> None:
        """Compare our record of the whole case with the original's; the first pattern that fits is used."""
        reached: set[int] = set()
        found = list(self._mismatches("", self.content, ours, tolerances or {}, reached))
        for number, difference in enumerate(self.differences):
            if number not in reached and difference.must_occur:
                found.append(f"{difference.field}: listed as a difference, but this case never comes past it")
        more = f"\n... and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
        assert not found, f"case {self.name}:\n" + "\n".join(found[:_MOST_SHOWN]) + more

    def _mismatches(
        self,
        path: str,
        original: Any,
        ours: object,
        tolerances: Mapping[str, Tolerance],
        reached: set[int],
    ) -> Iterator[str]:
        """Compare one place and all below it."""
        if any(fnmatchcase(path, pattern) for pattern in self.given):
            return
        for number, difference in enumerate(self.differences):
            if fnmatchcase(path, difference.field):
                wanted = self._wanted(path, difference)
                if difference.is_elsewhere and equal(wanted, original):
                    continue
                reached.add(number)
                if not difference.is_known:
                    return
                yield from _wrong_difference(path, original, ours, wanted, _tolerance(path, tolerances))
                return
        parts = list(_parts(original, ours))
        for key, original_part, our_part in parts:
            below = f"{path}.{key}".lstrip(".")
            yield from self._mismatches(below, original_part, our_part, tolerances, reached)
        if not parts and not equal(original, ours, _tolerance(path, tolerances)):
            yield f"{path}: the original has {_short(original)}, ours has {_short(ours)}"

    def _wanted(self, path: str, difference: Difference) -> Any:
        """Find what ours is to be at a place that differs."""
        if difference.as_at is not None:
            return look_up(self.content, difference.other_place(path))
        if difference.rule is not None:
            return RULES[difference.rule](self.content, path)
        if not difference.is_known:
            return None
        if difference.as_in is not None:
            return look_up(self.others[difference.as_in], path)
        if difference.as_without is not None:
            return look_up(self._alike_but(difference.as_without), path)
        return difference.ours

    def _alike_but(self, field: str) -> Mapping[str, Any]:
        """Find the case that was given the same but for one field, which it has not."""

        def inputs(content: Mapping[str, Any]) -> dict[str, Any]:
            return {key: content[key] for key in content if key in self.given and key not in {field, *_REMARKS}}

        alike = [each for each in self.others.values() if inputs(each) == inputs(self.content)]
        (found,) = [each for each in alike if each[field] is None]
        return found


def cases(
    file: str,
    num_cases: int,
    *,
    given: Iterable[str] = (),
    key: str = "cases",
    name: Callable[[Mapping[str, Any]], str] = lambda content: str(content.get("name", "case")),
    through: str = "core",
    differ: bool = True,
) -> list[Any]:
    """List the cases of a trace as parameters for a test.

    Args:
        file: The folder and the name of the file, as in ``"chainer-cunn/serial_iterator.json"``.
        num_cases: How many cases it must hold.
        given: Patterns for what is no result.
        key: Where in the file the list of cases is.
        name: Makes the name of a case; a further case of the same name gets a number.
        through: ``"compat"`` for a replay through the originals' own names.
        differ: Whether the list of differences is about these; of several lists in a file it is about one.
    """
    folder = reference_folder()
    differences = for_replay(read_differences(), through) if differ else []

    def found_in(folder: Path) -> list[Any]:
        found = read(folder, file, num_cases, given=given, key=key, name=name, differences=differences)
        return [pytest.param(case, id=case.name) for case in found]

    own = found_in(RECORDED) if trace_path(RECORDED, file).is_file() else []
    if folder is None:
        reason = "no reference folder: neither LOCKSTEP_REFERENCE nor ../shared/reference"
        return [pytest.param(None, marks=pytest.mark.skip(reason=reason)), *own]
    return [*found_in(folder), *own]


def each_word(listed: Sequence[Any]) -> list[Any]:
    """Mark as slow what a second replay of a trace can do without: cases whose words are in other cases, too.

    A word is a text, a switch or a None at a place of a case, given or as a result.
    """
    chosen = chosen_cases([_words(each.values[0]) for each in listed], "words")
    return [
        each if index in chosen else pytest.param(*each.values, id=each.id, marks=[*each.marks, pytest.mark.slow])
        for index, each in enumerate(listed)
    ]


def _words(case: Case | None) -> dict[str, int]:
    """List the words of a case, each with its place but for the numbers in it."""
    found = [] if case is None else leaves({key: case[key] for key in case.content if key not in _REMARKS})
    plain = ((re.sub(r"\.\d+(?=\.|$)", ".*", path), value) for path, value in found)
    return {f"{path} {value}": 0 for path, value in plain if isinstance(value, str | bool | None)}


def earlier(case: Case, listed: Sequence[Any]) -> list[Case]:
    """List the cases before one among parameters made by `cases`."""
    found = [each.values[0] for each in listed]
    return found[: next(index for index, each in enumerate(found) if each is case)]


def columns(steps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Turn a list of records into a list for each field, where a record without it has no entry."""
    keys = dict.fromkeys(key for step in steps for key in step)
    return {key: [step[key] for step in steps if key in step] for key in keys}


def read(
    folder: Path,
    file: str,
    num_cases: int,
    *,
    given: Iterable[str],
    key: str,
    name: Callable[[Mapping[str, Any]], str],
    differences: Iterable[Difference],
) -> list[Case]:
    """Read the cases of a trace."""
    content = dict(_parsed(trace_path(folder, file).read_text(encoding="utf-8")))
    contents = content.pop(key)
    is_public = content.get("variant", content.get("origin", {}).get("variant")) == "dev"
    counts = f"{file} must hold {num_cases} cases, got {len(contents)}."
    assert len(contents) == num_cases if is_public else contents, counts
    listed = [
        # Where `as_at` or a rule says what ours is, it says so for any trace.
        replace(
            difference,
            is_known=is_public or not (difference.as_at is None and difference.rule is None),
            is_required=is_public,
            **({} if is_public else difference.elsewhere),
        )
        for difference in differences
        if difference.file == file
    ]
    seen: Counter[str] = Counter()
    others: dict[str, Mapping[str, Any]] = {}
    result = []
    for each in contents:
        plain_name = name(each)
        seen[plain_name] += 1
        unique = plain_name if seen[plain_name] == 1 else f"{plain_name}#{seen[plain_name]}"
        held = list(leaves(each)) if listed else []
        own = [difference for difference in listed if difference.is_for(unique, held)]
        plain = {field: value for field, value in each.items() if field != "name"}
        result.append(Case(unique, plain, content, given, own, others))
        others[unique] = plain
    for difference in listed:
        lost = not any(difference in case.differences for case in result)
        assert not (lost and is_public), f"{file} has no case for the difference {difference}."
    return result


@cache
def _parsed(text: str) -> Mapping[str, Any]:
    """Parse a file that several replays share."""
    content: Mapping[str, Any] = json.loads(text)
    return content


def trace_path(folder: Path, file: str) -> Path:
    system, trace = file.split("/")
    return folder / system / "traces" / trace


def reference_folder() -> Path | None:
    """Find the reference folder, or None; a folder that the environment names must be there."""
    named = os.environ.get("LOCKSTEP_REFERENCE")
    if named:
        assert Path(named).is_dir(), f"LOCKSTEP_REFERENCE must name a folder, got {named}."
        return Path(named)
    beside = Path(__file__).resolve().parents[3] / "shared" / "reference"
    return beside if beside.is_dir() else None


def tensor(original: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Make a tensor of a recorded array, or of a list of numbers where the dtype is known."""
    if isinstance(original, Mapping):
        flat = torch.tensor(_numbers(original["data"]), dtype=getattr(torch, original["dtype"]))
        return flat.reshape(original["shape"])
    return torch.tensor(_numbers(original), dtype=dtype)


def equal(original: Any, ours: Any, tolerance: Tolerance = EXACT) -> bool:
    """Say whether ours is what the original recorded, in the form that JSON has for it."""
    if isinstance(ours, torch.Tensor):
        return _equal_tensor(original, ours, tolerance)
    if isinstance(original, Mapping) or isinstance(ours, Mapping):
        if not (isinstance(original, Mapping) and isinstance(ours, Mapping)):
            return False
        same_keys = original.keys() == ours.keys()
        return same_keys and all(equal(original[key], ours[key], tolerance) for key in original)
    if _is_list(original) or _is_list(ours):
        if not (_is_list(original) and _is_list(ours)) or len(original) != len(ours):
            return False
        return all(equal(*pair, tolerance) for pair in zip(original, ours, strict=True))
    return _equal_scalar(original, ours, tolerance)


def _parts(original: Any, ours: Any) -> Iterator[tuple[object, Any, Any]]:
    """Pair what two containers of one kind hold; nothing where there are not two such."""
    if isinstance(ours, Mapping) and isinstance(original, Mapping):
        for key in [*original, *(key for key in ours if key not in original)]:
            yield key, original.get(key, _ABSENT), ours.get(key, _ABSENT)
    elif _is_list(ours) and _is_list(original) and len(ours) == len(original):
        yield from zip(range(len(ours)), original, ours, strict=True)


def _equal_tensor(original: Any, ours: torch.Tensor, tolerance: Tolerance) -> bool:
    """Compare a tensor with an array, a list (flat, or nested as the tensor is), or a number."""
    if isinstance(original, Mapping):
        if original.keys() != _ARRAY_KEYS or list(ours.shape) != original["shape"]:
            return False
        # Recorded decimals are short ones: they mean the number of the dtype that is next to them.
        same_dtype = str(ours.dtype) == f"torch.{original['dtype']}"
        numbers = tensor(original)
        return same_dtype and equal(numbers.tolist(), ours.tolist(), tolerance.in_array(numbers))
    is_flat = _is_list(original) and not any(map(_is_list, original))
    return equal(original, ours.flatten().tolist() if is_flat else ours.tolist(), tolerance)


def _equal_scalar(original: Any, ours: Any, tolerance: Tolerance) -> bool:
    """Compare numbers by value, everything else by type and value."""
    if isinstance(ours, float) and original in ("nan", "inf", "-inf"):
        original = float(original)
    if not (_is_number(original) and _is_number(ours)):
        return type(original) is type(ours) and bool(original == ours)
    if isinstance(original, int) and isinstance(ours, int):
        return original == ours
    return tolerance.accepts(ours, original)


def _wrong_difference(path: str, original: Any, ours: object, wanted: Any, tolerance: Tolerance) -> Iterator[str]:
    """Say what is wrong with an entry of the list at the place it is for."""
    if not equal(wanted, ours, tolerance):
        yield f"{path}: listed as a difference with {_short(wanted)}, ours has {_short(ours)}"
    if equal(original, ours, tolerance):
        yield f"{path}: listed as a difference, but ours is what the original has, {_short(original)}"


def _tolerance(path: str, tolerances: Mapping[str, Tolerance]) -> Tolerance:
    """Find the first tolerance whose pattern fits the path."""
    return next((value for pattern, value in tolerances.items() if fnmatchcase(path, pattern)), EXACT)


def _numbers(data: Any) -> Any:
    """Turn the words for numbers that are not finite into numbers."""
    if isinstance(data, list):
        return [_numbers(value) for value in data]
    return float(data) if isinstance(data, str) else data


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
