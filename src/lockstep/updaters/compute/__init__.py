"""Compute the part of an update that belongs to this process: from shards to partial sums."""
