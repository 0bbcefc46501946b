"""List the snapshots of a run.

List the snapshots of a run. With --verify, read every byte of them, and compare it with the digests in the manifest.
The exit code is 1 if a snapshot is damaged or if there is none.
"""

from __future__ import annotations

import argparse
import sys
from datetime import datetime, timezone
from pathlib import Path

from lockstep.errors import SnapshotError, printable
from lockstep.snapshots import Found, list as list_snapshots, verify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", type=Path, help="folder of the run, which contains the folder snapshots")
    parser.add_argument("--verify", action="store_true", help="read and verify every byte")


def call(options: argparse.Namespace) -> int:
    """List the snapshots, and return the exit code."""
    found = list_snapshots(options.run)
    if not found:
        sys.stderr.write(f"There are no snapshots in {options.run}.\n")
        return 1
    damaged = 0
    for each in found:
        text = _described(each)
        try:
            if each.error is not None:
                raise each.error
            if options.verify:
                verify(each.path)
                text += "  whole"
        except SnapshotError as error:
            damaged += 1
            text += f"  damaged: {error}"
        # Names and reasons were read from files.
        sys.stdout.write(f"{printable(text)}\n")
    return 1 if damaged else 0


def _described(found: Found) -> str:
    """Return the line of a snapshot."""
    if found.manifest is None:
        return f"{found.path.name}  "
    manifest = found.manifest
    written = datetime.fromtimestamp(found.path.stat().st_mtime, tz=timezone.utc)
    reasons = ", ".join(manifest.reasons)
    # The best one has its value among the reasons already.
    values = [f"{name} = {value:.6g}" for name, value in manifest.metrics.items()]
    others = "".join(f"  {value}" for value in values if f"best: {value}" not in manifest.reasons)
    verified = f"  equal on {found.ranks} ranks" if found.ranks else ""
    epoch = manifest.progress.get("epoch")
    return (
        f"{found.path.name}  epoch {epoch}  {manifest.bytes / 1e6:.1f} MB  {written:%Y-%m-%d %H:%M:%S}  "
        f"{manifest.training[:12]}  {reasons}{others}{verified}"
    )
