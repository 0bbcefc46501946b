"""The files of a run beside its snapshots."""

from lockstep.side_files.side_file import (
    DAMAGE as DAMAGE,
    SideFile as SideFile,
    kind_of as kind_of,
    report_unwritten as report_unwritten,
    sync_folder as sync_folder,
)
