"""What `equal_digests.py` runs on each checkout."""
