"""Find the first update in which two runs of a script differ, and the tensor and shard that differ in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

Key: TypeAlias = tuple[int, int]
"""An update and the updater or optimizer that makes it."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two runs differ first.

    Attributes:
        what: "data" if a shard gets other samples, "shard" if it computes other values from the same samples, "step" if
            all shards are equal, "one shard" if the batch as a single shard has another gradient, and "end" if one run
            ended before the other.
        source: The updater or optimizer, counted in the order of their first updates.
        update: The update, 1 for the first one.
        tensor: The first tensor that differs: an input, a gradient, or one of the training state.
        computation: The gradient of the update, 1 for the first one; None where no shard differs.
        shard: The shard; None where none differs.
        text: What else is known, such as the error that ended a run.
    """

    what: str
    source: int = 0
    update: int = 0
    tensor: str = ""
    computation: int | None = None
    shard: int | None = None
    text: str = ""

    def describe(self) -> str:
        """Return one line about it."""
        if self.what == "end":
            return self.text
        where = "" if self.shard is None else f", shard {self.shard}"
        what = {
            "data": "the input",
            "shard": "the gradient of",
            "step": "after the step,",
            "one shard": "as a single shard, the gradient of",
        }[self.what]
        if self.tensor == "loss":
            what = "the"
        return f"update {self.update}{where}: {what} {self.tensor}"


@dataclass
class Run:
    """What one run of a script has recorded; that of several processes is one run.

    Attributes:
        updates: The records of its updates.
        notes: What was noted about the script. Of a dict, each note adds keys.
        compared: What was found by comparing gradients with those of a single shard.
        trace: What the shard or step that is looked at has called, if this process had it.
        error: The error that ended it; empty without one.
    """

    updates: dict[Key, dict[str, Any]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    compared: list[dict[str, Any]] = field(default_factory=list)
    trace: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def read_run(paths: Iterable[Path]) -> list[Run]:
    """Read the records of the processes of one run. Each gets the shards of all of them.

    Args:
        paths: The files. One that is missing counts as empty.
    """
    runs = []
    for path in paths:
        run = Run()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in map(json.loads, lines):
            if "update" in line:
                run.updates[line["update"], line["source"]] = line
            else:
                for name, noted in line.get("note", {}).items():
                    run.notes[name] = {**run.notes.get(name, {}), **noted} if isinstance(noted, dict) else noted
                run.compared.extend(line.get("compared", []))
                for name, value in line.get("trace", {}).items():
                    run.trace.setdefault(name, value)
                run.error = line.get("error", run.error)
        runs.append(run)
    for key in runs[0].updates:
        shards: dict[str, Any] = {}
        for run in runs:
            shards |= run.updates.get(key, {}).get("shards", {})
        for run in runs:
            if key in run.updates:
                run.updates[key]["shards"] = shards
    return runs


def first_difference(reference: Run, other: Run, *, made: int = 0) -> Difference | None:
    """Return the first difference of two runs; None if they are equal.

    Args:
        reference: The run that made all updates.
        other: The run to compare with it.
        made: The number of updates that an earlier process made before `other`.
    """
    for update, source in sorted(reference.updates):
        if update <= made:
            continue
        if (update, source) not in other.updates:
            reason = other.error or "It ended without an error."
            return Difference("end", source, update, text=f"ended before update {update}. {reason}")
        found = _difference(reference.updates[update, source], other.updates[update, source], source, update)
        if found is not None:
            return found
    # A script with a number of updates of its own makes as many again when it goes on.
    extra = [] if made else sorted(set(other.updates) - set(reference.updates))
    if extra:
        return Difference(
            "end", extra[0][1], extra[0][0], text=f"made update {extra[0][0]}, which the first run did not"
        )
    return None


def _difference(first: Mapping[str, Any], second: Mapping[str, Any], source: int, update: int) -> Difference | None:
    """Compare two records of one update: what shards get, what they compute, and what the step leaves."""
    compared = [first_name(first[part], second[part], part) for part in ("tensors", "loss")]
    differing = [name for name in compared if name]
    if not differing:
        return None
    # Where one run has computed more, such as a batch once more after an overflow, shards cannot be paired.
    are_alike = first["shards"].keys() == second["shards"].keys()
    for what, parts in (("data", ("data",)), ("shard", ("loss", "gradients"))):
        for name in sorted(first["shards"], key=_position) if are_alike else ():
            ours, theirs = first["shards"][name], second["shards"][name]
            for part in parts:
                tensor = first_name(ours.get(part), theirs.get(part), part)
                if tensor and part in ours and part in theirs:
                    computation, shard = _position(name)
                    return Difference(what, source, update, tensor, computation, shard)
    return Difference("step", source, update, differing[0])


def _position(name: str) -> tuple[int, int]:
    """Return the computation and the shard of a record's key."""
    computation, shard = name.split("/")
    return int(computation), int(shard)


def first_name(ours: Any, theirs: Any, part: str) -> str:
    """Return the name of the first value that differs; empty if none does.

    >>> first_name({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, "tensors"), first_name("1", "1", "loss")
    ('b', '')
    """
    if not isinstance(ours, dict) or not isinstance(theirs, dict):
        return part if ours != theirs else ""
    return next((name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)), "")
