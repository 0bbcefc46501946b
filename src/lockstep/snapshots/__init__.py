"""Snapshots of a run: whole, verified, and the same bytes for every placement."""

from lockstep.snapshots.content import (
    Content as Content,
    Parent as Parent,
    folder_name as folder_name,
    training_of as training_of,
)
from lockstep.snapshots.digests import (
    Agreement as Agreement,
    Comparison as Comparison,
    DigestLog as DigestLog,
    Record as Record,
    compare_runs as compare_runs,
    read_digest_log as read_digest_log,
    record_of as record_of,
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
from lockstep.snapshots.manifest import Manifest as Manifest
from lockstep.snapshots.resuming import (
    find as find,
    first_rank_in_folder as first_rank_in_folder,
    restore as restore,
    save as save,
)
from lockstep.snapshots.snapshot import (
    Found as Found,
    Snapshot as Snapshot,
    best as best,
    list_snapshots,
    load as load,
    newest_whole as newest_whole,
    verify as verify,
)
from lockstep.snapshots.updater_state import (
    Collector as Collector,
    Resumption as Resumption,
    fitting as fitting,
    prepare as prepare,
)
from lockstep.snapshots.writer import (
    Digester as Digester,
    Retention as Retention,
    SnapshotWriter as SnapshotWriter,
    write_beside as write_beside,
)

list = list_snapshots  # noqa: A001 - it is called as `ls.snapshots.list`
