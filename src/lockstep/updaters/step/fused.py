"""Keep torch's fused optimizers to weights and state that their kernels step rightly.

On a CPU these kernels read and write memory from each tensor's first element on and look at no strides: a
weight that is not dense would have its neighbours in memory stepped, and state that lies otherwise than its
weight would be that of other elements. On a GPU torch refuses both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from lockstep.precision import HALF_PRECISION
from lockstep.strides import is_dense, laid_out_for

FUSED: Final = (SGD, Adagrad, Adam, AdamW)
"""Optimizers of torch's that have an option ``fused``."""


_NO_STATE: Final[dict[str, Any]] = {}


def check_dense(optimizer: Optimizer, *, has_masters: bool) -> None:
    """Refuse a fused optimizer over weights that are not dense.

    Args:
        optimizer: Any.
        has_masters: Whether it moves dense masters in the place of weights in half precision.

    Raises:
        ValueError: It is one of torch's that are fused, and a weight is not dense.
    """
    for weight in _fused_weights(optimizer):
        if not is_lazy(weight) and not (has_masters and weight.dtype in HALF_PRECISION):
            _check_dense(optimizer, weight)


def settle_layout(optimizer: Optimizer) -> None:
    """Lay what a fused optimizer remembers out like its weights, before a step.

    They part where a model has changed its memory format since, or a state was saved in another one.

    Args:
        optimizer: Any; its state is changed in place, but only in how it lies in memory.

    Raises:
        ValueError: A weight that has a gradient is not dense.
    """
    for weight in _fused_weights(optimizer):
        if weight.grad is None:
            continue
        remembered: dict[str, Any] = optimizer.state.get(weight, _NO_STATE)
        # The usual case, told at a third of the time.
        if weight.is_contiguous() and all(map(_is_contiguous, remembered.values())):
            continue
        _check_dense(optimizer, weight)
        for key, value in remembered.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                remembered[key] = laid_out_for(weight, value)


def _fused_weights(optimizer: Optimizer) -> Iterator[Tensor]:
    """List the weights that a fused kernel of torch's steps."""
    if isinstance(optimizer, FUSED):
        for group in optimizer.param_groups:
            if group.get("fused"):
                yield from group["params"]


def _is_contiguous(value: object) -> bool:
    return not isinstance(value, Tensor) or value.is_contiguous()


def _check_dense(optimizer: Optimizer, weight: Tensor) -> None:
    if not is_dense(weight):
        raise ValueError(
            f"`optimizer` must have `fused=False` for weights that are not dense in memory, got a fused "
            f"{type(optimizer).__name__} and a weight of shape {tuple(weight.shape)} and strides "
            f"{weight.stride()}. Use `foreach=True`, or give the module a weight of its own: "
            "`weight.data = weight.data.clone(memory_format=torch.contiguous_format)`."
        )
