"""Prepare weights and optimizer state for PyTorch's fused optimizers.

On a CPU their kernels read and write memory from the first element of each tensor on, and ignore strides. A weight that
is not dense would have its neighbours in memory changed, and state with other strides than its weight would be matched
with the wrong elements. On a GPU PyTorch refuses both.
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
"""PyTorch's optimizers that have an option ``fused``."""


_NO_STATE: Final[dict[str, Any]] = {}


def check_dense(optimizer: Optimizer, *, has_masters: bool) -> None:
    """Check that the weights of a fused optimizer are dense.

    Args:
        optimizer: Any optimizer.
        has_masters: Whether it steps dense master weights in place of weights in half precision.

    Raises:
        ValueError: If a weight of a fused optimizer is not dense.
    """
    for weight in _fused_weights(optimizer):
        if not is_lazy(weight) and not (has_masters and weight.dtype in HALF_PRECISION):
            _check_dense(optimizer, weight)


def match_state_layout(optimizer: Optimizer) -> None:
    """Convert the state of a fused optimizer to the strides of its weights, before a step.

    They differ if a model has changed its memory format, or if a state was saved in another format.

    Args:
        optimizer: Any optimizer. Its state is changed in place, but only in its memory layout.

    Raises:
        ValueError: If a weight that has a gradient is not dense.
    """
    for weight in _fused_weights(optimizer):
        if weight.grad is None:
            continue
        remembered: dict[str, Any] = dict.get(optimizer.state, weight, _NO_STATE)
        # The usual case, checked in a third of the time.
        if weight.is_contiguous() and all(map(_is_contiguous, remembered.values())):
            continue
        # Checked again before every step: the user may have replaced the memory of a weight.
        _check_dense(optimizer, weight)
        for key, value in remembered.items():
            if isinstance(value, Tensor) and value.shape == weight.shape:
                remembered[key] = laid_out_for(weight, value)


def _fused_weights(optimizer: Optimizer) -> Iterator[Tensor]:
    """Iterate over the weights that PyTorch's fused kernels step."""
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
