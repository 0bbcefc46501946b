"""Finding, verifying and loading snapshots."""

from lockstep.snapshots.reading.listing import (
    Found as Found,
    damaged_manifests as damaged_manifests,
    list_snapshots as list_snapshots,
    newest_whole as newest_whole,
)
from lockstep.snapshots.reading.snapshot import Snapshot as Snapshot, load as load, verify as verify
