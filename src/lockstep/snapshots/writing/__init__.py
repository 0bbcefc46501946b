"""Copying the state of a run and making it durable."""

from lockstep.snapshots.writing.beside import write_beside as write_beside
from lockstep.snapshots.writing.disk import Disk as Disk
from lockstep.snapshots.writing.retention import Retention as Retention
from lockstep.snapshots.writing.writer import SnapshotWriter as SnapshotWriter
