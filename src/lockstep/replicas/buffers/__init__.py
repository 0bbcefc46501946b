"""The buffers of a model under several shards: the values that each shard starts from, and how changes are combined."""
