"""Find out whether a snapshot repeats the tensors of the one before, as a copy of old memory would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.snapshots.format import Manifest


def repeats(before: Manifest, manifest: Manifest) -> bool:
    """Return whether no tensor has changed between two snapshots of a run, although the weights should have.

    They should have if an update was applied, and a learning rate was not 0.

    Args:
        before: The manifest of the earlier snapshot.
        manifest: The manifest of the later one.
    """
    if before.files != manifest.files or not any(entry.tensors for entry in manifest.files.values()):
        return False
    if _applied(before) == _applied(manifest):
        return False
    # The rates after an update are those of the next one. Weights change where a schedule has raised one later.
    rates = list(_learning_rates(before.state))
    return not rates or any(rate != 0 for rate in rates)


def _applied(manifest: Manifest) -> Any:
    """Return the number of updates that were applied; that of all updates if the run does not count them."""
    applied = manifest.progress.get("applied")
    return manifest.update if applied is None else applied


def _learning_rates(tagged: Any) -> Iterator[Any]:
    """Yield the learning rates in the states of optimizers, wherever these are."""
    if isinstance(tagged, dict):
        groups = tagged.get("param_groups")
        if isinstance(groups, list):
            yield from (group["lr"] for group in groups if isinstance(group, dict) and "lr" in group)
        tagged = list(tagged.values())
    if isinstance(tagged, list):
        for part in tagged:
            yield from _learning_rates(part)
