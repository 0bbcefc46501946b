"""Find settings of a run by trying them, and leave the run as it was."""

from lockstep.tuning.batch_size_finder import (
    BatchSizeFinderResult as BatchSizeFinderResult,
    BatchSizeTrial as BatchSizeTrial,
    find_batch_size as find_batch_size,
)
from lockstep.tuning.lr_finder import LRFinderResult as LRFinderResult, find_lr as find_lr
