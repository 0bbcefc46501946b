"""Sums of tensors over ranks in the order of the tree."""

from lockstep.communicators.sums.ordered_sum import (
    NUM_BUFFERS as NUM_BUFFERS,
    OrderedSum as OrderedSum,
    give_up_at_exit as give_up_at_exit,
)
from lockstep.communicators.sums.pair import PairSum as PairSum, is_pair as is_pair, sum_pair as sum_pair
from lockstep.communicators.sums.planning import Extent as Extent, Sizes as Sizes, plan_sum as plan_sum
from lockstep.communicators.sums.sparse import split_sparse as split_sparse, sum_sparse as sum_sparse
from lockstep.communicators.sums.wire import (
    PlainFormat as PlainFormat,
    ScratchBuffer as ScratchBuffer,
    WireFormat as WireFormat,
    wire_format as wire_format,
)
