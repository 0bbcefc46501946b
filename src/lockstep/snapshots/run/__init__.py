"""Snapshots of an updater: what they hold, which one a run resumes from, and whether it fits."""

from lockstep.snapshots.run.agreement import Agreement as Agreement
from lockstep.snapshots.run.collect import (
    Collector as Collector,
    Digester as Digester,
    RecordingWriter as RecordingWriter,
    record_of as record_of,
)
from lockstep.snapshots.run.comparing import Comparison as Comparison, compare_runs as compare_runs
from lockstep.snapshots.run.digest_log import (
    DigestLog as DigestLog,
    Record as Record,
    read_digest_log as read_digest_log,
)
from lockstep.snapshots.run.restoring import fitting as fitting
from lockstep.snapshots.run.resuming import (
    Resumption as Resumption,
    find as find,
    first_rank_in_folder as first_rank_in_folder,
    prepare as prepare,
    restore as restore,
    save as save,
)
