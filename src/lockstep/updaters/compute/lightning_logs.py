"""Observe the values that a LightningModule logs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from torch import nn

from lockstep.metrics import report

PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")
"""The modules that a `LightningModule` may come from; neither is imported here."""


def observe_logs(replica: nn.Module) -> None:
    """Redirect `log` and `log_dict` of the LightningModules in a replica to `report`.

    Without a Lightning Trainer they do nothing. Only this copy of the model is changed.

    Args:
        replica: The replica.
    """
    imported = [vars(sys.modules[name]) for name in PACKAGES if name in sys.modules]
    kinds = tuple(names["LightningModule"] for names in imported if "LightningModule" in names)
    for module in replica.modules() if kinds else ():
        if isinstance(module, kinds):
            # Attributes of the object, which are found before the methods of its class.
            vars(module)["log"] = partial(_log, module)
            vars(module)["log_dict"] = partial(_log_dict, module)


def _log(
    module: nn.Module,
    name: str,
    value: Any,
    *_: object,
    reduce_fx: object = "mean",
    batch_size: int | None = None,
    **__: object,
) -> None:
    """Report one value; the options of Lightning that concern its own loggers and progress bar are ignored."""
    reduction = getattr(reduce_fx, "__name__", reduce_fx)
    if reduction != "mean":
        raise ValueError(
            f"`reduce_fx` of log({name!r}) must be 'mean', got {reduction!r}. lockstep averages values over samples; "
            "log others in an extension of the trainer."
        )
    if isinstance(value, nn.Module):
        raise TypeError(
            f"`value` of log({name!r}) must be a number or a tensor, got a {type(value).__name__}. Log its value for "
            "the batch, or pass the metric to lockstep.extensions.Evaluator."
        )
    if isinstance(value, Mapping):
        for key, each in value.items():
            _log(module, f"{name}/{key}", each, batch_size=batch_size)
        return
    report({name: value}, module, weight=batch_size)


def _log_dict(module: nn.Module, dictionary: Mapping[str, Any], *_: object, **options: Any) -> None:
    """Report several values."""
    for name, value in dictionary.items():
        _log(module, name, value, **options)
