"""The base class of lockstep's optimizers: hooks, counters, loss scaling, saved state."""

from lockstep.optim.hooked.hook_list import HookList as HookList, StatefulHook as StatefulHook
from lockstep.optim.hooked.optimizer import HookedOptimizer as HookedOptimizer
from lockstep.optim.hooked.options import (
    rows_by as rows_by,
    scalar as scalar,
    unknown_options as unknown_options,
    without_pre_hooks as without_pre_hooks,
)
