"""What the last forward and backward of a group have left: outputs, gradients of inputs, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.errors import OrderError
from lockstep.replicas.devices import Devices
from lockstep.replicas.input_gradients import InputGradients, InputModes
from lockstep.replicas.measuring import Updatable, portions
from lockstep.replicas.passes import Forward
from lockstep.replicas.replica_set import ReplicaSet, Timeout
from lockstep.replicas.scatter import BatchDim
from lockstep.replicas.shape_inference import infer, refuse_shapes
from lockstep.replicas.signature import Signature


class LastPasses(ReplicaSet):
    """Replicas that keep what their last forward and backward gave, until the next ones.

    Who inherits runs the passes, and puts here what comes of them.

    Args:
        model: As in `ReplicaSet`, like `devices`, `workloads` and `timeout`.
        devices: Likewise.
        workloads: Likewise.
        timeout: Likewise.
        batch_dim: The dimension that counts samples, by which inputs and labels are cut.
        training: Whether shapes of outputs are those of training.
        input_modes: What becomes of the gradients of inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: Devices,
        *,
        workloads: Sequence[float] | None,
        timeout: Timeout,
        batch_dim: BatchDim,
        training: bool,
        input_modes: InputModes,
    ) -> None:
        super().__init__(model, devices, workloads=workloads, timeout=timeout)
        self._signature = Signature(
            model.forward, batch_dim, partial(refuse_shapes, model, training=training)
        )
        self._trains = training
        self._input_modes = input_modes
        self._forward: Forward | None = None
        self._merged: list[torch.Tensor] = []
        self._input_gradients: InputGradients | None = None

    def outputs(self, *, merge: bool = True) -> list[Any]:
        """Give the outputs of the last forward.

        Args:
            merge: One tensor for each output; else for each output a list of tensors, one a device, None
                where the device had no samples.

        Raises:
            OrderError: There was no forward.
        """
        forward = self._last()
        if merge:
            return list(self._merged)
        parts = [
            forward.outputs.merged(device, done) if done else None
            for device, done in zip(self.devices, forward.done, strict=True)
        ]
        return [
            [None if part is None else part[index] for part in parts] for index in range(len(self._merged))
        ]

    def output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Give the name and shape of each output, of the whole batch: the last forward's, or the next one's.

        Before the first forward, and after a `reshape`, they follow from the bound shapes: a copy of the
        model is run on tensors without values, or, where it looks at values, on zeros. No state, random
        number or buffer changes by that, and no hook of yours is called.

        Raises:
            OrderError: There was no forward, and inputs are not bound or do not tell.
        """
        bound = self._signature.bound
        if self._forward is None and bound is not None:
            found = infer(self.model, bound, training=self._trains)
            if found.shapes is not None:
                return found.shapes
        names = self._last().outputs.names
        return [(name, tuple(tensor.shape)) for name, tensor in zip(names, self._merged, strict=True)]

    def input_grads(self, *, merge: bool = True) -> list[Any]:
        """Give the gradients of inputs that the last backward gave, in the order of the call.

        Args:
            merge: One tensor for each input, on its device; else for each input a list with one a device.
                None stands for an input without a gradient: whole numbers, labels, and what backward did
                not reach.

        Raises:
            OrderError: They were not asked for, or there was no backward.
        """
        if not self._input_modes.wanted:
            raise OrderError(
                "Gradients of inputs are there with input_grads=True, and a `grad_mode` not 'null'."
            )
        if self._input_gradients is None:
            raise OrderError("Gradients of inputs must follow a backward.")
        if merge:
            return list(self._input_gradients.merged())
        parts = [self._input_gradients.of_device(place, device) for place, device in enumerate(self.devices)]
        return [list(each) for each in zip(*parts, strict=True)]

    def update_metric(
        self, metric: Updatable, labels: Any, *, per_device: bool = False, pad: int = 0
    ) -> None:
        """Show a metric the outputs of the last forward: ``metric.update(outputs, labels)``.

        Args:
            metric: Anything with `update`, also of torchmetrics.
            labels: A tensor or nest with one entry a sample, cut as the bound labels are.
            per_device: One call for each device with its own samples; else one call for all, so that the
                result is that of one device whatever the metric counts.
            pad: How many samples at the end of the batch are padding, which is not counted; an output that is
                one value for all samples comes as it is.

        Raises:
            OrderError: There was no forward.
            ValueError: Labels are for another number of samples, or `pad` leaves none; nothing was counted.
        """
        forward = self._last()
        read = self._signature.read_labels(labels, forward.inputs.num_samples)
        for outputs, target in portions(forward, self.devices, read, per_device=per_device, pad=pad):
            metric.update(outputs, target)

    def _last(self) -> Forward:
        if self._forward is None:
            raise OrderError("A forward must come first.")
        return self._forward

    def _drop_forward(self) -> None:
        """Let go of the last forward, so that its graph and the next one's are never there together."""
        self._forward = None
        self._merged = []
