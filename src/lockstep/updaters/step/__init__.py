"""The stages of an update, and the objects that run them."""

from lockstep.updaters.step.assembly import Schedulers as Schedulers, assemble as assemble
from lockstep.updaters.step.checks import (
    check_run_options as check_run_options,
    needs_custom_step as needs_custom_step,
)
from lockstep.updaters.step.custom_step import CustomStep as CustomStep
from lockstep.updaters.step.inference import InferenceRunner as InferenceRunner
from lockstep.updaters.step.next_batches import CopyAhead as CopyAhead
from lockstep.updaters.step.placement import ShardOptimizer as ShardOptimizer
