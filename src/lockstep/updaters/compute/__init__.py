"""Compute the part of an update that belongs to this process: from shards to partial sums."""

from lockstep.updaters.compute.device_timer import DeviceTimer as DeviceTimer
from lockstep.updaters.compute.global_random import GlobalRandomWatch as GlobalRandomWatch
from lockstep.updaters.compute.layout import ModelLayout as ModelLayout, without_gradients as without_gradients
from lockstep.updaters.compute.shard_gradients import DeviceGradients as DeviceGradients, GradientTask as GradientTask
from lockstep.updaters.compute.shares import (
    RankShare as RankShare,
    ShardAssignment as ShardAssignment,
    share_of as share_of,
)
from lockstep.updaters.compute.speeds import RankMeasurement as RankMeasurement, RankTimer as RankTimer
