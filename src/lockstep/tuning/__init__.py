"""Find settings of a run by trying them, and leave the run as it was."""

from lockstep.tuning.lr_finder import LRFinderResult as LRFinderResult, find_lr as find_lr
