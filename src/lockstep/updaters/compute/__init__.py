"""Compute the part of an update that belongs to this process: from shards to partial sums."""

from lockstep.updaters.compute.clock import (
    Clock as Clock,
    MeasuredSpeeds as MeasuredSpeeds,
    Stopwatch as Stopwatch,
    workloads_of as workloads_of,
)
from lockstep.updaters.compute.early_send import EarlySend as EarlySend
from lockstep.updaters.compute.prepared_model import (
    PreparedModel as PreparedModel,
    recording_runners as recording_runners,
    without_gradients as without_gradients,
)
from lockstep.updaters.compute.shard_gradients import (
    DeviceForwards as DeviceForwards,
    DeviceGradientTask as DeviceGradientTask,
    GradientContext as GradientContext,
    ShardFunction as ShardFunction,
    ShardResult as ShardResult,
)
from lockstep.updaters.compute.shares import (
    RankShare as RankShare,
    ShardAssignment as ShardAssignment,
    share_of as share_of,
)
