"""Combine the partial sums of this process with those of the other ranks."""
