"""What one update does, from taking the batch to counting it."""

from lockstep.updaters.compute import (
    Clock as Clock,
    ShardFunction as ShardFunction,
    ShardResult as ShardResult,
    Stopwatch as Stopwatch,
)
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
from lockstep.updaters.ranks import CURE as CURE, describe_error as describe_error, raise_error as raise_error
from lockstep.updaters.result import (
    ShardReport as ShardReport,
    SkippedUpdate as SkippedUpdate,
    UpdateResult as UpdateResult,
)
from lockstep.updaters.setup import (
    MAIN as MAIN,
    Converter as Converter,
    batch_size as batch_size,
    by_name as by_name,
    check_functions as check_functions,
)
from lockstep.updaters.state import (
    CODE as CODE,
    UNKNOWN_SHAPE as UNKNOWN_SHAPE,
    Carried as Carried,
    copy_state as copy_state,
)
from lockstep.updaters.step import InferenceRunner as InferenceRunner
from lockstep.updaters.token_mean import token_mean as token_mean
from lockstep.updaters.updater import Result as Result, Updater as Updater
