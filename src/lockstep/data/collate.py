"""Stack samples into tensors."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import torch
from torch.utils.data import Subset, TensorDataset

from lockstep.data.samples import Samples
from lockstep.nest import rebuild

Device: TypeAlias = "torch.device | str | int | None"

NO_SAMPLE: Final = "`samples` must hold at least one sample, got none."


def collate(samples: Sequence[Any], device: Device = None, *, padding: Any = None) -> Any:
    """Stack samples into tensors, along a new first dimension that counts the samples.

    The first sample says what is built; the others must be of its structure:

    ==================  =====================================================================
    a sample            becomes
    ==================  =====================================================================
    tuple, named tuple  the same, of what its fields become
    dict                a dict with its keys, of what its fields become
    tensor              a tensor
    NumPy array         a tensor of the same dtype
    bool, int           a tensor of bool, of int64
    float, complex      a tensor of the default dtype, of the complex one that belongs to it
    list                one tensor: nested lists of numbers are an array; but a list that holds a
                        tensor or array with dimensions, a tuple or a dict, is taken as a tuple is
    ==================  =====================================================================

    Anything else, text among it, makes no tensor and is refused: the dtype and shape of a shard must
    follow from its own samples. For the same reason all samples agree on the dtype of a field.

    Padding is counted per shard: a shard is as long as its longest sample. So with ``padding`` the
    bits of a result may depend on the number of shards, as with batch normalisation; without it, a
    shard holds the same numbers however the batch was cut.

    Samples of a `torch.utils.data.TensorDataset`, or of a `Subset` of one, are copied out of its tensors
    at once.

    Args:
        samples: At least one.
        device: Where the tensors go; where they are, if None. From pinned memory they go without
            waiting.
        padding: What fills up samples of different shapes to the smallest shape that encloses all.
            One number for all fields, or a tuple or dict with an entry for each field; None, for a
            field or for all, where shapes must agree. An exact number of the field's dtype.

    Returns:
        A tensor, or a nest of tensors; each has the samples along its first dimension.

    Raises:
        ValueError: There is no sample; or samples differ in structure, dtype or shape; or padding has
            another structure, or is no number of the field's dtype.
        TypeError: A field holds what makes no tensor, or its padding is no number.

    Determinism: copies bits, whatever the device or the number of threads.

    References: the rules are those of ``concat_examples`` in Chainer (Tokui et al., "Chainer: A Deep
    Learning Framework for Accelerating the Research Cycle", 2019, arXiv:1908.00213).

    >>> collate([(torch.zeros(2), 3), (torch.ones(2), 4)])
    (tensor([[0., 0.],
            [1., 1.]]), tensor([3, 4]))
    >>> collate([{"tokens": [1, 2, 3]}, {"tokens": [4]}], padding=-1)
    {'tokens': tensor([[ 1,  2,  3],
            [ 4, -1, -1]])}
    """
    if not isinstance(samples, Samples):
        if len(samples) == 0:
            raise ValueError(NO_SAMPLE)
        return _field(samples, "", device, padding)
    if not samples.indices:
        raise ValueError(NO_SAMPLE)
    if samples.fetched is not None:
        return _field(samples.fetch(), "", device, padding)  # some may not have been, for want of a reader
    dataset: Any = samples.dataset
    indices = samples.indices
    # Not `isinstance`: a subclass may do more to a sample than to index its tensors.
    while type(dataset) is Subset:
        dataset, indices = dataset.dataset, [int(dataset.indices[index]) for index in indices]
    if type(dataset) is TensorDataset:
        return tuple([_rows(tensor, indices, device) for tensor in dataset.tensors])
    return _field(samples.fetch(), "", device, padding)


@runtime_checkable
class _Array(Protocol):
    """A NumPy array or scalar, recognised without NumPy."""

    def __array__(self) -> Any: ...


def _rows(tensor: torch.Tensor, indices: Sequence[int], device: Device) -> torch.Tensor:
    """Copy rows out of a tensor; a view would let a model that writes to its inputs change the dataset."""
    if isinstance(indices, range) and indices.step == 1:
        rows = tensor.narrow(0, indices.start, len(indices)).clone()
    else:
        # An array's buffer becomes a tensor three times as fast as a tuple does.
        places = torch.frombuffer(array("q", indices), dtype=torch.int64)
        rows = tensor.index_select(0, places.to(tensor.device))
    return rows if device == rows.device else _move(rows, device)


def _move(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """Bring a tensor to the device, without waiting where its memory allows that."""
    if device is None or (target := torch.device(device)) == tensor.device:
        return tensor
    # Never towards the CPU: the host would read what has not arrived yet.
    return tensor.to(target, non_blocking=target.type != "cpu" and tensor.is_pinned())


def _field(values: Sequence[Any], path: str, device: Device, padding: Any) -> Any:
    """Stack one field of all samples; ``path`` leads to it from a sample."""
    first = values[0]
    if isinstance(first, Mapping):
        keys = list(first)
    elif isinstance(first, tuple) or _has_fields(first):
        keys = list(range(len(first)))
    else:
        return _move(_stack(values, path, padding), device)
    for number, value in enumerate(values):
        _check_structure(value, first, number, path)
    fills = _fill_of_each(padding, first, keys, path)
    parts = [
        _field([value[key] for value in values], f"{path}[{key!r}]", device, fill)
        for key, fill in zip(keys, fills, strict=True)
    ]
    return rebuild(first, parts)


def _has_fields(value: Any) -> bool:
    """Tell a list that is a sample of several fields from one that is an array of numbers."""
    return isinstance(value, list) and any(
        isinstance(each, Mapping | tuple) or getattr(each, "ndim", 0) > 0 for each in value
    )


def _check_structure(value: Any, first: Any, number: int, path: str) -> None:
    """Refuse a container that is unlike the first sample's."""
    if type(value) is not type(first):
        raise _unlike(f"be of type {type(first).__name__}", type(value).__name__, number, path)
    if isinstance(first, Mapping):
        if value.keys() != first.keys():
            raise _unlike(f"have the keys {list(first)}", list(value), number, path)
    elif len(value) != len(first):
        raise _unlike(f"have {len(first)} fields", len(value), number, path)


def _unlike(rule: str, value: object, number: int, path: str) -> ValueError:
    """Say which sample differs from the first, and in what."""
    return ValueError(f"`samples[{number}]{path}` must {rule}, as `samples[0]{path}`, got {value}.")


def _fill_of_each(padding: Any, first: Any, keys: list[Any], path: str) -> list[Any]:
    """Say what fills up each field of a container."""
    if not isinstance(padding, tuple | Mapping):
        return [padding] * len(keys)
    fields = list(padding) if isinstance(padding, Mapping) else list(range(len(padding)))
    if isinstance(padding, Mapping) != isinstance(first, Mapping) or set(fields) != set(keys):
        rule = f"must be one number, or have the fields {keys} of `samples[0]{path}`"
        raise ValueError(f"`padding` {rule}, got {padding!r}.")
    return [padding[key] for key in keys]


def _stack(values: Sequence[Any], path: str, padding: Any) -> torch.Tensor:
    """Stack a field that is one tensor."""
    if not isinstance(padding, bool | int | float | complex | None):
        raise TypeError(f"`padding` must be a number for `samples[0]{path}`, got {padding!r}.")
    kinds = set(map(type, values))
    if len(kinds) == 1 and kinds <= {bool, int, float, complex}:
        # Numbers have neither shapes nor dtypes to compare, and are a tensor sooner in one go.
        return _tensor(list(values), f"samples[...]{path}")
    # Asked once for each type, because asking is slow.
    arrays = {kind for kind in kinds if issubclass(kind, _Array)}
    tensors = [_as_tensor(value, number, path, is_array=type(value) in arrays) for number, value in enumerate(values)]
    _check_alike(tensors, path, shapes=padding is None)
    return torch.stack(tensors) if padding is None else _pad(tensors, padding, path)


def _as_tensor(value: Any, number: int, path: str, *, is_array: bool) -> torch.Tensor:
    """Make one sample's value of a field a tensor, of the same memory where it has such."""
    if isinstance(value, torch.Tensor):
        return value
    if is_array:
        data = value.__array__()
        # PyTorch has no tensors that cannot be written, and warns of making one.
        return _tensor(data if data.flags.writeable else data.copy(), f"samples[{number}]{path}")
    if isinstance(value, bool | int | float | complex | list):
        return _tensor(value, f"samples[{number}]{path}")
    rule = "must be a tensor, an array, a number, or a tuple, list or dict of such"
    remedy = "Leave it out of the sample, turn it into numbers, or give a `converter` of your own."
    raise TypeError(f"`samples[{number}]{path}` {rule}, got a {type(value).__name__}. {remedy}")


def _tensor(data: Any, name: str) -> torch.Tensor:
    """Make a tensor of an array, in its memory, or of numbers."""
    try:
        return torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"`{name}` must be an array of numbers, got {data!r} ({error}).") from error


def _check_alike(tensors: Sequence[torch.Tensor], path: str, *, shapes: bool) -> None:
    """Refuse tensors that differ in dtype, in the number of dimensions or, if asked, in shape."""
    if len({(tensor.dtype, tensor.shape if shapes else tensor.dim()) for tensor in tensors}) == 1:
        return
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if tensor.dtype != first.dtype:
            raise _unlike(f"be of {first.dtype}", tensor.dtype, number, path)
        if shapes and tensor.shape != first.shape:
            raise _unlike(f"have the shape {tuple(first.shape)}", tuple(tensor.shape), number, path)
        if tensor.dim() != first.dim():
            raise _unlike(f"have {first.dim()} dimensions", tensor.dim(), number, path)


def _pad(tensors: Sequence[torch.Tensor], padding: Any, path: str) -> torch.Tensor:
    """Stack tensors of different shapes in the corner of the smallest shape that encloses all."""
    dtype = tensors[0].dtype
    if not _has(dtype, padding):
        raise ValueError(f"`padding` must be a number of {dtype} for `samples[0]{path}`, got {padding!r}.")
    shape = [max(lengths) for lengths in zip(*(tensor.shape for tensor in tensors), strict=True)]
    result = tensors[0].new_full((len(tensors), *shape), padding)
    for row, tensor in zip(result, tensors, strict=True):
        row[tuple(slice(length) for length in tensor.shape)] = tensor
    return result


def _has(dtype: torch.dtype, number: complex) -> bool:
    """Say whether a dtype has a number, or one that stands for it."""
    if isinstance(number, complex):
        return dtype.is_complex
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if dtype == torch.bool:
        return number in (0, 1)
    limits = torch.iinfo(dtype)
    return number % 1 == 0 and limits.min <= number <= limits.max
