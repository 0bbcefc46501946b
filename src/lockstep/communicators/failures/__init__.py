"""Detect failures of other ranks, report this rank's own, and end processes in order."""
