"""Compare the recipe and the kernels of a run with those of a snapshot, before anything is changed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from lockstep.errors import DeterminismWarning, StateError
from lockstep.updaters import CODE, UNKNOWN_SHAPE

MISSING: Final = "nothing"
"""The value that a message shows for a field that one side does not have."""

LISTED: Final = 20
"""The number of fields that a message lists with their values. All of them are attributes of the error."""


class Change(NamedTuple):
    """A field that differs.

    Attributes:
        name: The name of the field.
        saved: The value in the snapshot, or `MISSING`.
        own: The value of this run, or `MISSING`.
    """

    name: str
    saved: Any
    own: Any

    def __str__(self) -> str:
        return f"{self.name} is {self.own!r} here and {self.saved!r} in the snapshot"


def check_recipe(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any], accept: Collection[str]) -> list[Change]:
    """Check that a run has the recipe of a snapshot, except for fields that may differ.

    Names of code, and options that only one version of an optimizer has, cause a warning instead of an error.

    Args:
        path: The folder of the snapshot.
        saved: The recipe of the snapshot.
        own: The recipe of this run.
        accept: The names of fields that may differ.

    Returns:
        The fields that differ and are accepted.

    Raises:
        StateError: If other fields differ. The message lists them with both values.
        ValueError: If `accept` names something that is no field of either recipe.
    """
    unknown = sorted(set(accept) - saved.keys() - own.keys())
    if isinstance(accept, str) or unknown:
        listed = ", ".join(name for name in own if ".model." not in f".{name}")
        raise ValueError(f"`accept` must be a collection of fields of the recipe, got {accept!r}. Fields: {listed}.")
    changes = compare_fields(saved, own)
    refused = [each for each in changes if each.name not in accept and not _is_minor(each)]
    if refused:
        names = ", ".join(repr(each.name) for each in refused[:LISTED]) + ("," if len(refused) == 1 else "")
        raise StateError(
            f"Cannot resume from {path}: the result depends on fields that differ. {_listed(refused)}. Restore them, "
            f"or continue with the values of this run by accept=({names})."
        )
    minor = [each for each in changes if each.name not in accept]
    if minor:
        warnings.warn(f"Resuming from {path}, although {_listed(minor)}.", DeterminismWarning, stacklevel=2)
    return [each for each in changes if each.name in accept]


def check_kernels(path: Path, saved: Mapping[str, Any], own: Mapping[str, Any]) -> bool:
    """Compare the kernel class of a run with that of a snapshot, and warn if they differ.

    Args:
        path: The folder of the snapshot.
        saved: The kernel class of the snapshot.
        own: The kernel class of this run.

    Returns:
        Whether they are equal.
    """
    changes = compare_fields(saved, own)
    if changes:
        warnings.warn(
            f"Resuming from {path} with kernels that may round differently: {_listed(changes)}. The determinism "
            "guarantee is suspended: the result need not be that of an uninterrupted run.",
            DeterminismWarning,
            stacklevel=2,
        )
    return not changes


def compare_fields(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[Change]:
    """List the fields that differ, in the order of the snapshot; fields without a shape yet equal any shape.

    >>> compare_fields({"batch_size": 32, "seed": 0}, {"seed": 0, "accumulate": 2})
    [Change(name='batch_size', saved=32, own='nothing'), Change(name='accumulate', saved='nothing', own=2)]
    """
    pairs = [Change(name, saved.get(name, MISSING), own.get(name, MISSING)) for name in {**saved, **own}]
    return [each for each in pairs if each.saved != each.own and UNKNOWN_SHAPE not in (each.saved, each.own)]


def _is_minor(change: Change) -> bool:
    """Return whether a difference alone need not change the result."""
    if change.name.startswith(CODE):
        return True
    is_option = ".optimizer." in f".{change.name}" and change.name.rpartition(".")[2] != "num_parameters"
    return is_option and MISSING in (change.saved, change.own)


def _listed(changes: list[Change]) -> str:
    more = f"; and {len(changes) - LISTED} more" if len(changes) > LISTED else ""
    return "; ".join(map(str, changes[:LISTED])) + more
