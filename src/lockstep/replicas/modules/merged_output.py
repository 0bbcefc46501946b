"""Merge the outputs of shards to one differentiable output, whose backward runs on all replicas at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import OrderError
from lockstep.replicas.batch import InputGradients
from lockstep.replicas.modules.flat_parameters import FlattenedParameters
from lockstep.replicas.passes import Forward, ForwardBackward
from lockstep.tree import Tensors


@dataclass(frozen=True, slots=True)
class BackwardBridge:
    """The connection between a merged output and the shards that computed it.

    Attributes:
        passes: The object that runs backward.
        forward: The forward that was run.
        parameters: The parameters and buffers of the model that require a gradient, in the order of those of the
            forward.
        device: The device of the merged output.
        flat: The flattened parameters whose gradients are kept end to end, or None.
    """

    passes: ForwardBackward
    forward: Forward
    parameters: list[torch.Tensor]
    device: torch.device
    flat: FlattenedParameters | None

    def outputs(self) -> list[torch.Tensor]:
        """Return the merged outputs, which are differentiable with respect to inputs and parameters."""
        merged: tuple[torch.Tensor, ...] = MergedOutput.apply(  # type: ignore[no-untyped-call]  # torch's gap
            self, *self.forward.inputs.tensors, *self.parameters
        )
        return list(merged)

    def gradients(self, output_grads: Sequence[torch.Tensor | None], *, retain_graph: bool) -> Tensors:
        """Run backward, and return the gradient of every input followed by that of every parameter.

        Args:
            output_grads: The gradient of each merged output, or None.
            retain_graph: Whether backward can be run again.
        """
        if self.flat is not None:
            self.flat.gather_gradients()
        backward = self.passes.backward(self.forward, output_grads, retain_graph=retain_graph)
        # `backward` is not used again, so its sums can be added to in place.
        totals = backward.total(keep=False) or [None] * len(self.parameters)
        inputs = InputGradients(self.forward.inputs, self.forward.shards, backward.input_gradients)
        return inputs.merged() + [
            gradient
            if gradient is None or (gradient.dtype == parameter.dtype and gradient.device == parameter.device)
            else gradient.to(parameter)
            for gradient, parameter in zip(totals, self.parameters, strict=True)
        ]


class MergedOutput(torch.autograd.Function):
    """A function of all inputs and parameters, whose value exists already and whose backward runs on the replicas."""

    @staticmethod
    def forward(ctx: Any, bridge: BackwardBridge, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the merged outputs.

        Args:
            ctx: The context of autograd.
            bridge: The connection to the shards.
            *tensors: The inputs and parameters, which autograd records as the arguments of this function.
        """
        del tensors
        ctx.bridge = bridge
        # None means that no gradient flows back, which zeros would not say.
        ctx.set_materialize_grads(False)
        merged = bridge.forward.outputs.merged(bridge.device)
        shards = [each.tensors for each in bridge.forward.outputs.results]
        differentiable = [any(tensor.requires_grad for tensor in each) for each in zip(*shards, strict=True)]
        ctx.mark_non_differentiable(*[out for out, yes in zip(merged, differentiable, strict=True) if not yes])
        return tuple(merged)

    @staticmethod
    def backward(ctx: Any, *output_grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run backward on the replicas.

        Args:
            ctx: The context of autograd.
            *output_grads: The gradient of each output, or None.

        Raises:
            OrderError: If the gradient itself is to be differentiated, or the graph has been freed.
        """
        if torch.is_grad_enabled():
            raise OrderError(
                "The backward of a DataParallel must run without create_graph, because its gradients, computed by "
                "several threads, have no graph. Create it with parallel_backward=False to differentiate them."
            )
        if ctx.bridge is None:
            raise OrderError(
                "A second backward must follow one with retain_graph=True. The graphs of this output have been freed."
            )
        bridge: BackwardBridge = ctx.bridge
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001 - no other way to know
        if not keep:
            # As torch does for its own nodes, so that the memory is free before the next forward.
            ctx.bridge = None
        return None, *bridge.gradients(output_grads, retain_graph=keep)
