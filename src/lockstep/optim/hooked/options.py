"""Check the options of a group of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor

WRITTEN_BY_TORCH: Final = frozenset(
    {"param_names", "initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}
)
"""What torch keeps in a group beside the options: names of parameters, and the memory of its schedulers."""


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse the options of a group that are out of range.

    Raises:
        ValueError: ``lr``, ``missing_grad`` or, where there is one, ``momentum`` or ``weight_decay`` is.
    """
    lr = options["lr"]
    check_lr_size(lr)
    if not (0 <= lr < math.inf):
        raise ValueError(f"`lr` must be finite and at least 0, got {lr}.")
    if "momentum" in options and not 0 <= options["momentum"] < 1:
        raise ValueError(f"`momentum` must lie in [0, 1), got {options['momentum']}.")
    if "weight_decay" in options and not 0 <= options["weight_decay"] < math.inf:
        raise ValueError(f"`weight_decay` must be finite and at least 0, got {options['weight_decay']}.")
    if options["missing_grad"] not in {"skip", "zero"}:
        raise ValueError(f"`missing_grad` must be 'skip' or 'zero', got {options['missing_grad']!r}.")


def check_lr_size(lr: float | Tensor) -> None:
    """Refuse several learning rates where there can be one.

    Raises:
        ValueError: It is a tensor of another number of elements than one.
    """
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"`lr` must be a number or a tensor of one element, got a tensor of shape {tuple(lr.shape)}. "
            "Give parameters with rates of their own in groups, each with its `lr`."
        )


def scalar(lr: float | Tensor) -> float | Tensor:
    """Give a learning rate as torch's kernels want it: a number, or a tensor without dimensions."""
    return lr.reshape(()) if isinstance(lr, Tensor) and lr.dim() > 0 else lr


def option_names(defaults: Iterable[str]) -> set[str]:
    """Name the options of a group, given the defaults of its optimizer."""
    # Torch adds the last to the defaults, never to a group, once a state was loaded or a part taken.
    return {*defaults} - {"differentiable"}


def unknown_options(group: Mapping[str, Any], defaults: Iterable[str]) -> list[str]:
    """List the keys of a group that are neither options of its optimizer nor torch's own.

    A ``name`` is a label for whoever reads the groups, and no option.

    >>> unknown_options({"params": [], "lr": 0.1, "nesterov": True, "name": "head"}, {"lr": 0.01, "momentum": 0.9})
    ['nesterov']
    """
    return sorted({*group} - {"params", "name"} - option_names(defaults) - WRITTEN_BY_TORCH)


def check_names(group: Mapping[str, Any], defaults: Iterable[str], *, optimizer: str) -> None:
    """Refuse options that an optimizer does not have, and would ignore.

    Raises:
        ValueError: There is one.
    """
    unknown = unknown_options(group, defaults)
    if unknown:
        options, got = ", ".join(sorted(option_names(defaults))), ", ".join(map(repr, unknown))
        raise ValueError(
            f"`params` must be in groups with options of {optimizer} only ({options}), got {got}. "
            "It would have no effect: take it out, or take an optimizer that has it."
        )
