"""Name what makes two runs differ, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

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
    "data": "The dataset returns other samples where it is read in another order or process. Let a sample depend on "
    "its index only, and draw from the default generators, which have a stream for each sample.",
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
