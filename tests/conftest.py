"""Its presence puts this folder on the path, so that test modules find the small members beside it."""
