"""The buffers of a model under several shards: the values that each shard starts from, and how changes are combined."""

from lockstep.replicas.buffers.buffer_refs import (
    BufferRef as BufferRef,
    all_buffer_refs as all_buffer_refs,
    buffer_refs as buffer_refs,
)
from lockstep.replicas.buffers.buffer_sums import BufferSum as BufferSum, as_bits as as_bits, as_real as as_real
from lockstep.replicas.buffers.replica_buffers import (
    AnyBufferSum as AnyBufferSum,
    BufferRule as BufferRule,
    ReplicaBuffers as ReplicaBuffers,
    combine_buffers as combine_buffers,
    unpackable_buffer as unpackable_buffer,
)
from lockstep.replicas.buffers.trained_buffers import (
    TrainedBuffer as TrainedBuffer,
    check_no_computed_buffers as check_no_computed_buffers,
    check_no_trained_buffers as check_no_trained_buffers,
    trained_buffers as trained_buffers,
)
