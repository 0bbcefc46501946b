"""See a model as an update needs it: its parameters and buffers, and a place for each of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import nn

from lockstep import plan
from lockstep.metrics import Observers
from lockstep.plan import Piece
from lockstep.replicas import ReplicaGroup
from lockstep.replicas.buffers import ReplicaBuffers
from lockstep.replicas.slots import Slot, buffer_slots
from lockstep.updaters.flat import FlatGradients
from lockstep.updaters.recipe import Recipe
from lockstep.updaters.shards import Place

SIDE_BY_SIDE: Final = 400_000
"""Elements. With fewer parameters one thread has added them up before a second has begun."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What an update has to know of a model, until the model changes; empty before the first update.

    Attributes:
        named: The model's parameters that ask for a gradient, in the order of `Attempt.gradients`.
        parameters: The same, without their names.
        frozen: Those that ask for none.
        slots: The model's buffers.
        like: Of the shapes, dtypes and devices of the gradients.
        places: One for each replica.
        slices: Which elements of the gradients each place adds up, where that is done side by side.
        side_by_side: Whether reducing and stepping are worth more than one thread.
        flat: Where the gradients lie end to end, if that was asked for.
    """

    named: Mapping[str, nn.Parameter] = field(default_factory=dict)
    parameters: Sequence[nn.Parameter] = ()
    frozen: Sequence[nn.Parameter] = ()
    slots: Sequence[Slot] = ()
    like: Sequence[torch.Tensor] = ()
    places: Sequence[Place] = ()
    slices: Sequence[Sequence[Piece]] = ()
    side_by_side: bool = False
    flat: FlatGradients | None = None

    @classmethod
    def of(cls, group: ReplicaGroup, recipe: Recipe, phase: Callable[[str], None]) -> Layout:
        """Look at a model whose replicas have been built anew.

        Args:
            group: The model and its replicas.
            recipe: What is computed.
            phase: Told by the places what is being done.

        Raises:
            ValueError: No parameter asks for a gradient, or they are to lie in one tensor and cannot.
        """
        model = group.model
        named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        if not named:
            raise ValueError("`model` must have a parameter that asks for a gradient, got none.")
        parameters = list(named.values())
        held = recipe.policy.held_dtype is not None  # then gradients are summed in float32
        like = [_in_float32(each) if held else each.detach() for each in parameters]
        places = [
            Place(
                device,
                replica,
                [parameter for parameter in replica.parameters() if parameter.requires_grad],
                ReplicaBuffers(model, replica, recipe.buffers),
                Observers({"": replica}),
                phase,
            )
            for device, replica in zip(group.devices, group.replicas, strict=True)
        ]
        sizes = [parameter.numel() for parameter in parameters]
        on_cpus = len(places) > 1 and all(device.type == "cpu" for device in group.devices)
        return cls(
            named,
            parameters,
            [parameter for parameter in model.parameters() if not parameter.requires_grad],
            buffer_slots(model),
            like,
            places,
            plan.slices(sizes, len(places)),
            on_cpus and sum(sizes) >= SIDE_BY_SIDE,
            FlatGradients(parameters, like[0].dtype) if recipe.flat_gradients else None,
        )

    def others(self, wanted: frozenset[int] | None) -> list[int]:
        """List the parameters, by index, that are to have no gradient for now.

        Args:
            wanted: Those that are, by ``id``; None for all.
        """
        if wanted is None:
            return []
        return [index for index, parameter in enumerate(self.parameters) if id(parameter) not in wanted]


def _in_float32(parameter: torch.Tensor) -> torch.Tensor:
    """Give something of a parameter's shape in float32 that takes no memory."""
    return torch.empty((), dtype=torch.float32, device=parameter.device).expand(parameter.shape)
