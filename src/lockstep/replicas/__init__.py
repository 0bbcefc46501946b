"""One model on several devices of this process."""

from lockstep.replicas.buffers import (
    AnyBufferSum as AnyBufferSum,
    BufferRef as BufferRef,
    BufferRule as BufferRule,
    BufferSum as BufferSum,
    ReplicaBuffers as ReplicaBuffers,
    buffer_refs as buffer_refs,
    combine as combine,
    real as real,
    refuse_trained_buffers as refuse_trained_buffers,
    unpackable as unpackable,
)
from lockstep.replicas.group import ReplicaGroup as ReplicaGroup, Updatable as Updatable
from lockstep.replicas.modules import DataParallel as DataParallel, ModuleWrapper as ModuleWrapper, OnDevice as OnDevice
from lockstep.replicas.monitor import Monitor as Monitor
from lockstep.replicas.passes import (
    ShardRunner as ShardRunner,
    ShardStreams as ShardStreams,
    TreeSum as TreeSum,
    apply_tensor_hooks as apply_tensor_hooks,
    check_no_leaked_gradients as check_no_leaked_gradients,
    finish_whole as finish_whole,
    gather as gather,
    refuse_accumulate_hook as refuse_accumulate_hook,
)
from lockstep.replicas.pool import (
    SINGLE_THREAD as SINGLE_THREAD,
    ComputeMode as ComputeMode,
    DeferredSigint as DeferredSigint,
    Devices as Devices,
    OneIntraOpThread as OneIntraOpThread,
    ReplicaSet as ReplicaSet,
    ThreadSettings as ThreadSettings,
    Timeout as Timeout,
    forked as forked,
)
