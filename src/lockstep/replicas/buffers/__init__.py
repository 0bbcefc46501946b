"""Buffers of a model under several shards: what each shard starts from, and what becomes of its changes."""

from lockstep.replicas.buffers.buffer_refs import (
    BufferRef as BufferRef,
    all_buffer_refs as all_buffer_refs,
    buffer_refs as buffer_refs,
)
from lockstep.replicas.buffers.buffer_sums import BufferSum as BufferSum, real as real
from lockstep.replicas.buffers.replica_buffers import (
    AnyBufferSum as AnyBufferSum,
    BufferRule as BufferRule,
    ReplicaBuffers as ReplicaBuffers,
    combine as combine,
    unpackable as unpackable,
)
from lockstep.replicas.buffers.trained_buffers import (
    TrainedBuffer as TrainedBuffer,
    refuse_computed_buffers as refuse_computed_buffers,
    refuse_trained_buffers as refuse_trained_buffers,
    trained_buffers as trained_buffers,
)
