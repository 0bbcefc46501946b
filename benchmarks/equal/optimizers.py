"""The optimizers of the recipes: of every kind that an updater steps in a way of its own."""

from __future__ import annotations

import torch
from torch import nn

import lockstep as ls
from lockstep.optim import LAMB, SGDW, hooks


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum and decay."""
    return torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, nesterov=True, weight_decay=2e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW over lists of tensors."""
    return torch.optim.AdamW(model.parameters(), lr=0.008, foreach=True, amsgrad=True)


def fused_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD in one kernel."""
    return torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.8, fused=True)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW in one kernel."""
    return torch.optim.AdamW(model.parameters(), lr=0.008, fused=True)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD without momentum, which takes sparse gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def corrected(model: nn.Module) -> torch.optim.Optimizer:
    """Return lockstep's SGD of Goyal et al."""
    return ls.CorrectedMomentumSGD(model.parameters(), lr=0.04, momentum=0.9)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Return the other form of it, with a correction where the learning rate changes."""
    return ls.MomentumSGD(model.parameters(), lr=0.04, momentum=0.9, correction=True)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    """Return LAMB."""
    return LAMB(model.parameters(), lr=0.02, weight_decay=0.01)


def sgdw(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with decay beside it."""
    return SGDW(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-3)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    """Return lockstep's SGD with hooks of several kinds."""
    optimizer = ls.MomentumSGD(model.parameters(), lr=0.04, momentum=0.9)
    for hook in (hooks.WeightDecay(1e-3), hooks.GradientNoise(0.01, seed=5), hooks.GradientClipping(0.4)):
        optimizer.add_hook(hook)
    return optimizer


def adamw_with_lars(model: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimizer with a hook of lockstep."""
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(hooks.GradientLARS())
    return optimizer


def rows_and_rest(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Return two optimizers of one model: one for sparse gradients, one for the others."""
    rows = [parameter for name, parameter in model.named_parameters() if name.startswith("words")]
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("words")]
    return {"rows": torch.optim.SparseAdam(rows, lr=0.02), "rest": torch.optim.SGD(rest, lr=0.1)}
