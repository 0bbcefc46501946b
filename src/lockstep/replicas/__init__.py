"""Replicas of one model on several devices of this process."""

from lockstep.replicas.batch.inputs import (
    BatchDim as BatchDim,
    check_dims as check_dims,
    count_samples as count_samples,
    dims_by_name as dims_by_name,
    longest_name as longest_name,
    named_inputs as named_inputs,
    positive_dims as positive_dims,
)
from lockstep.replicas.batch.outputs import ShardForward as ShardForward, read_outputs as read_outputs
from lockstep.replicas.buffers.buffer_refs import (
    BufferRef as BufferRef,
    BufferRules as BufferRules,
    buffer_refs as buffer_refs,
    check_no_trained_buffers as check_no_trained_buffers,
    check_rules as check_rules,
)
from lockstep.replicas.buffers.buffer_sums import (
    EXTREMES as EXTREMES,
    BufferSum as BufferSum,
    as_real as as_real,
    combine_buffers as combine_buffers,
    merged_firsts as merged_firsts,
)
from lockstep.replicas.buffers.replica_buffers import (
    check_buffers as check_buffers,
    note_left as note_left,
    rule_error as rule_error,
    unpackable_buffer as unpackable_buffer,
    warn_of_means as warn_of_means,
)
from lockstep.replicas.group.group import ReplicaGroup as ReplicaGroup
from lockstep.replicas.memory import (
    free_reserved_memory as free_reserved_memory,
    is_memory_limited as is_memory_limited,
    peak_memory as peak_memory,
    restart_peak_memory as restart_peak_memory,
)
from lockstep.replicas.modules.data_parallel import DataParallel as DataParallel
from lockstep.replicas.modules.on_device import ModuleWrapper as ModuleWrapper, OnDevice as OnDevice
from lockstep.replicas.monitor import Monitor as Monitor
from lockstep.replicas.passes.forward_check import CAUSES as CAUSES
from lockstep.replicas.passes.leaks import (
    check_leaves as check_leaves,
    check_no_accumulate_hooks as check_no_accumulate_hooks,
    check_no_inner_backward as check_no_inner_backward,
    check_no_leaked_gradients as check_no_leaked_gradients,
    foreign_leaves as foreign_leaves,
    refusing_writes as refusing_writes,
)
from lockstep.replicas.passes.means import (
    REDUCED_BY_MEAN as REDUCED_BY_MEAN,
    Computed as Computed,
    NoMeans as NoMeans,
    find_no_means as find_no_means,
    gradient_share as gradient_share,
    samples_of as samples_of,
    with_means as with_means,
    without_batch_statistics as without_batch_statistics,
)
from lockstep.replicas.passes.shard_runner import (
    ShardRunner as ShardRunner,
    create_runner as create_runner,
    in_mode as in_mode,
)
from lockstep.replicas.passes.shard_streams import ShardStreams as ShardStreams
from lockstep.replicas.passes.summing import (
    TreeSum as TreeSum,
    apply_tensor_hooks as apply_tensor_hooks,
    finish_whole as finish_whole,
    move_partials as move_partials,
)
from lockstep.replicas.pool.copies import (
    check_no_lookups as check_no_lookups,
    held_tensors as held_tensors,
    hooks_of as hooks_of,
    refuse_wrapped as refuse_wrapped,
)
from lockstep.replicas.pool.deterministic import (
    missing_settings as missing_settings,
    use_deterministic_kernels as use_deterministic_kernels,
)
from lockstep.replicas.pool.devices import (
    CopyStreams as CopyStreams,
    Devices as Devices,
    parse_devices as parse_devices,
    usable_cores as usable_cores,
)
from lockstep.replicas.pool.interrupts import DeferredSigint as DeferredSigint
from lockstep.replicas.pool.probes import (
    ALLOCATIONS as ALLOCATIONS,
    OTHER_DRAWS as OTHER_DRAWS,
    Draws as Draws,
    FreshMemory as FreshMemory,
    Turns as Turns,
    fill as fill,
    has_compiled as has_compiled,
    rows_of as rows_of,
    uncompiled as uncompiled,
)
from lockstep.replicas.pool.replica_set import ReplicaSet as ReplicaSet, fork_error as fork_error
from lockstep.replicas.pool.settings import (
    SINGLE_THREAD as SINGLE_THREAD,
    ComputeMode as ComputeMode,
    OneIntraOpThread as OneIntraOpThread,
    ThreadSettings as ThreadSettings,
    inherited as inherited,
)
from lockstep.replicas.pool.worker import Timeout as Timeout
