"""Data in files and streams: read in blocks, side by side, so that each process reads only what its shards need."""
