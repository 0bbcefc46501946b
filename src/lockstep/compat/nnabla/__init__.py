"""NNabla's interface: an updater around a loss and a data feeder, and its solvers `LAMB` and `SGDW`.

    from lockstep.compat import nnabla

    solver = nnabla.LAMB(model.parameters(), lr=0.01)
    updater = nnabla.DynamicLossScalingUpdater(solver, loss, data_feeder)

References: nnabla 1.35.1, ``nnabla.experimental.mixed_precision_training`` and ``nnabla.solvers``, for the names and
their meaning. The arithmetic is that of the core.
"""

from lockstep.compat.nnabla.solvers import LAMB as LAMB, SGDW as SGDW, lamb_step as lamb_step
from lockstep.compat.nnabla.updater import (
    AllReduce as AllReduce,
    DynamicLossScalingUpdater as DynamicLossScalingUpdater,
)
