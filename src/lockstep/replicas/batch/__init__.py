"""Splitting a batch into the inputs of shards, and merging the outputs and input gradients of shards."""
