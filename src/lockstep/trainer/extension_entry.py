"""What a trainer knows of each of its extensions."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.trainer.extension import Extension
from lockstep.triggers import Trigger


@dataclass(frozen=True, eq=False)
class ExtensionEntry:
    """An extension of a trainer, with the name, the trigger and the priority it was added with."""

    name: str
    extension: Extension
    trigger: Trigger
    priority: int
    call_before_training: bool
