"""Combine the partial sums of this process with those of the other ranks."""

from lockstep.updaters.ranks.consistency import RankConsistency as RankConsistency
from lockstep.updaters.ranks.coordinator import (
    Coordinator as Coordinator,
    describe_error as describe_error,
    raise_error as raise_error,
)
from lockstep.updaters.ranks.rank_reduction import RankReduction as RankReduction, join_ranks as join_ranks
from lockstep.updaters.ranks.same_batches import CURE as CURE, describe_batch as describe_batch
