"""Snapshots of an updater: what they hold, which one a run resumes from, and whether it fits."""
