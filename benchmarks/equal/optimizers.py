"""The optimizers of the recipes: one of every kind that an updater steps differently."""

from __future__ import annotations

import torch
from torch import nn

import lockstep as ls
from lockstep.optim import hooks

try:
    from lockstep.compat.nnabla import LAMB, SGDW
except ImportError:  # a checkout in which they were part of the core
    from lockstep.optim import LAMB, SGDW


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Create SGD with Nesterov momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9, nesterov=True, weight_decay=2e-3)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Create AdamW with the foreach implementation."""
    return torch.optim.AdamW(model.parameters(), lr=0.008, foreach=True, amsgrad=True)


def fused_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Create SGD with the fused kernel."""
    return torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.8, fused=True)


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Create AdamW with the fused kernel."""
    return torch.optim.AdamW(model.parameters(), lr=0.008, fused=True)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Create SGD without momentum, which accepts sparse gradients."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def corrected(model: nn.Module) -> torch.optim.Optimizer:
    """Create lockstep's corrected momentum SGD."""
    return ls.CorrectedMomentumSGD(model.parameters(), lr=0.04, momentum=0.9)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Create lockstep's other momentum SGD, with correction."""
    return ls.MomentumSGD(model.parameters(), lr=0.04, momentum=0.9, correction=True)


def lamb(model: nn.Module) -> torch.optim.Optimizer:
    """Create LAMB."""
    return LAMB(model.parameters(), lr=0.02, weight_decay=0.01)


def sgdw(model: nn.Module) -> torch.optim.Optimizer:
    """Create SGD with decoupled weight decay."""
    return SGDW(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-3)


def hooked(model: nn.Module) -> torch.optim.Optimizer:
    """Create lockstep's SGD with hooks of several kinds."""
    optimizer = ls.MomentumSGD(model.parameters(), lr=0.04, momentum=0.9)
    for hook in (hooks.WeightDecay(1e-3), hooks.GradientNoise(0.01, seed=5), hooks.GradientClipping(0.4)):
        optimizer.add_hook(hook)
    return optimizer


def adamw_with_lars(model: nn.Module) -> torch.optim.Optimizer:
    """Create a torch optimizer with a hook of lockstep."""
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(hooks.GradientLARS())
    return optimizer


def rows_and_rest(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Create two optimizers for one model: one for sparse gradients, one for the others."""
    rows = [parameter for name, parameter in model.named_parameters() if name.startswith("words")]
    rest = [parameter for name, parameter in model.named_parameters() if not name.startswith("words")]
    return {"rows": torch.optim.SparseAdam(rows, lr=0.02), "rest": torch.optim.SGD(rest, lr=0.1)}
