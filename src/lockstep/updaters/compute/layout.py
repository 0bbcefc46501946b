"""See a model as an update needs it: its parameters and buffers, and a runner for each of its replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from lockstep.metrics import Observers
from lockstep.replicas import BufferRef, ReplicaBuffers, ReplicaSet, ShardRunner, TreeSum, buffer_refs
from lockstep.updaters.compute.flat import FlatGradients
from lockstep.updaters.setup import Recipe


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """What an update has to know of a model, until the model changes.

    Attributes:
        tree_sum: Sums gradients over the devices.
        named: The model's parameters that require a gradient, in the order of `Attempt.gradients`.
        parameters: The same, without their names.
        frozen: Those that require none.
        slots: The model's buffers.
        like: Tensors of the shapes, dtypes and devices of the gradients.
        runners: One for each replica.
        observers: For each replica what knows its modules by the names under which they report.
        flat: Where the gradients lie end to end, if that was asked for.
    """

    tree_sum: TreeSum
    named: Mapping[str, nn.Parameter] = field(default_factory=dict)
    parameters: Sequence[nn.Parameter] = ()
    frozen: Sequence[nn.Parameter] = ()
    slots: Sequence[BufferRef] = ()
    like: Sequence[torch.Tensor] = ()
    runners: Sequence[ShardRunner] = ()
    observers: Sequence[Observers] = ()
    flat: FlatGradients | None = None

    @classmethod
    def of(cls, replicas: ReplicaSet, recipe: Recipe) -> ModelLayout:
        """Look at a model whose replicas have been built anew.

        Args:
            replicas: The model and its replicas.
            recipe: What is computed.

        Raises:
            ValueError: No parameter requires a gradient, or they are to lie in one tensor and cannot.
        """
        model = replicas.model
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not named:
            raise ValueError("`model` must have a parameter that asks for a gradient, got none.")
        parameters = list(named.values())
        held = recipe.policy.held_dtype is not None  # then gradients are summed in float32
        like = [_in_float32(each) if held else each.detach() for each in parameters]
        return cls(
            TreeSum(replicas, [parameter.numel() for parameter in parameters]),
            named,
            parameters,
            [parameter for parameter in model.parameters() if not parameter.requires_grad],
            buffer_refs(model),
            like,
            [
                ShardRunner(
                    place,
                    replicas,
                    device,
                    replica,
                    [parameter for parameter in replica.parameters() if parameter.requires_grad],
                    ReplicaBuffers(model, replica, recipe.buffers),
                    names_batches=True,
                )
                for place, (device, replica) in enumerate(zip(replicas.devices, replicas.replicas, strict=True))
            ],
            [Observers({"": replica}) for replica in replicas.replicas],
            FlatGradients(parameters, like[0].dtype) if recipe.flat_gradients else None,
        )

    def others(self, wanted: frozenset[int]) -> list[int]:
        """List the parameters, by index, that are to have no gradient for now.

        Args:
            wanted: Those that are, by ``id``.
        """
        return [index for index, parameter in enumerate(self.parameters) if id(parameter) not in wanted]


def _in_float32(parameter: torch.Tensor) -> torch.Tensor:
    """Return something of a parameter's shape in float32 that takes no memory."""
    return torch.empty((), dtype=torch.float32, device=parameter.device).expand(parameter.shape)
