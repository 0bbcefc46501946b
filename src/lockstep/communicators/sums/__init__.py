"""Sums of tensors over ranks in the order of the tree."""

from lockstep.communicators.sums.ordered_sum import (
    NUM_SCRATCH_BUFFERS as NUM_SCRATCH_BUFFERS,
    OrderedSum as OrderedSum,
    cancel_at_exit as cancel_at_exit,
)
from lockstep.communicators.sums.pair import (
    PairSum as PairSum,
    can_sum_as_pair as can_sum_as_pair,
    sum_pair as sum_pair,
)
from lockstep.communicators.sums.planning import PlanSizes as PlanSizes, TensorSpec as TensorSpec, plan_sum as plan_sum
from lockstep.communicators.sums.sparse import split_sparse as split_sparse, sum_sparse as sum_sparse
from lockstep.communicators.sums.wire import (
    ExactFormat as ExactFormat,
    ScratchBuffer as ScratchBuffer,
    WireFormat as WireFormat,
    wire_format as wire_format,
)
