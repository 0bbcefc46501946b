"""Merge the outputs of shards in the order of samples, and split the gradients of merged outputs.

An output with a dimension that counts samples is concatenated along it, so that sample k of the batch is entry k. An
output without such a dimension is one value for the whole batch, such as a mean loss or a penalty. With values v_s from
shards of n_s samples it is::

    v = Σ n_s·v_s / Σ n_s

This is what one device would return if v_s is a mean over samples, or the same for all shards. The gradient is split
with the same weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from lockstep import nest
from lockstep.metrics import WeightedSum
from lockstep.plan import Shard
from lockstep.precision import HALF_PRECISION
from lockstep.replicas.batch.inputs import BatchDim, dims_by_path, positive_dim
from lockstep.tree import PartialSum, Tensors, total

PLAIN_TYPES: Final = (str, bytes, int, float, complex)
"""The types of values that a model may return beside tensors."""


@dataclass(slots=True)
class ShardForward:
    """The result of the forward of one shard.

    Attributes:
        shard: The shard.
        leaves: For each input the tensor in which backward stores its gradient, or None if no gradient is wanted.
        returned: The value that the replica returned, with its graph if one was kept.
        tensors: The tensors in that value, in order.
        buffer_leaves: The leaf tensors in which backward stores the gradients of buffers that require one.
        stream_position: The state of the shard's random stream after the forward, or None if no graph was kept.
        reports: The sum and the weight of each value that was reported, if reports are collected.
    """

    shard: Shard
    leaves: list[torch.Tensor | None]
    returned: Any
    tensors: list[torch.Tensor]
    buffer_leaves: list[torch.Tensor]
    stream_position: list[torch.Tensor] | None
    reports: Mapping[str, WeightedSum] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outputs:
    """The values that the shards of one forward returned, ready to be merged.

    Attributes:
        names: The path of each output.
        dims: For each output the dimension that counts samples, at least 0, or None if it is one value for all samples.
        results: The results of the shards, in order.
        num_samples: The number of samples in the batch.
    """

    names: list[str]
    dims: list[int | None]
    results: list[ShardForward]
    num_samples: int

    def merged(
        self, device: torch.device, results: Sequence[ShardForward] | None = None, *, attached: bool = False
    ) -> list[torch.Tensor]:
        """Return the merged outputs.

        Args:
            device: The device of the results.
            results: The results to merge, which must be of neighboring shards. All of them are merged by default.
            attached: Whether to keep the autograd graphs of the outputs.
        """
        selected = self.results if results is None else results
        merged = []
        for index, dim in enumerate(self.dims):
            parts = []
            for each in selected:
                tensor = each.tensors[index]
                parts.append(tensor if attached else tensor.detach())
            try:
                merged.append(_merge(parts, dim, selected, device))
            except RuntimeError as error:
                shapes = dict.fromkeys(tuple(each.shape) for each in parts)
                if len(parts) == 1 or dim is None or len({each[:dim] + each[dim + 1 :] for each in shapes}) == 1:
                    raise
                raise ValueError(
                    f"`{self.names[index]}` must have the same sizes for all shards apart from dimension {dim}, got "
                    f"shapes {', '.join(map(str, shapes))}. Pad to one length for the whole batch, as with "
                    "pad_packed_sequence(..., total_length=...)."
                ) from error
        return merged

    def by_device(
        self, devices: Sequence[torch.device], results: Sequence[Sequence[ShardForward]]
    ) -> list[list[torch.Tensor | None]]:
        """Return for each output a list with one tensor per device, or None for a device without a shard.

        Args:
            devices: The devices of the group.
            results: The results of the shards of each device.
        """
        parts = [self.merged(device, each) if each else None for device, each in zip(devices, results, strict=True)]
        return [[None if part is None else part[index] for part in parts] for index in range(len(self.dims))]

    def unflatten(self, parts: Sequence[Any]) -> Any:
        """Return values, one for each output, in containers like those that the model returned.

        Args:
            parts: The values, in the order of the outputs.
        """
        if isinstance(self.results[0].returned, torch.Tensor):
            return parts[0]
        rest = iter(parts)
        return nest.map_tensors(lambda _: next(rest), self.results[0].returned)

    def shard_grads(self, result: ShardForward, grads: Sequence[torch.Tensor | None]) -> Tensors:
        """Return the part of the gradients of merged outputs that belongs to a shard, on the device of the shard.

        Args:
            result: The result of the forward of the shard.
            grads: The gradient of each merged output, or None.
        """
        share = len(result.shard.samples) / self.num_samples
        return [
            None if grad is None else _shard_gradient(grad, dim, result, share).to(tensor.device)
            for grad, dim, tensor in zip(grads, self.dims, result.tensors, strict=True)
        ]


def read_outputs(results: Sequence[ShardForward], num_samples: int, output_dim: BatchDim) -> Outputs:
    """Check that the outputs of shards fit together, and collect them.

    Args:
        results: The results of the shards, in order.
        num_samples: The number of samples of all shards.
        output_dim: The dimension that counts samples: one for all outputs, or one for each by name, or None for an
            output that is one value for all samples. An output without dimensions always is, and so is one that is
            empty along its dimension.

    Raises:
        TypeError: If a shard returned something that is neither a tensor nor a plain value, or no tensor at all.
        ValueError: If shards returned different structures, an output has the wrong number of samples, or `output_dim`
            names an output that does not exist.
    """
    _check_same_structure(results)
    found = named_outputs(results[0].returned)
    if not found:
        raise TypeError(f"`model` must return at least one tensor, got a {type(results[0].returned).__name__}.")
    names = [path for path, _ in found]
    dims = dims_by_path(output_dim, names, "output_dim")
    for index, ((path, tensor), given) in enumerate(zip(found, dims, strict=True)):
        # One value for all samples has no dimension that counts them.
        dim = None if given is None or tensor.dim() == 0 else positive_dim(path, tensor, given)
        dims[index] = dim if dim is not None and tensor.shape[dim] else None
    outputs = Outputs(names, dims, list(results), num_samples)
    for each in results:
        _check_samples(outputs, each)
    return outputs


def named_outputs(returned: Any) -> list[tuple[str, torch.Tensor]]:
    """List the tensors that a model returned, named by key, by the field of a dataclass, or else ``output``.

    Args:
        returned: The value that the model returned.

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
    return nest.named_tensors(returned, "output")


def _check_same_structure(results: Sequence[ShardForward]) -> None:
    """Check that all shards returned the same containers and plain values.

    Args:
        results: The results of the shards.

    Raises:
        ValueError: If they differ.
    """
    first = _structure(results[0].returned)
    for each in results[1:]:
        if _structure(each.returned) != first:
            raise ValueError(
                "`model` must return the same containers and plain values for every shard, got something "
                f"else for shard {each.shard.index} than for shard {results[0].shard.index}."
            )


def _structure(returned: Any, path: str = "output") -> Any:
    """Return the containers, keys and plain values that a model returned, with a marker for each tensor."""
    if isinstance(returned, torch.Tensor):
        return torch.Tensor
    parts = nest.named_parts(returned, path)
    if parts is not None:
        return type(returned), [(name, _structure(part, name)) for name, part in parts]
    if returned is None or isinstance(returned, PLAIN_TYPES):
        # By text, in which a NaN is equal to another one.
        return repr(returned)
    raise TypeError(
        "`model` must return tensors and plain values in tuples, lists, dicts and dataclasses, got a "
        f"{type(returned).__name__} as `{path}`. Leave it out, as by use_cache=False for the cache of a model of "
        "transformers."
    )


def _check_samples(outputs: Outputs, result: ShardForward) -> None:
    """Check that the outputs of a shard have the samples of that shard.

    Args:
        outputs: The names and dimensions of the outputs.
        result: The result of the shard.

    Raises:
        ValueError: If an output has another length.
    """
    wanted = len(result.shard.samples)
    for name, dim, tensor in zip(outputs.names, outputs.dims, result.tensors, strict=True):
        shape = tuple(tensor.shape)
        if dim is not None and (tensor.dim() <= dim or tensor.shape[dim] != wanted):
            raise ValueError(
                f"`{name}` must hold the samples of its shard ({wanted}) along dimension {dim}, got shape "
                f"{shape}. Specify its dimension in `output_dim`, or None for one value for all samples "
                "(`output_layouts` in lockstep.compat.mxnet, `table.output_dim` in lockstep.compat.torch7)."
            )


def _merge(
    parts: list[torch.Tensor], dim: int | None, results: Sequence[ShardForward], device: torch.device
) -> torch.Tensor:
    """Merge one output of several shards."""
    moved = [part if part.device == device else part.to(device) for part in parts]
    if len(moved) == 1:
        return moved[0]
    if dim is not None:
        return torch.cat(moved, dim)
    if not (moved[0].is_floating_point() or moved[0].is_complex()):
        return _only_value(moved)
    return _weighted_mean(moved, results)


def _only_value(values: list[torch.Tensor]) -> torch.Tensor:
    """Return the value that all shards returned.

    Args:
        values: The values of the shards.

    Raises:
        ValueError: If the values differ.
    """
    if not all(torch.equal(value, values[0]) for value in values):
        raise ValueError(
            "An integer output without a dimension that counts samples must be the same for every "
            "shard, got different values. Return one for each sample, or their mean as a floating-point number."
        )
    return values[0]


def _weighted_mean(values: list[torch.Tensor], results: Sequence[ShardForward]) -> torch.Tensor:
    """Return the mean over shards, weighted by their numbers of samples and summed in the order of the tree."""
    # Half precision is summed in float32 and rounded once, because each addition in half precision loses bits.
    dtype = torch.float32 if values[0].dtype in HALF_PRECISION else values[0].dtype
    weights = [len(each.shard.samples) for each in results]
    partials = [
        PartialSum(each.shard.index, [value.to(dtype) * weight])
        for value, weight, each in zip(values, weights, results, strict=True)
    ]
    (summed,) = (tensor for tensor in total(partials) if tensor is not None)
    return (summed / sum(weights)).to(values[0].dtype)


def _shard_gradient(grad: torch.Tensor, dim: int | None, result: ShardForward, share: float) -> torch.Tensor:
    """Return the part of the gradient of one merged output that belongs to a shard."""
    if dim is None:
        # With one shard the gradient passes unchanged, as it would on one device.
        return grad if share == 1.0 else grad * share
    samples = result.shard.samples
    return grad if len(samples) == grad.shape[dim] else grad.narrow(dim, samples.start, len(samples))
