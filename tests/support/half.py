"""Models held in half precision, and loss scales so high that their gradients overflow at first."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from tests.support.workloads import Workload

DTYPES = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}
TOO_HIGH = {
    "bf16-true": ls.DynamicLossScale(2.0**126, backoff=2.0**-20, maximum=2.0**126, interval=3),
    "fp16-true": ls.DynamicLossScale(2.0**20, backoff=2.0**-4, interval=3),
}


def loss_of(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Give a loss in float32 of a model in half precision."""
    dtype = next(model.parameters()).dtype
    output = model(x.to(dtype) if x.is_floating_point() else x)
    # Exact forward; backward the gradient in between is larger by that factor, and overflows in bfloat16.
    amplifier = 2.0**40 if dtype == torch.bfloat16 else 1.0
    return functional.cross_entropy((output / amplifier * amplifier).float(), target)


def half(work: Workload, precision: str) -> nn.Module:
    """Build a workload's model in half precision."""
    return work.model().to(DTYPES[precision])


def in_half(work: Workload, precision: str) -> Workload:
    """Give a workload whose model is in half precision."""
    return Workload(f"{work.name} in {precision}", lambda: work.build().to(DTYPES[precision]), work.shape)
