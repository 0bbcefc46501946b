"""Describe a trainer in a few lines, for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep.trainer.extension_entry import ExtensionEntry
from lockstep.triggers import Trigger
from lockstep.updaters import Updater


def describe(updater: Updater, until: Trigger, out: Path, entries: Sequence[ExtensionEntry]) -> str:
    """Return the text of a trainer: where it stands, when it ends, and its extensions in the order of their calls.

    Args:
        updater: The updater of the trainer.
        until: The trigger that ends the run.
        out: The folder for files.
        entries: The extensions in the order of their calls.
    """
    lines = [
        f"Trainer({type(updater).__name__}, until={until!r}, out={str(out)!r}), {updater.iteration} updates done",
        *(f"  {each.name}: trigger {each.trigger!r}, priority {each.priority}" for each in entries),
    ]
    return "\n".join(lines)
