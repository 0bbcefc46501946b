"""Finding, verifying and loading snapshots."""
