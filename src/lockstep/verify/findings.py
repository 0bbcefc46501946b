"""Find what is equal in every way and probably wrong: parameters that are not trained, and a learning rate of 0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from lockstep.verify.comparison import Run

LISTED: Final = 3
"""How many names a finding lists."""


def describe_parameters(models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> dict[str, bool]:
    """Return the parameters that require a gradient, by name, and whether an optimizer holds each.

    Args:
        models: The models.
        optimizers: All optimizers.
    """
    held = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return {
        name: id(parameter) in held
        for model in models
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def findings(run: Run) -> list[str]:
    """Return what is probably wrong in the updates of a run, one sentence each.

    Args:
        run: The run, of a single updater; there are no findings about others.
    """
    records = [record for _, record in sorted(run.updates.items())]
    parameters: dict[str, bool] | None = run.notes.get("parameters")
    if parameters is None or {record["source"] for record in records} != {0}:
        return []
    if all(record["rates"] and not any(record["rates"]) for record in records):
        return ["The learning rate is 0 in all updates."]
    reached = {name for record in records for name in _reached(record)}
    loose = [name for name, held in parameters.items() if not held]
    unreached = [name for name, held in parameters.items() if held and name not in reached]
    stuck = [
        name
        for name, held in parameters.items()
        if held and name in reached and len({record["tensors"].get(name) for record in records}) == 1
    ]
    texts = (
        (loose, "require a gradient, and no optimizer holds them"),
        (unreached, "are held by an optimizer, and get no gradient in these updates"),
        (stuck, "get a gradient, and no update changes them"),
    )
    return [f"{_named(names)} {text}." for names, text in texts if names]


def _reached(record: dict[str, Any]) -> list[str]:
    """Return the parameters that got a gradient in an update."""
    gradients = [shard.get("gradients", {}) for shard in record["shards"].values()]
    return [name for each in gradients for name, found in each.items() if found != "none"]


def _named(names: Sequence[str]) -> str:
    """Return the beginning of a sentence about parameters.

    >>> _named(["0.weight", "0.bias", "1.weight", "1.bias"])
    '4 parameters (0.weight, 0.bias, 1.weight, ...)'
    """
    listed = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    return f"{len(names)} parameters ({listed})"
