"""The loss functions of the recipes, with weights of several kinds and gradients that overflow."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep as ls

supervised = ls.supervised(cross_entropy)


def in_float32(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss of a model in half precision, computed in float32."""
    return cross_entropy(model(x).float(), target)


def large_gradients(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss with large intermediate gradients, so that high loss scales overflow in bfloat16 too."""
    # The value stays the same, while backward multiplies by the factor first and divides by it later.
    output = model(x)
    factor = 2.0**45 if output.dtype == torch.bfloat16 else 1.0
    return cross_entropy((output / factor * factor).float(), target)


def overflowing(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss that overflows in backward above a loss scale of 2^18, in shards with class 1."""
    loss: torch.Tensor = supervised(model, x, target)
    # Powers of two are exact, so that a gradient that does not overflow keeps its bits.
    return loss * 2.0**-109 * 2.0**109 if bool((target == 1).any()) else loss


def spoiled(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss that is infinite in shards with an outlier."""
    loss: torch.Tensor = supervised(model, x, target)
    return loss * math.inf if bool((x.flatten(1)[:, 0] > 1.5).any()) else loss


def weighted_by_tokens(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> ls.Loss:
    """Return a loss whose weight is a number of tokens, with a metric and a reported value."""
    output = model(x)
    tokens = (x % 3 > 0).sum() if not x.is_floating_point() else (x > 0).sum()
    correct = (output.argmax(1) == target).sum()
    ls.report({"size": output.detach().norm()}, model)
    return ls.Loss(cross_entropy(output, target), weight=int(tokens), metrics={"accuracy": (correct, len(target))})


def weighted_on_device(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> ls.Loss:
    """Return a loss whose weight is a tensor."""
    return ls.Loss(supervised(model, x, target), weight=1.0 + target.sum())


def partly_weightless(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> ls.Loss:
    """Return a loss whose weight is 0 in shards without class 3."""
    return ls.Loss(supervised(model, x, target), weight=int((target == 3).sum()))


def partly_reached(model: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss that depends on the last layers in some shards only."""
    if int(target.sum()) % 2:
        return supervised(model, x, target)
    hidden: torch.Tensor = model[:3](x)
    return hidden.pow(2).mean()
