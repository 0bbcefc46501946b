"""Copying the state of a run and making it durable."""
