"""Show a metric what a forward gave: all samples at once, or one device after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lockstep.plan import Shard
from lockstep.replicas.batch import Inputs, ShardInputs
from lockstep.replicas.passes import Forward


class Updatable(Protocol):
    """A metric of this library, of torchmetrics, or any other that is updated with outputs and targets."""

    def update(self, output: Any, target: Any, /) -> Any:
        """Take outputs and targets in."""


def metric_inputs(
    forward: Forward, devices: Sequence[torch.device], labels: Inputs, *, per_device: bool, pad: int
) -> list[tuple[Any, Any]]:
    """Give the pairs of outputs and labels that a metric is to be updated with.

    Args:
        forward: Whose outputs.
        devices: Those of the group; labels are brought to where the outputs are.
        labels: For all samples.
        per_device: One pair for each device that has samples; else one pair for all.
        pad: How many samples at the end are no samples, and left out.

    Raises:
        ValueError: `pad` leaves no sample, or is negative.
    """
    num_samples = forward.inputs.num_samples
    if not 0 <= pad < num_samples:
        raise ValueError(f"`pad` must lie in 0..{num_samples - 1}, got {pad}.")
    places = forward.shards if per_device else [[shard for place in forward.shards for shard in place]]
    cut = [
        (place, range(shards[0].samples.start, min(shards[-1].samples.stop, num_samples - pad)))
        for place, shards in enumerate(places)
        if shards
    ]
    return [
        (
            _outputs(forward, places[place], samples, devices[place]),
            _target(labels.cut(samples, devices[place])),
        )
        for place, samples in cut
        if len(samples) > 0
    ]


def _outputs(forward: Forward, shards: Sequence[Shard], samples: range, device: torch.device) -> Any:
    """Put the outputs of some shards together, as the model returns them, without what is padded."""
    outputs = forward.outputs
    chosen = [each for each in outputs.shards if each.shard in shards]
    parts = outputs.merged(device, chosen)
    return outputs.nest(
        [
            part if dim is None else part.narrow(dim, 0, len(samples))
            for part, dim in zip(parts, outputs.dims, strict=True)
        ]
    )


def _target(piece: ShardInputs) -> Any:
    """Give labels in the form in which they came."""
    if piece.kwargs:
        return piece.kwargs
    return piece.args[0] if len(piece.args) == 1 else piece.args
