"""Chainer's interface: `ParallelUpdater`, and optimizers whose model is set by `setup`.

    from lockstep.compat import chainer

    optimizer = chainer.CorrectedMomentumSGD(lr=0.01).setup(model)
    updater = chainer.ParallelUpdater(batches, optimizer, devices={"main": "cuda:0", "second": "cuda:1"})

References: Chainer 7.8.1 (Tokui et al., "Chainer: A Deep Learning Framework for Accelerating the Research
Cycle", 2019, arXiv:1908.00213), for the names and their meaning. The arithmetic is that of the core.
"""

from lockstep.compat.chainer.optimizers import (
    CorrectedMomentumSGD as CorrectedMomentumSGD,
    GradientMethod as GradientMethod,
    MomentumSGD as MomentumSGD,
    UpdateRule as UpdateRule,
)
from lockstep.compat.chainer.updater import (
    ParallelUpdater as ParallelUpdater,
    SerialIterator as SerialIterator,
    concat_examples as concat_examples,
)
