"""The `lockstep` command."""

from lockstep.cli.command import main as main
