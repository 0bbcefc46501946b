"""Find what is equal in every way and probably wrong, such as parameters that are not trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from lockstep.verify.comparison import Run

LISTED: Final = 3
"""How many names a finding lists."""
LOOP: Final = "loop"
"""The key of the parameters of loops without an updater."""


def describe_parameters(models: Mapping[str, nn.Module], optimizers: Iterable[Optimizer]) -> dict[str, bool]:
    """Return the parameters that require a gradient, by name, and whether an optimizer holds each.

    Args:
        models: The models by name.
        optimizers: All optimizers.
    """
    held = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    return {
        name if len(models) == 1 else f"{prefix}.{name}": id(parameter) in held
        for prefix, model in models.items()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def findings(run: Run, looked: Run) -> list[str]:
    """Return what is probably wrong in the updates of a run, one sentence each.

    Args:
        run: The run.
        looked: A run that was looked at more closely.
    """
    found = [f"An evaluation computes as in training: {called}." for called in looked.notes.get("evaluation", {})]
    found += [
        f"The script goes on from {path!r}, a snapshot that an earlier run has written. Verify it where there is none."
        for path in run.notes.get("restored", {})
    ]
    if run.notes.get("was_in_evaluation"):
        found.append("The model was in evaluation mode and was switched to training mode. Call model.train() first.")
    normalized = list(dict.fromkeys(name for each in looked.compared for name in each["normalized"]))
    if normalized:
        found.append(
            f"{_named(normalized, 'layers')} normalize each shard by its own statistics, so the result depends on the "
            "number of shards, as it does on that of devices in DDP. GroupNorm and LayerNorm do not; or choose "
            "`num_shards` such that shards have as many samples as the statistics need."
        )
    for source, parameters in run.notes.get("parameters", {}).items():
        records = [each for _, each in sorted(run.updates.items()) if _group(each) == source]
        found += _untrained(records, parameters)
    return found


def _group(record: Mapping[str, Any]) -> str:
    """Return the key of a record's parameters: optimizers of a loop without an updater belong together."""
    return str(record["source"]) if record["kind"] == "updater" else LOOP


def _untrained(records: Sequence[dict[str, Any]], parameters: Mapping[str, bool]) -> list[str]:
    """Return what is probably wrong in the updates of some parameters.

    Args:
        records: The updates.
        parameters: Whether an optimizer holds each parameter, by its name.
    """
    if records and all(record["rates"] and not any(record["rates"]) for record in records):
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
    return [f"{_named(names, 'parameters')} {text}." for names, text in texts if names]


def _reached(record: dict[str, Any]) -> list[str]:
    """Return the parameters that got a gradient in an update."""
    gradients = [shard.get("gradients", {}) for shard in record["shards"].values()]
    return [name for each in gradients for name, found in each.items() if found != "none"]


def _named(names: Sequence[str], what: str) -> str:
    """Return the beginning of a sentence about parameters or layers.

    >>> _named(["0.weight", "0.bias", "1.weight", "1.bias"], "parameters")
    '4 parameters (0.weight, 0.bias, 1.weight, ...)'
    """
    listed = ", ".join(names[:LISTED]) + (", ..." if len(names) > LISTED else "")
    return f"{len(names)} {what} ({listed})"
