"""Snapshots of a run: whole, verified, and the same bytes for every placement."""

from lockstep.snapshots.format.content import Content, Parent, folder_name, training_of
from lockstep.snapshots.format.manifest import Limits, Manifest
from lockstep.snapshots.interchange.exporting import export_hf, export_torch
from lockstep.snapshots.interchange.importing import import_accelerate, import_lightning, import_torch
from lockstep.snapshots.interchange.matching import Matches
from lockstep.snapshots.reading.snapshot import (
    Found,
    Snapshot,
    damaged_manifests,
    list_snapshots as list,  # noqa: A004 - it is called as `ls.snapshots.list`
    load,
    newest_whole,
    verify,
)
from lockstep.snapshots.run.agreement import Agreement
from lockstep.snapshots.run.collect import Collector, Digester, RecordingWriter, record_of
from lockstep.snapshots.run.comparing import Comparison, compare_runs
from lockstep.snapshots.run.digest_log import DigestLog, Record, read_digest_log
from lockstep.snapshots.run.loops import restore, save
from lockstep.snapshots.run.restore import fitting
from lockstep.snapshots.run.resuming import Resumption, find, first_rank_in_folder, prepare
from lockstep.snapshots.writing.disk import Disk
from lockstep.snapshots.writing.retention import Retention
from lockstep.snapshots.writing.writer import SnapshotWriter, write_beside

__all__ = [
    "Agreement",
    "Collector",
    "Comparison",
    "Content",
    "DigestLog",
    "Digester",
    "Disk",
    "Found",
    "Limits",
    "Manifest",
    "Matches",
    "Parent",
    "Record",
    "RecordingWriter",
    "Resumption",
    "Retention",
    "Snapshot",
    "SnapshotWriter",
    "compare_runs",
    "damaged_manifests",
    "export_hf",
    "export_torch",
    "find",
    "first_rank_in_folder",
    "fitting",
    "folder_name",
    "import_accelerate",
    "import_lightning",
    "import_torch",
    "list",
    "load",
    "newest_whole",
    "prepare",
    "read_digest_log",
    "record_of",
    "restore",
    "save",
    "training_of",
    "verify",
    "write_beside",
]
