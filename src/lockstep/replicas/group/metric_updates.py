"""Pass the outputs of a forward to a metric, for all samples at once or for one device after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from lockstep.plan import Shard
from lockstep.replicas.batch import Inputs, ShardInputs
from lockstep.replicas.passes import Forward


class Updatable(Protocol):
    """A metric of this library, of torchmetrics, or any other with an `update` method for outputs and targets."""

    def update(self, output: Any, target: Any, /) -> Any:
        """Add outputs and targets to the metric.

        Args:
            output: The outputs of the model.
            target: The labels.
        """


def metric_inputs(
    forward: Forward, devices: Sequence[torch.device], labels: Inputs, *, per_device: bool, pad: int
) -> list[tuple[Any, Any]]:
    """Return the pairs of outputs and labels to update a metric with.

    Args:
        forward: The forward whose outputs are used.
        devices: The devices of the group. Labels are moved to the device of the outputs.
        labels: The labels of all samples.
        per_device: Whether to return one pair for each device that has samples, instead of one pair for all.
        pad: The number of samples at the end of the batch that are padding and left out.

    Raises:
        ValueError: If `pad` is negative or leaves no sample.
    """
    num_samples = forward.inputs.num_samples
    if not 0 <= pad < num_samples:
        raise ValueError(f"`pad` must lie in 0..{num_samples - 1}, got {pad}.")
    groups = forward.shards if per_device else [[shard for device_shards in forward.shards for shard in device_shards]]
    cut = [
        # Padding is at the end of the batch, so a device with nothing else gets an empty range and is left out below.
        (place, range(shards[0].samples.start, min(shards[-1].samples.stop, num_samples - pad)))
        for place, shards in enumerate(groups)
        if shards
    ]
    return [
        (
            _outputs(forward, groups[place], samples, devices[place]),
            _target(labels.shard_inputs(samples, devices[place])),
        )
        for place, samples in cut
        if len(samples) > 0
    ]


def _outputs(forward: Forward, shards: Sequence[Shard], samples: range, device: torch.device) -> Any:
    """Return the merged outputs of some shards, as the model returns them and without padding."""
    outputs = forward.outputs
    selected = [each for each in outputs.results if each.shard in shards]
    parts = outputs.merged(device, selected)
    return outputs.unflatten(
        [
            part if dim is None else part.narrow(dim, 0, len(samples))
            for part, dim in zip(parts, outputs.dims, strict=True)
        ]
    )


def _target(inputs: ShardInputs) -> Any:
    """Return labels in the form in which they were passed."""
    if inputs.kwargs:
        return inputs.kwargs
    return inputs.args[0] if len(inputs.args) == 1 else inputs.args
