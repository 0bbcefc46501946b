"""Snapshots for other programs, and checkpoints of other programs for updaters."""

from lockstep.snapshots.interchange.exporting import export_hf as export_hf, export_torch as export_torch
from lockstep.snapshots.interchange.importing import (
    Matches as Matches,
    import_accelerate as import_accelerate,
    import_lightning as import_lightning,
    import_torch as import_torch,
)
