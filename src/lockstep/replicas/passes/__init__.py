"""The forward and backward passes of shards, and the sum of their gradients."""
