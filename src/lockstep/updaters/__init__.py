"""What one update does, from taking the batch to counting it."""

from lockstep.updaters.compute.clock import Clock as Clock, Stopwatch as Stopwatch
from lockstep.updaters.compute.shard_gradients import ShardFunction as ShardFunction, ShardResult as ShardResult
from lockstep.updaters.detectors import generator_states as generator_states
from lockstep.updaters.loss import (
    BatchLoss as BatchLoss,
    Loss as Loss,
    LossFunction as LossFunction,
    check_loss as check_loss,
    is_summed as is_summed,
    loss_weight as loss_weight,
    metric_pairs as metric_pairs,
    supervised as supervised,
)
from lockstep.updaters.parallel import ParallelUpdater as ParallelUpdater, StandardUpdater as StandardUpdater
from lockstep.updaters.ranks.coordinator import (
    CURE as CURE,
    describe_error as describe_error,
    raise_error as raise_error,
)
from lockstep.updaters.result import (
    ShardReport as ShardReport,
    SkippedUpdate as SkippedUpdate,
    UpdateResult as UpdateResult,
)
from lockstep.updaters.setup.batches import Converter as Converter, batch_size as batch_size
from lockstep.updaters.setup.names import MAIN as MAIN, by_name as by_name
from lockstep.updaters.setup.recipe import check_functions as check_functions
from lockstep.updaters.state.carried import Carried as Carried
from lockstep.updaters.state.checkpoint import copy_state as copy_state
from lockstep.updaters.state.recipe_fields import (
    CODE as CODE,
    UNKNOWN_SHAPE as UNKNOWN_SHAPE,
    scheduler_fields as scheduler_fields,
)
from lockstep.updaters.state.training import UnsavedState as UnsavedState
from lockstep.updaters.step.inference import InferenceRunner as InferenceRunner
from lockstep.updaters.step.originals import (
    changed_attributes as changed_attributes,
    check_attributes_read as check_attributes_read,
    noting_reads as noting_reads,
)
from lockstep.updaters.step.recomputation import without_caches as without_caches
from lockstep.updaters.token_mean import token_mean as token_mean
from lockstep.updaters.updater import Result as Result, Updater as Updater
