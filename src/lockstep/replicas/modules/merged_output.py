"""Make the outputs of shards one differentiable output, whose backward runs on the replicas at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.errors import OrderError
from lockstep.replicas.batch import InputGradients
from lockstep.replicas.modules.flat_parameters import Flattened
from lockstep.replicas.passes import Forward, ForwardBackward
from lockstep.tree import Tensors


@dataclass(frozen=True, slots=True)
class BackwardBridge:
    """What ties a merged output to the shards behind it.

    Attributes:
        passes: What runs backward.
        forward: The forward that was run.
        parameters: The model's parameters and buffers that ask for a gradient, as the forward's.
        device: Where the output is put together.
        flat: Keeps the gradients end to end; None where they need not lie so.
    """

    passes: ForwardBackward
    forward: Forward
    parameters: list[torch.Tensor]
    device: torch.device
    flat: Flattened | None

    def outputs(self) -> list[torch.Tensor]:
        """Merge the outputs, differentiable by the inputs and parameters."""
        merged: tuple[torch.Tensor, ...] = MergedOutput.apply(  # type: ignore[no-untyped-call]  # torch's gap
            self, *self.forward.inputs.tensors, *self.parameters
        )
        return list(merged)

    def gradients(self, output_grads: Sequence[torch.Tensor | None], *, retain_graph: bool) -> Tensors:
        """Run backward; give the gradient of every input, then of every parameter."""
        if self.flat is not None:
            self.flat.gather_gradients()
        backward = self.passes.backward(self.forward, output_grads, retain_graph=retain_graph)
        totals = backward.total(keep=False) or [None] * len(self.parameters)
        inputs = InputGradients(self.forward.inputs, self.forward.shards, backward.inputs)
        return inputs.merged() + [
            gradient
            if gradient is None or (gradient.dtype == parameter.dtype and gradient.device == parameter.device)
            else gradient.to(parameter)
            for gradient, parameter in zip(totals, self.parameters, strict=True)
        ]


class MergedOutput(torch.autograd.Function):
    """A function of all inputs and parameters; its value is there already, its backward is the replicas'."""

    @staticmethod
    def forward(ctx: Any, link: BackwardBridge, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Hand out the merged outputs."""
        del tensors
        ctx.link = link
        ctx.set_materialize_grads(False)
        merged = link.forward.outputs.merged(link.device)
        shards = [each.tensors for each in link.forward.outputs.shards]
        asks = [any(tensor.requires_grad for tensor in each) for each in zip(*shards, strict=True)]
        ctx.mark_non_differentiable(*[out for out, differs in zip(merged, asks, strict=True) if not differs])
        return tuple(merged)

    @staticmethod
    def backward(ctx: Any, *output_grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run backward on the replicas.

        Raises:
            OrderError: The gradient itself is to be differentiated, or the graph is gone.
        """
        if torch.is_grad_enabled():
            raise OrderError(
                "The backward of a DataParallel must run without create_graph: its gradients, made by "
                "several threads, have no graph. Build it with parallel_backward=False to differentiate them."
            )
        if ctx.link is None:
            raise OrderError(
                "A second backward must follow one with retain_graph=True; the graphs of this output are gone."
            )
        link: BackwardBridge = ctx.link
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001 - no other way to know
        if not keep:
            ctx.link = None  # as torch does, so that the memory is free before the next forward
        return None, *link.gradients(output_grads, retain_graph=keep)
