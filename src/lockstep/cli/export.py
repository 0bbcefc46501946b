"""Write a snapshot for other programs.

Write the newest whole snapshot of a run, or a certain snapshot, for other programs. With --to torch, PATH is a file for
torch.load(PATH, weights_only=True). With --to hf, PATH is a folder for from_pretrained, which also needs the
configuration of the model, see --config.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.errors import SnapshotError
from lockstep.snapshots import best, export_hf, export_torch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run", type=Path, help="folder of a run or of a snapshot")
    parser.add_argument("--to", choices=("torch", "hf"), required=True, help="the kind of files")
    parser.add_argument("path", type=Path, help="file or folder to write")
    parser.add_argument("--best", action="store_true", help="write the best snapshot of the run, not the newest one")
    parser.add_argument("--config", type=Path, help="config.json of the model, or its folder, to add (with --to hf)")
    parser.add_argument("--model", default="main", help="name of the model, of several (with --to hf; default: main)")


def call(options: argparse.Namespace) -> int:
    """Write the files, and return the exit code."""
    try:
        source = best(options.run).path if options.best else options.run
        if options.to == "torch":
            checkpoint = export_torch(source, options.path)
            written = f"{options.path}: {', '.join(checkpoint)} of update {checkpoint['iteration']}"
        else:
            written = str(export_hf(source, options.path, config=options.config, model=options.model))
            if options.config is None:
                hint = "from_pretrained also needs config.json, which --config FILE adds."
                sys.stderr.write(f"lockstep export: {hint}\n")
    except (SnapshotError, OSError, KeyError) as error:
        # The text of a KeyError is the repr of its message.
        sys.stderr.write(f"lockstep export: {error.args[0] if isinstance(error, KeyError) else error}\n")
        return 1
    sys.stdout.write(f"{written}\n")
    return 0
