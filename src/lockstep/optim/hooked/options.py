"""Check the options of a parameter group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor

TORCH_GROUP_KEYS: Final = frozenset(
    {"param_names", "initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}
)
"""The keys that torch stores in a group besides the options: parameter names, and the state of its schedulers."""


def check_options(options: Mapping[str, Any]) -> None:
    """Check that the options of a group are in range.

    Raises:
        ValueError: If ``lr`` is not a single number, or ``lr``, ``missing_grad`` or, where present, ``momentum`` or
            ``weight_decay`` is out of range.
    """
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"`lr` must be a number or a tensor of one element, got a tensor of shape {tuple(lr.shape)}. "
            "Pass parameters that need different learning rates in groups, each with its own `lr`."
        )
    if not (0 <= lr < math.inf):
        raise ValueError(f"`lr` must be finite and at least 0, got {lr}.")
    if "momentum" in options and not 0 <= options["momentum"] < 1:
        raise ValueError(f"`momentum` must lie in [0, 1), got {options['momentum']}.")
    if "weight_decay" in options and not 0 <= options["weight_decay"] < math.inf:
        raise ValueError(f"`weight_decay` must be finite and at least 0, got {options['weight_decay']}.")
    if options["missing_grad"] not in {"skip", "zero"}:
        raise ValueError(f"`missing_grad` must be 'skip' or 'zero', got {options['missing_grad']!r}.")


def scalar(lr: float | Tensor) -> float | Tensor:
    """Return a learning rate in the form that torch's kernels accept: a number or a 0-d tensor."""
    return lr.reshape(()) if isinstance(lr, Tensor) and lr.dim() > 0 else lr


def option_names(defaults: Iterable[str]) -> set[str]:
    """Return the names of a group's options, given the defaults of its optimizer."""
    # torch adds `differentiable` to the defaults, but not to the groups, once a state was loaded or a part created.
    return {*defaults} - {"differentiable"}


def unknown_options(group: Mapping[str, Any], defaults: Iterable[str]) -> list[str]:
    """List the keys of a group that are neither options of its optimizer nor torch's.

    The key ``name`` is not an option: it is a label for the reader.

    >>> unknown_options({"params": [], "lr": 0.1, "nesterov": True, "name": "head"}, {"lr": 0.01, "momentum": 0.9})
    ['nesterov']
    """
    return sorted({*group} - {"params", "name"} - option_names(defaults) - TORCH_GROUP_KEYS)


def check_names(group: Mapping[str, Any], defaults: Iterable[str], *, optimizer: str) -> None:
    """Check that a group has no options that its optimizer does not have and would ignore.

    Raises:
        ValueError: If there is such an option.
    """
    unknown = unknown_options(group, defaults)
    if unknown:
        options, got = ", ".join(sorted(option_names(defaults))), ", ".join(map(repr, unknown))
        raise ValueError(
            f"Groups in `params` must have only options of {optimizer} ({options}), got {got}. "
            "It would have no effect: remove it, or use an optimizer that has it."
        )
