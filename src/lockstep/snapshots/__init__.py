"""Snapshots of a run: whole, verified, and the same bytes for every placement."""

from lockstep.snapshots.content import (
    Content as Content,
    Parent as Parent,
    folder_name as folder_name,
    training_of as training_of,
)
from lockstep.snapshots.disk import Disk as Disk
from lockstep.snapshots.interchange import (
    Matches as Matches,
    export_hf as export_hf,
    export_torch as export_torch,
    import_accelerate as import_accelerate,
    import_lightning as import_lightning,
    import_torch as import_torch,
)
from lockstep.snapshots.manifest import Limits as Limits, Manifest as Manifest
from lockstep.snapshots.run import (
    Agreement as Agreement,
    Collector as Collector,
    Comparison as Comparison,
    Digester as Digester,
    DigestLog as DigestLog,
    Record as Record,
    RecordingWriter as RecordingWriter,
    Resumption as Resumption,
    compare_runs as compare_runs,
    find as find,
    first_rank_in_folder as first_rank_in_folder,
    fitting as fitting,
    prepare as prepare,
    read_digest_log as read_digest_log,
    record_of as record_of,
    restore as restore,
    save as save,
)
from lockstep.snapshots.snapshot import (
    Found as Found,
    Snapshot as Snapshot,
    damaged_manifests as damaged_manifests,
    list_snapshots,
    load as load,
    newest_whole as newest_whole,
    verify as verify,
)
from lockstep.snapshots.writer import (
    Retention as Retention,
    SnapshotWriter as SnapshotWriter,
    write_beside as write_beside,
)

list = list_snapshots  # noqa: A001 - it is called as `ls.snapshots.list`
