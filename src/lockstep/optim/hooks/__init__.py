"""Hooks that change gradients between their computation and the step.

Each hook works with lockstep's optimizers, ``optimizer.add_hook(hook)``, and with any other torch optimizer,
``optimizer.register_step_pre_hook(hook)``.
"""

from lockstep.optim.hooks.gradient_hooks import (
    GradientClipping as GradientClipping,
    GradientHardClipping as GradientHardClipping,
    GradientHook as GradientHook,
    GradientLARS as GradientLARS,
    GradientNoise as GradientNoise,
    Lasso as Lasso,
    WeightDecay as WeightDecay,
)
