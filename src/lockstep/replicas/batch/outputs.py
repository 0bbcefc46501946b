"""Put the outputs of shards together in the order of samples, and take their gradients apart again.

An output with a dimension that counts samples is laid end to end along it: sample k of the batch is at place
k. An output without one is one value for the whole batch (a loss that is a mean, a penalty): with values v_s
from shards of n_s samples it is::

    v = Σ n_s·v_s / Σ n_s

which is what one device would give where v_s is a mean over samples, or the same for all shards. Its gradient
goes back by the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from lockstep import nest
from lockstep.plan import Shard
from lockstep.precision import HALF_PRECISION
from lockstep.replicas.batch.inputs import BatchDim, given_dims, positive_dim
from lockstep.tree import PartialSum, Tensors, total

PLAIN: Final = (str, bytes, int, float, complex)


@dataclass(slots=True)
class ShardForward:
    """What the forward of one shard left behind.

    Attributes:
        shard: Which one.
        leaves: One entry an input: where backward leaves its gradient, None where none is wanted.
        returned: What the replica returned, with the graph behind it if one was kept.
        tensors: The tensors in that, in order.
        buffers: Where backward leaves the gradients of buffers that require one.
        position: How far the shard's stream was drawn from; None where no graph was kept.
    """

    shard: Shard
    leaves: list[torch.Tensor | None]
    returned: Any
    tensors: list[torch.Tensor]
    buffers: list[torch.Tensor]
    position: list[torch.Tensor] | None


@dataclass(frozen=True, slots=True)
class Outputs:
    """What the shards of one forward returned, ready to be put together.

    Attributes:
        names: The path of each output.
        dims: The dimension of each that counts samples, at least 0; None where it is one value for all.
        shards: The forwards, in order of shards.
        num_samples: How many samples there are.
    """

    names: list[str]
    dims: list[int | None]
    shards: list[ShardForward]
    num_samples: int

    def merged(
        self, device: torch.device, shards: Sequence[ShardForward] | None = None, *, attached: bool = False
    ) -> list[torch.Tensor]:
        """Put outputs together.

        Args:
            device: Where to.
            shards: Which; all by default, else neighbours.
            attached: With the graphs behind them, which they are without by default.
        """
        chosen = self.shards if shards is None else shards
        together = []
        for index, dim in enumerate(self.dims):
            parts = []
            for each in chosen:
                tensor = each.tensors[index]
                parts.append(tensor if attached else tensor.detach())
            together.append(_together(parts, dim, chosen, device))
        return together

    def by_device(
        self, devices: Sequence[torch.device], done: Sequence[Sequence[ShardForward]]
    ) -> list[list[torch.Tensor | None]]:
        """Return for each output a list with one tensor per device, None for a device that had no shard."""
        parts = [self.merged(device, each) if each else None for device, each in zip(devices, done, strict=True)]
        return [[None if part is None else part[index] for part in parts] for index in range(len(self.dims))]

    def nest(self, parts: Sequence[Any]) -> Any:
        """Put one thing for each output into containers like those that the model returned."""
        if isinstance(self.shards[0].returned, torch.Tensor):
            return parts[0]
        rest = iter(parts)
        return nest.map_tensors(lambda _: next(rest), self.shards[0].returned)

    def grads_of(self, shard: ShardForward, grads: Sequence[torch.Tensor | None]) -> Tensors:
        """Cut a shard's part out of the gradients of merged outputs, and bring it to the shard's device."""
        share = len(shard.shard.samples) / self.num_samples
        return [
            None if grad is None else _part(grad, dim, shard, share).to(tensor.device)
            for grad, dim, tensor in zip(grads, self.dims, shard.tensors, strict=True)
        ]


def read_outputs(shards: Sequence[ShardForward], num_samples: int, output_dim: BatchDim) -> Outputs:
    """Check what the shards returned against each other.

    Args:
        shards: Their forwards, in order of shards.
        num_samples: How many samples they hold together.
        output_dim: The dimension that counts samples: one for all outputs, or one for each by name; None for
            an output that is one value for all samples. An output without dimensions always is, and one
            that is empty along its dimension stays so.

    Raises:
        TypeError: A shard returned something that is neither a tensor nor a plain value, or no tensor.
        ValueError: Shards differ in what they returned, an output holds another number of samples, or
            `output_dim` names an output that there is not.
    """
    _check_alike(shards)
    found = named_outputs(shards[0].returned)
    if not found:
        raise TypeError(f"`model` must return at least one tensor, got a {type(shards[0].returned).__name__}.")
    names = [path for path, _ in found]
    dims = given_dims(output_dim, names, "output_dim")
    for index, (path, tensor) in enumerate(found):
        dims[index] = _output_dim(path, tensor, dims[index])
    outputs = Outputs(names, dims, list(shards), num_samples)
    for each in shards:
        _check_samples(outputs, each)
    return outputs


def _output_dim(path: str, tensor: torch.Tensor, given: int | None) -> int | None:
    """Give the dimension that counts samples; None where there are none, or one value is for all."""
    if given is None or tensor.dim() == 0:
        return None
    dim = positive_dim(path, tensor, given)
    return dim if tensor.shape[dim] else None


def named_outputs(returned: Any) -> list[tuple[str, torch.Tensor]]:
    """List the tensors that a model returned, by a dict's key, a dataclass's field, and otherwise ``output``.

    >>> [name for name, _ in named_outputs({"logits": torch.zeros(1), "states": [torch.zeros(1)]})]
    ['logits', 'states[0]']
    >>> [name for name, _ in named_outputs((torch.zeros(1), torch.zeros(1)))]
    ['output[0]', 'output[1]']
    """
    if isinstance(returned, Mapping):
        return [pair for key, part in returned.items() for pair in nest.named_tensors(part, str(key))]
    if nest.is_record(returned):
        parts = nest.record_parts(returned)
        return [pair for key, part in parts.items() for pair in nest.named_tensors(part, key)]
    return list(nest.named_tensors(returned, "output"))


def _check_alike(shards: Sequence[ShardForward]) -> None:
    """Refuse what cannot be put together."""
    first = _plan(shards[0].returned)
    for each in shards[1:]:
        if _plan(each.returned) != first:
            raise ValueError(
                "`model` must return the same containers and plain values for every shard, got something "
                f"else for shard {each.shard.index} than for shard {shards[0].shard.index}."
            )


def _plan(returned: Any) -> Any:
    """Describe what a model returned: containers, keys and plain values, with a mark for each tensor."""
    if isinstance(returned, torch.Tensor):
        return torch.Tensor
    if isinstance(returned, Mapping):
        return type(returned), [(key, _plan(part)) for key, part in returned.items()]
    if isinstance(returned, tuple | list):
        return type(returned), [_plan(part) for part in returned]
    if returned is None or isinstance(returned, PLAIN):
        return repr(returned)
    if nest.is_record(returned):
        return type(returned), [(key, _plan(part)) for key, part in nest.record_parts(returned).items()]
    raise TypeError(
        "`model` must return tensors in tuples, lists, dicts and dataclasses, beside plain values, "
        f"got a {type(returned).__name__}."
    )


def _check_samples(outputs: Outputs, shard: ShardForward) -> None:
    """Refuse outputs that do not hold the samples of their shard."""
    wanted = len(shard.shard.samples)
    for name, dim, tensor in zip(outputs.names, outputs.dims, shard.tensors, strict=True):
        shape = tuple(tensor.shape)
        if dim is not None and (tensor.dim() <= dim or tensor.shape[dim] != wanted):
            raise ValueError(
                f"`{name}` must hold the samples of its shard ({wanted}) along dimension {dim}, got shape "
                f"{shape}. Name its dimension in `output_dim`; None for one value for all samples."
            )


def _together(
    parts: list[torch.Tensor], dim: int | None, shards: Sequence[ShardForward], device: torch.device
) -> torch.Tensor:
    """Put one output of some shards together."""
    moved = [part if part.device == device else part.to(device) for part in parts]
    if len(moved) == 1:
        return moved[0]
    if dim is not None:
        return torch.cat(moved, dim)
    if not (moved[0].is_floating_point() or moved[0].is_complex()):
        return _only_value(moved)
    return _weighted_mean(moved, shards)


def _only_value(values: list[torch.Tensor]) -> torch.Tensor:
    """Give the one value that all shards returned."""
    if not all(torch.equal(value, values[0]) for value in values):
        raise ValueError(
            "An output of whole numbers without a dimension that counts samples must be the same for every "
            "shard, got several values. Return one for each sample, or their mean as a floating-point number."
        )
    return values[0]


def _weighted_mean(values: list[torch.Tensor], shards: Sequence[ShardForward]) -> torch.Tensor:
    """Give the mean over shards, each weighted by its number of samples, summed in the tree's order."""
    dtype = torch.float32 if values[0].dtype in HALF_PRECISION else values[0].dtype
    weights = [len(each.shard.samples) for each in shards]
    partials = [
        PartialSum(each.shard.index, [value.to(dtype) * weight])
        for value, weight, each in zip(values, weights, shards, strict=True)
    ]
    (summed,) = (tensor for tensor in total(partials) if tensor is not None)
    return (summed / sum(weights)).to(values[0].dtype)


def _part(grad: torch.Tensor, dim: int | None, shard: ShardForward, share: float) -> torch.Tensor:
    """Cut a shard's part out of the gradient of one merged output."""
    if dim is None:
        return grad if share == 1.0 else grad * share
    samples = shard.shard.samples
    return grad if len(samples) == grad.shape[dim] else grad.narrow(dim, samples.start, len(samples))
