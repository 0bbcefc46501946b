"""Name what makes two runs differ, what is equal in every way and probably wrong, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from lockstep.errors import few
from lockstep.verify.comparison import Difference, Run
from lockstep.verify.ways import Way

CURES: Final = {
    "clock": "The result depends on the time. Derive the value from the number of the update, or leave it out.",
    "state": "Something is kept from one shard to the next: a counter, a cache, a generator, an earlier loss. Draw "
    "from PyTorch's default generator, return the value as a metric, or keep it with `Carried` or in a buffer.",
    "kernels": "A kernel gives other bits each time. Call `lockstep.use_deterministic_kernels()` before anything runs "
    "on a GPU.",
    "resume": "Something is kept that no snapshot holds. Keep it in a buffer, in `Carried`, or in an extension.",
    "thread": "The result depends on the thread. Take nothing from `threading`; share values by argument.",
    "process": "The result depends on the process: the hash of a string, the order of a set, a process ID. Sort sets, "
    "and take no seed from `hash`.",
    "memory": "Memory is read before it is written. Use `torch.zeros` instead of `torch.empty`.",
    "data": "The dataset returns other samples where it is read in another order or process, or an `order_sampler` "
    "counts its calls or keeps a generator. Let a sample depend on its index only, and an order on the one before, and "
    "draw from the default generators, which have a stream for each sample and each order.",
    "sum": "All shards are equal, and what is made of them is not. Hooks of parameters may hold a state.",
    "mean": "The loss is not a mean over samples, so the result depends on the number of shards, as it does on that of "
    "devices in DDP. If it is a mean with weights, such as those of classes, tokens or labels that are not ignored, "
    "return `Loss(mean, weight=sum of the weights)`, or use `supervised` or `token_mean`. If it compares samples or "
    "divides one sum by another, use `BatchLoss`.",
    "total": "The loss is a sum over samples, and shards are averaged, so the result depends on their number. Divide "
    "it by the number of samples, or use `supervised` with a criterion that has `reduction='sum'`.",
    "layer": "It computes outputs of a sample from other samples of its shard, so the result depends on the number of "
    "shards. Normalize samples one by one, as LayerNorm and GroupNorm do, and compute a term over the batch, such as "
    "the auxiliary loss of a router, in the criterion of a `BatchLoss`.",
    "pairs": "A tensor of shape (n, 1) meets one of shape (n,), so each sample is compared with all samples of its "
    "shard. Give output and target the same shape.",
    "row": "The model returns one row for all samples of a shard. Keep the dimension of the samples in every layer.",
}
"""What to do, by the kind of a cause."""


@dataclass(frozen=True, slots=True)
class Cause:
    """What makes a run differ.

    Attributes:
        kind: A key of `CURES`.
        operator: The first operator whose result differs; empty where none was found.
        line: The line of the user's code that called it; empty in backward.
        module: The module whose forward called it.
    """

    kind: str
    operator: str = ""
    line: str = ""
    module: str = ""

    def describe(self) -> str:
        """Return the cause and the cure as text."""
        where = f" in {self.module}" if self.module else ""
        at = f" at {self.line}" if self.line else ""
        first = f"{self.kind}: first in {self.operator}{where}{at}. " if self.operator else f"{self.kind}: "
        return first + CURES[self.kind]


def cause_of(way: Way, difference: Difference, ours: Run, theirs: Sequence[Run]) -> Cause:
    """Return the cause of a difference, from what its shard or step did in both runs.

    Args:
        way: The way that differs.
        difference: The difference.
        ours: What the first way has recorded, with its experiments.
        theirs: What the processes of the other way have recorded.
    """
    first, second = ours.trace, next((run.trace for run in theirs if run.trace), {})
    kind = first.get("kind", "")
    if not kind:
        is_placed = way.devices > 1 or way.reverse
        kind = "resume" if way.resumes else "state" if is_placed else "process"
        if difference.what == "step" and kind == "state":
            kind = "sum"
    for one, other in zip(first.get("calls", []), second.get("calls", []), strict=False):
        if (one["operator"], one["made"]) != (other["operator"], other["made"]):
            return Cause(kind, one["operator"], one["line"] or other["line"], one["module"])
    return Cause(kind)


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
    '4 parameters (0.weight, 0.bias, 1.weight and 1 more)'
    """
    return f"{len(names)} {what} ({few(names)})"
