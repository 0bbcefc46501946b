"""Snapshots of a run: whole, verified, and the same bytes for every placement."""

from lockstep.snapshots.content import Content, Parent, folder_name, training_of
from lockstep.snapshots.disk import Disk
from lockstep.snapshots.interchange import (
    Matches,
    export_hf,
    export_torch,
    import_accelerate,
    import_lightning,
    import_torch,
)
from lockstep.snapshots.manifest import Limits, Manifest
from lockstep.snapshots.retention import Retention
from lockstep.snapshots.run import (
    Agreement,
    Collector,
    Comparison,
    Digester,
    DigestLog,
    Record,
    RecordingWriter,
    Resumption,
    compare_runs,
    find,
    first_rank_in_folder,
    fitting,
    prepare,
    read_digest_log,
    record_of,
    restore,
    save,
)
from lockstep.snapshots.snapshot import (
    Found,
    Snapshot,
    damaged_manifests,
    list_snapshots as list,  # noqa: A004 - it is called as `ls.snapshots.list`
    load,
    newest_whole,
    verify,
)
from lockstep.snapshots.writer import SnapshotWriter, write_beside

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
