"""Replicas of one model, one thread per replica, and the settings under which the threads compute."""

from lockstep.replicas.pool.copies import (
    HOOK_NAMES as HOOK_NAMES,
    REQUIRES_GRAD as REQUIRES_GRAD,
    check_no_lookups as check_no_lookups,
    copy_model as copy_model,
    held_tensors as held_tensors,
    hidden_parameters as hidden_parameters,
    refuse_wrapped as refuse_wrapped,
)
from lockstep.replicas.pool.deterministic import (
    cure_of as cure_of,
    missing_settings as missing_settings,
    use_deterministic_kernels as use_deterministic_kernels,
)
from lockstep.replicas.pool.devices import (
    NO_MODULE as NO_MODULE,
    NULL_CONTEXT as NULL_CONTEXT,
    CopyStreams as CopyStreams,
    Devices as Devices,
    device_context as device_context,
    parse_device as parse_device,
    parse_devices as parse_devices,
    usable_cores as usable_cores,
)
from lockstep.replicas.pool.interrupts import CallSigint as CallSigint, DeferredSigint as DeferredSigint
from lockstep.replicas.pool.probes import FreshMemory as FreshMemory, Turns as Turns, fill as fill
from lockstep.replicas.pool.progress import samples_text as samples_text
from lockstep.replicas.pool.replica_set import ReplicaSet as ReplicaSet, fork_error as fork_error
from lockstep.replicas.pool.settings import (
    CHECKPOINT as CHECKPOINT,
    SINGLE_THREAD as SINGLE_THREAD,
    ComputeMode as ComputeMode,
    OneIntraOpThread as OneIntraOpThread,
    ThreadSettings as ThreadSettings,
    identity as identity,
    inherited as inherited,
    module_of_hooks as module_of_hooks,
)
from lockstep.replicas.pool.worker import Timeout as Timeout, Worker as Worker
