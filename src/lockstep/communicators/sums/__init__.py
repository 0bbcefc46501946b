"""Sums of tensors over ranks in the order of the tree."""

from lockstep.communicators.sums.audit import audited_sum as audited_sum
from lockstep.communicators.sums.ordered_sum import OrderedSum as OrderedSum
from lockstep.communicators.sums.planning import (
    PlanSizes as PlanSizes,
    SumPlan as SumPlan,
    plan_sum as plan_sum,
)
from lockstep.communicators.sums.small import SmallSum as SmallSum
from lockstep.communicators.sums.sparse import split_sparse as split_sparse, sum_sparse as sum_sparse
from lockstep.communicators.sums.wire import (
    EXACT as EXACT,
    WireFormat as WireFormat,
    wire_format as wire_format,
)
