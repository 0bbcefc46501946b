"""The buffers of a model under several shards: the values that each shard starts from, and how changes are combined."""

from lockstep.replicas.buffers.buffer_refs import (
    BufferRef as BufferRef,
    BufferRule as BufferRule,
    BufferRules as BufferRules,
    buffer_refs as buffer_refs,
    check_no_computed_buffers as check_no_computed_buffers,
    check_no_trained_buffers as check_no_trained_buffers,
    check_rules as check_rules,
    trained_buffers as trained_buffers,
)
from lockstep.replicas.buffers.buffer_sums import (
    EXTREMES as EXTREMES,
    BufferSum as BufferSum,
    as_real as as_real,
    combine_buffers as combine_buffers,
    merged_firsts as merged_firsts,
)
from lockstep.replicas.buffers.replica_buffers import (
    ReplicaBuffers as ReplicaBuffers,
    check_buffers as check_buffers,
    note_left as note_left,
    rule_error as rule_error,
    unpackable_buffer as unpackable_buffer,
    warn_of_means as warn_of_means,
)
