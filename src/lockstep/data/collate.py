"""Convert samples to tensors by stacking them."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.data import Subset, TensorDataset

from lockstep.data.samples import Samples
from lockstep.nest import rebuild
from lockstep.precision import copy_to_device

Device: TypeAlias = "torch.device | str | int | None"


def collate(samples: Sequence[Any], device: Device = None, *, padding: Any = None) -> Any:
    """Stack samples into tensors along a new first dimension.

    The first sample determines the structure; all others must have the same:

    ==================  =====================================================================
    value in a sample   result
    ==================  =====================================================================
    tuple, named tuple  the same type, with the results of its fields
    dict                a dict with its keys and the results of its values
    tensor              a tensor
    NumPy array         a tensor of the same dtype
    bool, int           a tensor of bool, of int64
    float, complex      a tensor of the default dtype, of the corresponding complex dtype
    list                one tensor, as nested lists of numbers are an array; but a list that contains
                        a tensor or array with dimensions, a tuple or a dict, is treated as a tuple
    ==================  =====================================================================

    Any other value, such as a string, cannot be stacked and raises an error: the dtype and shape of a shard
    must follow from its own samples. For the same reason, all samples must agree on the dtype of a field.

    Padding is applied per shard: a shard is as long as its longest sample. With ``padding`` the bits of a
    result may therefore depend on the number of shards, as with batch normalization. Without it, a shard
    contains the same numbers however the batch is split.

    Samples of a `torch.utils.data.TensorDataset`, or of a `Subset` of one, are copied from its tensors in one
    operation.

    Args:
        samples: The samples, at least one.
        device: The device of the tensors; None leaves them where they are. Copies to an accelerator are
            asynchronous, by way of pinned memory.
        padding: The value that extends samples of different shapes to the smallest shape that contains all of
            them: one number for all fields, or a tuple or dict with an entry per field. With None, for one field
            or for all, the shapes must agree. It must be exactly representable in the dtype of the field.

    Returns:
        A tensor or a nested structure of tensors, each with the samples along its first dimension.

    Raises:
        ValueError: If there is no sample; if samples differ in structure, dtype or shape; or if the padding has
            another structure or cannot be represented in the dtype of the field.
        TypeError: If a field contains a value that cannot be stacked, or its padding is not a number.

    Determinism: copies bits, on any device and with any number of threads.

    References: the rules are those of ``concat_examples`` in Chainer (Tokui et al., "Chainer: A Deep
    Learning Framework for Accelerating the Research Cycle", 2019, arXiv:1908.00213).

    >>> collate([(torch.zeros(2), 3), (torch.ones(2), 4)])
    (tensor([[0., 0.],
            [1., 1.]]), tensor([3, 4]))
    >>> collate([{"tokens": [1, 2, 3]}, {"tokens": [4]}], padding=-1)
    {'tokens': tensor([[ 1,  2,  3],
            [ 4, -1, -1]])}
    """
    # Not the length of `Samples`, which costs a call of another file in each shard of an update.
    if len(samples.indices if isinstance(samples, Samples) else samples) == 0:
        raise ValueError("`samples` must hold at least one sample, got none.")
    if isinstance(samples, Samples):
        dataset: Any = samples.dataset if samples.fetched is None else None
        indices = samples.indices
        # Not `isinstance`: a subclass may transform the samples that it indexes.
        while type(dataset) is Subset:
            dataset, indices = dataset.dataset, [int(dataset.indices[index]) for index in indices]
        if type(dataset) is TensorDataset:
            return tuple([_copy_rows(tensor, indices, device) for tensor in dataset.tensors])
        # Some samples may have been left out of the loading in advance.
        samples = samples.fetch()
    return _collate_field(samples, "", device, padding)


def _copy_rows(tensor: torch.Tensor, indices: Sequence[int], device: Device) -> torch.Tensor:
    """Copy rows of a tensor; with a view, a model that writes to its inputs would change the dataset."""
    if isinstance(indices, range) and indices.step == 1:
        rows = tensor.narrow(0, indices.start, len(indices)).clone()
    else:
        # Converting the buffer of an array to a tensor takes a third of the time of converting a tuple.
        positions = torch.frombuffer(array("q", indices), dtype=torch.int64)
        rows = tensor.index_select(0, positions.to(tensor.device))
    return rows if device == rows.device else _to_device(rows, device)


def _to_device(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """Copy a tensor to a device, or return it where it is."""
    return tensor if device is None else copy_to_device(tensor, torch.device(device))


def _collate_field(values: Sequence[Any], path: str, device: Device, padding: Any) -> Any:
    """Stack one field of all samples; ``path`` is the path to it within a sample."""
    first = values[0]
    if isinstance(first, Mapping):
        keys = list(first)
    elif isinstance(first, tuple) or _has_fields(first):
        keys = list(range(len(first)))
    else:
        return _to_device(_stack(values, path, padding), device)
    for number, value in enumerate(values):
        _check_structure(value, first, number, path)
    paddings = _padding_per_field(padding, first, keys, path)
    parts = [
        _collate_field([value[key] for value in values], f"{path}[{key!r}]", device, each)
        for key, each in zip(keys, paddings, strict=True)
    ]
    return rebuild(first, parts)


def _has_fields(value: Any) -> bool:
    """Return whether a list is a sample with several fields, and not an array of numbers."""
    return isinstance(value, list) and any(
        isinstance(each, Mapping | tuple) or getattr(each, "ndim", 0) > 0 for each in value
    )


def _check_structure(value: Any, first: Any, number: int, path: str) -> None:
    """Check that a container has the structure of that of the first sample."""
    if type(value) is not type(first):
        raise _mismatch(f"be of type {type(first).__name__}", type(value).__name__, number, path)
    if isinstance(first, Mapping):
        if value.keys() != first.keys():
            raise _mismatch(f"have the keys {list(first)}", list(value), number, path)
    elif len(value) != len(first):
        raise _mismatch(f"have {len(first)} fields", len(value), number, path)


def _mismatch(rule: str, value: object, number: int, path: str, remedy: str = "") -> ValueError:
    """Return an error that names a sample and how it differs from the first."""
    return ValueError(f"`samples[{number}]{path}` must {rule}, like `samples[0]{path}`, got {value}.{remedy}")


def _padding_per_field(padding: Any, first: Any, keys: list[Any], path: str) -> list[Any]:
    """Return the padding of each field of a container."""
    if not isinstance(padding, tuple | Mapping):
        return [padding] * len(keys)
    fields = list(padding) if isinstance(padding, Mapping) else list(range(len(padding)))
    if isinstance(padding, Mapping) != isinstance(first, Mapping) or set(fields) != set(keys):
        rule = f"must be one number, or have the fields {keys} of `samples[0]{path}`"
        raise ValueError(f"`padding` {rule}, got {padding!r}.")
    return [padding[key] for key in keys]


def _stack(values: Sequence[Any], path: str, padding: Any) -> torch.Tensor:
    """Stack a field whose values are single tensors, arrays or numbers."""
    if not isinstance(padding, bool | int | float | complex | None):
        raise TypeError(f"`padding` must be a number for `samples[0]{path}`, got {padding!r}.")
    types = set(map(type, values))
    if len(types) == 1 and types <= {bool, int, float, complex}:
        # Numbers have neither shapes nor dtypes to compare, and one conversion of all is faster.
        return _tensor(list(values), f"samples[...]{path}")
    tensors = [_as_tensor(value, number, path) for number, value in enumerate(values)]
    _check_same_format(tensors, path, shapes=padding is None)
    return torch.stack(tensors) if padding is None else _pad(tensors, padding, path)


def _as_tensor(value: Any, number: int, path: str) -> torch.Tensor:
    """Convert one sample's value of a field to a tensor, which shares its memory if possible."""
    if isinstance(value, torch.Tensor):
        return value
    # An array or a scalar of NumPy, recognized without importing it.
    if hasattr(type(value), "__array__"):
        data = value.__array__()
        # PyTorch has no read-only tensors, and warns when a tensor shares the memory of a read-only array.
        return _tensor(data if data.flags.writeable else data.copy(), f"samples[{number}]{path}")
    if isinstance(value, bool | int | float | complex | list):
        return _tensor(value, f"samples[{number}]{path}")
    rule = "must be a tensor, an array, a number, or a tuple, list or dict of these"
    remedy = "Remove it from the sample, convert it to numbers, or pass your own `converter`."
    raise TypeError(f"`samples[{number}]{path}` {rule}, got a {type(value).__name__}. {remedy}")


def _tensor(data: Any, name: str) -> torch.Tensor:
    """Convert an array, whose memory is shared, or numbers to a tensor."""
    try:
        return torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"`{name}` must be an array of numbers, got {data!r} ({error}).") from error


def _check_same_format(tensors: Sequence[torch.Tensor], path: str, *, shapes: bool) -> None:
    """Check that tensors have one dtype and one number of dimensions, and with ``shapes`` one shape."""
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            raise _mismatch(f"be of {first.dtype}", tensor.dtype, number, path)
        if shapes and tensor.shape != first.shape:
            remedy = " To fill up shorter ones, pass converter=partial(lockstep.collate, padding=0)."
            raise _mismatch(f"have the shape {tuple(first.shape)}", tuple(tensor.shape), number, path, remedy)
        if tensor.dim() != first.dim():
            raise _mismatch(f"have {first.dim()} dimensions", tensor.dim(), number, path)


def _pad(tensors: Sequence[torch.Tensor], padding: Any, path: str) -> torch.Tensor:
    """Stack tensors of different shapes, padded at their ends to the smallest shape that contains all of them."""
    dtype = tensors[0].dtype
    if not _can_represent(dtype, padding):
        raise ValueError(f"`padding` must be a number of {dtype} for `samples[0]{path}`, got {padding!r}.")
    shape = [max(lengths) for lengths in zip(*(tensor.shape for tensor in tensors), strict=True)]
    result = tensors[0].new_full((len(tensors), *shape), padding)
    for row, tensor in zip(result, tensors, strict=True):
        row[tuple(slice(length) for length in tensor.shape)] = tensor
    return result


def _can_represent(dtype: torch.dtype, number: complex) -> bool:
    """Return whether a dtype can represent a number; floating point may round it."""
    if isinstance(number, complex):
        return dtype.is_complex
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return number in (0, 1)
    limits = torch.iinfo(dtype)
    return number % 1 == 0 and limits.min <= number <= limits.max
