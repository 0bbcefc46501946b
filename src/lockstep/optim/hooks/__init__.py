"""What an update does to gradients between their computation and the step.

Each hook here works on lockstep's optimizers, ``optimizer.add_hook(hook)``, and on any other of
torch's, ``optimizer.register_step_pre_hook(hook)``.
"""

from lockstep.optim.hooks.gradient_clipping import GradientClipping as GradientClipping
from lockstep.optim.hooks.gradient_hard_clipping import GradientHardClipping as GradientHardClipping
from lockstep.optim.hooks.gradient_hook import GradientHook as GradientHook
from lockstep.optim.hooks.gradient_lars import GradientLARS as GradientLARS
from lockstep.optim.hooks.gradient_noise import GradientNoise as GradientNoise
from lockstep.optim.hooks.lasso import Lasso as Lasso
from lockstep.optim.hooks.weight_decay import WeightDecay as WeightDecay
