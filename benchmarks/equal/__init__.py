"""The recipes that `equal_digests.py` runs on each checkout."""
