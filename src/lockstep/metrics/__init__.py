"""Metrics, means that can be merged, and reports from inside a model or loss function."""

from lockstep.metrics.accuracy import Accuracy as Accuracy
from lockstep.metrics.average import (
    Average as Average,
    IntervalMeans as IntervalMeans,
    Mean as Mean,
    Observed as Observed,
    as_mean as as_mean,
    merge as merge,
    read as read,
    read_means as read_means,
)
from lockstep.metrics.reports import (
    Observers as Observers,
    WeightedSum as WeightedSum,
    collecting as collecting,
    flatten_value as flatten_value,
    report as report,
)
from lockstep.metrics.shard_metrics import (
    Mergeable as Mergeable,
    Metric as Metric,
    OwnMetric as OwnMetric,
    Part as Part,
    ShardKey as ShardKey,
    ShardMetric as ShardMetric,
    TorchMetric as TorchMetric,
    is_collection as is_collection,
    is_torchmetric as is_torchmetric,
)
