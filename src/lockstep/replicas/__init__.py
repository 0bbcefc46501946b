"""Replicas of one model on several devices of this process."""

from lockstep.replicas.batch import (
    BatchDim as BatchDim,
    ShardForward as ShardForward,
    check_dims as check_dims,
    count_samples as count_samples,
    dims_by_name as dims_by_name,
    longest_name as longest_name,
    named_inputs as named_inputs,
    positive_dims as positive_dims,
    read_outputs as read_outputs,
)
from lockstep.replicas.buffers import (
    EXTREMES as EXTREMES,
    BufferRef as BufferRef,
    BufferRules as BufferRules,
    BufferSum as BufferSum,
    ReplicaBuffers as ReplicaBuffers,
    as_real as as_real,
    buffer_refs as buffer_refs,
    check_buffers as check_buffers,
    check_no_trained_buffers as check_no_trained_buffers,
    check_rules as check_rules,
    combine_buffers as combine_buffers,
    is_averaged_silently as is_averaged_silently,
    merged_firsts as merged_firsts,
    rule_error as rule_error,
    unpackable_buffer as unpackable_buffer,
)
from lockstep.replicas.group import ReplicaGroup as ReplicaGroup
from lockstep.replicas.memory import (
    free_reserved_memory as free_reserved_memory,
    is_memory_limited as is_memory_limited,
    peak_memory as peak_memory,
    restart_peak_memory as restart_peak_memory,
)
from lockstep.replicas.modules import DataParallel as DataParallel, ModuleWrapper as ModuleWrapper, OnDevice as OnDevice
from lockstep.replicas.monitor import Monitor as Monitor
from lockstep.replicas.passes import (
    ShardRunner as ShardRunner,
    ShardStreams as ShardStreams,
    TreeSum as TreeSum,
    apply_tensor_hooks as apply_tensor_hooks,
    check_leaves as check_leaves,
    check_no_accumulate_hooks as check_no_accumulate_hooks,
    check_no_inner_backward as check_no_inner_backward,
    check_no_leaked_gradients as check_no_leaked_gradients,
    create_runners as create_runners,
    finish_whole as finish_whole,
    foreign_leaves as foreign_leaves,
    in_mode as in_mode,
    move_partials as move_partials,
    refusing_writes as refusing_writes,
    why_no_mean as why_no_mean,
)
from lockstep.replicas.pool import (
    SINGLE_THREAD as SINGLE_THREAD,
    ComputeMode as ComputeMode,
    CopyStreams as CopyStreams,
    DeferredSigint as DeferredSigint,
    Devices as Devices,
    FreshMemory as FreshMemory,
    OneIntraOpThread as OneIntraOpThread,
    ReplicaSet as ReplicaSet,
    ThreadSettings as ThreadSettings,
    Timeout as Timeout,
    Worker as Worker,
    check_no_lookups as check_no_lookups,
    fill as fill,
    fork_error as fork_error,
    held_tensors as held_tensors,
    inherited as inherited,
    missing_settings as missing_settings,
    parse_devices as parse_devices,
    refuse_wrapped as refuse_wrapped,
    usable_cores as usable_cores,
    use_deterministic_kernels as use_deterministic_kernels,
)
