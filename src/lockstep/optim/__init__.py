"""Optimizers with hooks, and learning rate schedules for training with large batches."""

from lockstep.optim import hooks as hooks, schedule as schedule
from lockstep.optim.hook_list import HookList as HookList, StatefulHook as StatefulHook
from lockstep.optim.hooked_optimizer import HookedOptimizer as HookedOptimizer
from lockstep.optim.hooks import WeightDecay as WeightDecay
from lockstep.optim.momentum import (
    fused_momentum_step as fused_momentum_step,
    lr_momentum_step as lr_momentum_step,
    momentum_step as momentum_step,
)
from lockstep.optim.momentum_sgd import CorrectedMomentumSGD as CorrectedMomentumSGD, MomentumSGD as MomentumSGD
from lockstep.optim.norm import norms as norms
from lockstep.optim.options import rows_by as rows_by, scalar as scalar, without_pre_hooks as without_pre_hooks
from lockstep.optim.schedule import UpdateSchedule as UpdateSchedule, large_batch_schedule as large_batch_schedule
