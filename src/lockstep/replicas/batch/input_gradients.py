"""Put the gradients of inputs together from those of the shards' parts, and add them up where asked."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from lockstep.plan import Shard
from lockstep.replicas.batch.inputs import Inputs, by_longest_name
from lockstep.tree import PartialSum, Tensors, total

GradMode: TypeAlias = Literal["write", "add", "null"]


def checked_mode(word: object, argument: str) -> GradMode:
    """Refuse what is none of the three words.

    Raises:
        ValueError: It is none.
    """
    for mode in get_args(GradMode):
        if word == mode:
            return mode  # type: ignore[no-any-return]
    raise ValueError(f"`{argument}` must be 'write', 'add' or 'null', got {word!r}.")


@dataclass(frozen=True, slots=True)
class InputModes:
    """What becomes of the gradient of each input.

    Attributes:
        words: By the name of an argument or the path in it.
        others: For inputs that are not named.
    """

    words: Mapping[str, GradMode]
    others: GradMode

    @property
    def wanted(self) -> bool:
        """Whether some input may have a gradient."""
        return any(word != "null" for word in (*self.words.values(), self.others))

    def by_path(self, paths: Sequence[str], absent: Collection[str] = ()) -> dict[str, GradMode]:
        """Give the word for each path.

        Args:
            paths: Of the inputs of a call.
            absent: Paths that may be named, too.

        Raises:
            ValueError: A name fits no path.
        """
        if not self.words:
            return dict.fromkeys(paths, self.others)
        found = by_longest_name(self.words, [*paths, *absent], "input_grads", default=self.others)
        return dict(zip(paths, found, strict=False))


NO_GRADIENTS = InputModes({}, "null")


def read_input_modes(
    input_grads: bool | Mapping[str, GradMode], grad_mode: GradMode | Mapping[str, GradMode]
) -> InputModes:
    """Say what becomes of the gradients of inputs.

    Args:
        input_grads: For all inputs what `grad_mode` says as one word; or words by name, null for others.
        grad_mode: One word for parameters, or words by parameter, which leave inputs at "write".

    Raises:
        ValueError: A word is none of the three.
    """
    if isinstance(input_grads, Mapping):
        words = {name: checked_mode(word, f"input_grads[{name!r}]") for name, word in input_grads.items()}
        return InputModes(words, "null")
    if not input_grads:
        return NO_GRADIENTS
    return InputModes({}, grad_mode if isinstance(grad_mode, str) else "write")


@dataclass(frozen=True, slots=True)
class InputGradients:
    """The gradients of the inputs of one forward.

    The gradient of an input that was cut is laid end to end along the dimension it was cut along. That of an
    input that was given whole to every shard is summed over shards, in the tree's order. A part that backward
    did not reach counts as zeros; None stands for an input that it did not reach at all.

    Attributes:
        inputs: What the model was called with.
        shards: The shards of each device.
        by_shard: The gradient of each input's part, by the shard's index; left as they are.
    """

    inputs: Inputs
    shards: Sequence[Sequence[Shard]]
    by_shard: dict[int, Tensors]

    def merged(self) -> Tensors:
        """Give the gradient of each input, on that input's device."""
        shards = [shard for place in self.shards for shard in place]
        return [self._together(index, shards, tensor.device) for index, tensor in enumerate(self.inputs.tensors)]

    def of_device(self, place: int, device: torch.device) -> Tensors:
        """Give the gradient of what one device was given of each input, on that device."""
        shards = self.shards[place]
        return [self._together(index, shards, device) for index in range(len(self.inputs.tensors))]

    def by_device(self, devices: Sequence[torch.device]) -> list[Tensors]:
        """Return for each input a list with the gradient of what each device was given."""
        parts = [self.of_device(place, device) for place, device in enumerate(devices)]
        return [list(each) for each in zip(*parts, strict=True)]

    def plus(self, earlier: InputGradients | None, modes: InputModes) -> InputGradients:
        """Add those of an earlier backward to inputs whose word is "add".

        Args:
            earlier: Counts if its inputs were cut into parts of the same shapes.
            modes: The words, which fit the inputs.
        """
        if not modes.words and modes.others != "add":
            return self
        words = modes.by_path(self.inputs.names, absent=modes.words)
        adds = [words[name] == "add" for name in self.inputs.names]
        if not any(adds):
            return self
        if earlier is None or earlier.inputs.names != self.inputs.names or earlier.shards != self.shards:
            return self
        if [each.shape for each in earlier.inputs.tensors] != [each.shape for each in self.inputs.tensors]:
            return self
        sums = {
            shard: [
                _plus(new, old) if add else new
                for new, old, add in zip(grads, earlier.by_shard[shard], adds, strict=True)
            ]
            for shard, grads in self.by_shard.items()
        }
        return InputGradients(self.inputs, self.shards, sums)

    def _together(self, index: int, shards: Sequence[Shard], device: torch.device) -> torch.Tensor | None:
        parts = {shard: self.by_shard[shard.index][index] for shard in shards}
        there = {shard: part.to(device) for shard, part in parts.items() if part is not None}
        if not there or len(parts) == 1:
            return next(iter(there.values()), None)
        tensor, dim = self.inputs.tensors[index], self.inputs.dims[index]
        if dim is None:
            return total([PartialSum(shard.index, [part.clone()]) for shard, part in there.items()])[0]
        zero = tensor.new_zeros((), device=device)
        return torch.cat(
            [there.get(shard, zero.expand(_shape(tensor, dim, len(shard.samples)))) for shard in shards], dim
        )


def _shape(tensor: torch.Tensor, dim: int, length: int) -> list[int]:
    return [length if index == dim else size for index, size in enumerate(tensor.shape)]


def _plus(new: torch.Tensor | None, old: torch.Tensor | None) -> torch.Tensor | None:
    return new if old is None else old if new is None else old + new
