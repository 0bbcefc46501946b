"""Hooks that change gradients between their computation and the step.

Each hook works with lockstep's optimizers, ``optimizer.add_hook(hook)``, and with any other torch optimizer,
``optimizer.register_step_pre_hook(hook)``.
"""

from lockstep.optim.hooks.clipping import (
    GradientClipping as GradientClipping,
    GradientHardClipping as GradientHardClipping,
)
from lockstep.optim.hooks.decay import Lasso as Lasso, WeightDecay as WeightDecay
from lockstep.optim.hooks.gradient_hook import GradientHook as GradientHook
from lockstep.optim.hooks.gradient_lars import GradientLARS as GradientLARS
from lockstep.optim.hooks.gradient_noise import GradientNoise as GradientNoise
