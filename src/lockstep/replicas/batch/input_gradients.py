"""Merge the gradients of inputs from those of the shards, and accumulate them where requested."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from lockstep.arguments import check_choice
from lockstep.plan import Shard
from lockstep.replicas.batch.inputs import Inputs, by_longest_name
from lockstep.tree import PartialSum, Tensors, total

GradMode: TypeAlias = Literal["write", "add", "null"]
"""What happens to a gradient: it replaces the previous one, is added to it, or is not computed."""


def check_grad_mode(value: GradMode, argument: str) -> GradMode:
    """Return a gradient mode after checking that it is one.

    Args:
        value: The value to check.
        argument: The name of the argument in error messages.

    Raises:
        ValueError: If the value is not 'write', 'add' or 'null'.
    """
    check_choice(argument, value, get_args(GradMode))
    return value


@dataclass(frozen=True, slots=True)
class InputModes:
    """The gradient mode of each input.

    Attributes:
        by_name: The modes of named inputs, by the name of an argument or the path of an input in it.
        default: The mode of all other inputs.
    """

    by_name: Mapping[str, GradMode]
    default: GradMode

    @property
    def any_wanted(self) -> bool:
        """Whether an input may have a gradient."""
        return any(mode != "null" for mode in (*self.by_name.values(), self.default))

    def by_path(self, paths: Sequence[str], absent: Collection[str] = ()) -> dict[str, GradMode]:
        """Return the mode of each input.

        Args:
            paths: The paths of the inputs of a call.
            absent: Paths that may be named although they do not occur in this call.

        Raises:
            ValueError: If a name matches no path.
        """
        if not self.by_name:
            return dict.fromkeys(paths, self.default)
        found = by_longest_name(self.by_name, [*paths, *absent], "input_grads", default=self.default)
        return dict(zip(paths, found, strict=False))


NO_GRADIENTS = InputModes({}, "null")
"""The modes of inputs without gradients."""


def read_input_modes(
    input_grads: bool | Mapping[str, GradMode], grad_mode: GradMode | Mapping[str, GradMode]
) -> InputModes:
    """Convert the arguments of a `ReplicaGroup` to the gradient modes of inputs.

    Args:
        input_grads: Whether all inputs have gradients, with the mode of `grad_mode`; or modes by name, where an input
            that is not named has no gradient.
        grad_mode: One mode for all parameters, or modes by parameter, in which case inputs use "write".

    Raises:
        ValueError: If a mode is not 'write', 'add' or 'null'.
    """
    if isinstance(input_grads, Mapping):
        modes_by_name = {name: check_grad_mode(mode, f"input_grads[{name!r}]") for name, mode in input_grads.items()}
        return InputModes(modes_by_name, "null")
    if not input_grads:
        return NO_GRADIENTS
    return InputModes({}, grad_mode if isinstance(grad_mode, str) else "write")


@dataclass(frozen=True, slots=True)
class InputGradients:
    """The gradients of the inputs of one forward.

    The gradients of an input that was split are concatenated along the dimension of the split. The gradient of an input
    that was given whole to every shard is the sum over shards, in the order of the tree. A part that backward did not
    reach counts as zeros, and the gradient of an input that backward did not reach at all is None.

    Attributes:
        inputs: The inputs of the model.
        shards: The shards of each device.
        by_shard: The gradient of the part of each input, by the index of the shard. These tensors are not modified.
    """

    inputs: Inputs
    shards: Sequence[Sequence[Shard]]
    by_shard: dict[int, Tensors]

    def merged(self) -> Tensors:
        """Return the gradient of each input, on the device of that input."""
        shards = [shard for device_shards in self.shards for shard in device_shards]
        return [self._merge_shards(index, shards, tensor.device) for index, tensor in enumerate(self.inputs.tensors)]

    def by_device(self, devices: Sequence[torch.device]) -> list[Tensors]:
        """Return for each input a list with the gradient of the part of each device.

        Args:
            devices: The devices of the group.
        """
        return [
            [self._merge_shards(index, shards, device) for shards, device in zip(self.shards, devices, strict=True)]
            for index in range(len(self.inputs.tensors))
        ]

    def plus(self, earlier: InputGradients | None, modes: InputModes) -> InputGradients:
        """Return these gradients plus those of an earlier backward for inputs whose mode is "add".

        Args:
            earlier: The gradients of the earlier backward. They are used only if the inputs had the same shapes and
                were split in the same way.
            modes: The gradient modes of the inputs.
        """
        if not modes.by_name and modes.default != "add":
            return self
        modes_by_name = modes.by_path(self.inputs.names, absent=modes.by_name)
        adds = [modes_by_name[name] == "add" for name in self.inputs.names]
        if not any(adds):
            return self
        # Gradients are added shard by shard, which is only possible if the same samples are in the same shards.
        if earlier is None or earlier.inputs.names != self.inputs.names or earlier.shards != self.shards:
            return self
        if [each.shape for each in earlier.inputs.tensors] != [each.shape for each in self.inputs.tensors]:
            return self
        sums = {
            shard: [
                _add(new, old) if add else new
                for new, old, add in zip(grads, earlier.by_shard[shard], adds, strict=True)
            ]
            for shard, grads in self.by_shard.items()
        }
        return InputGradients(self.inputs, self.shards, sums)

    def _merge_shards(self, index: int, shards: Sequence[Shard], device: torch.device) -> torch.Tensor | None:
        parts = {shard: self.by_shard[shard.index][index] for shard in shards}
        present = {shard: part.to(device) for shard, part in parts.items() if part is not None}
        # One shard has the whole gradient, so nothing is concatenated, summed or copied.
        if not present or len(parts) == 1:
            return next(iter(present.values()), None)
        tensor, dim = self.inputs.tensors[index], self.inputs.dims[index]
        if dim is None:
            # Cloned, because the sum adds to its left operands in place and `by_shard` must keep its values.
            return total([PartialSum(shard.index, [part.clone()]) for shard, part in present.items()])[0]
        # One element, expanded without memory for every part that is missing.
        zero = tensor.new_zeros((), device=device)
        return torch.cat(
            [present.get(shard, zero.expand(_shape(tensor, dim, len(shard.samples)))) for shard in shards], dim
        )


def _shape(tensor: torch.Tensor, dim: int, length: int) -> list[int]:
    return [length if index == dim else size for index, size in enumerate(tensor.shape)]


def _add(new: torch.Tensor | None, old: torch.Tensor | None) -> torch.Tensor | None:
    return new if old is None else old if new is None else old + new
