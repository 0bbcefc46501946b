"""Compute float32 convolutions of one to three dimensions as matrix products over columns of the input.

A convolution and its two gradients are three products, in which the kernel, the output and the columns have each role
once. A transposed convolution is the gradient of a convolution by its input. Samples are taken in groups whose columns
have a bounded size, which depends on shapes only.

References: K. Chellapilla, S. Puri and P. Simard, "High Performance Convolutional Neural Networks for Document
Processing", 2006, section 3: the columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

COLUMNS: Final = 1 << 20
"""The number of elements of the columns that are made at once, unless one sample has more. It is part of the result."""

MOST_DIMENSIONS: Final = 3


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes of a convolution.

    Attributes:
        kernel: The size of the kernel in each dimension.
        stride: The distance of two outputs in the input.
        padding: The number of zeros on each side.
        dilation: The distance of two elements of the kernel in the input.
        groups: The number of groups of channels.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def columns(self, x: Tensor, outputs: Sequence[int]) -> Tensor:
        """Return what each element of the kernel meets: (groups, channels x kernel, samples x outputs)."""
        if any(self.padding):
            x = functional.pad(x, [size for size in reversed(self.padding) for _ in range(2)])
        samples, channels, *places = x.stride()
        steps = [place * each for place, each in zip(places, self.dilation, strict=True)]
        moves = [place * each for place, each in zip(places, self.stride, strict=True)]
        view = x.as_strided(
            (x.shape[1], *self.kernel, x.shape[0], *outputs), (channels, *steps, samples, *moves), x.storage_offset()
        )
        return view.reshape(self.groups, -1, x.shape[0] * prod(outputs))

    def scatter(self, columns: Tensor, inputs: Sequence[int], outputs: Sequence[int]) -> Tensor:
        """Add up columns where they came from, in the order of the kernel: (samples, channels, inputs)."""
        padded = [size + 2 * pad for size, pad in zip(inputs, self.padding, strict=True)]
        apart = columns.view(-1, *self.kernel, columns.shape[-1] // prod(outputs), *outputs)
        total = columns.new_zeros(apart.shape[0], apart.shape[1 + len(self.kernel)], *padded)
        for place in product(*map(range, self.kernel)):
            firsts = [index * step for index, step in zip(place, self.dilation, strict=True)]
            places: list[Any] = [
                slice(first, first + move * (size - 1) + 1, move)
                for first, move, size in zip(firsts, self.stride, outputs, strict=True)
            ]
            every = slice(None)
            window: tuple[Any, ...] = (every, every, *places)
            element: tuple[Any, ...] = (every, *place)
            total[window] += apart[element]
        for dim, (pad, size) in enumerate(zip(self.padding, inputs, strict=True)):
            total = total.narrow(2 + dim, pad, size)
        return total.transpose(0, 1)

    def parts(self, x: Tensor, outputs: Sequence[int]) -> Iterator[slice]:
        """Yield groups of samples whose columns are bounded."""
        size = x.shape[1] * prod(self.kernel) * prod(outputs)
        step = max(1, COLUMNS // size)
        for first in range(0, x.shape[0], step):
            yield slice(first, first + step)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Multiply each group; as a plain product if there is only one."""
    return (a[0] @ b[0]).unsqueeze(0) if a.shape[0] == 1 else torch.bmm(a, b)


def _rows(g: Tensor, groups: int) -> Tensor:
    """Arrange an output as (groups, channels of a group, samples x outputs)."""
    return g.transpose(0, 1).reshape(groups, g.shape[1] // groups, -1)


def convolve(x: Tensor, weight: Tensor, geometry: Geometry, outputs: Sequence[int]) -> Tensor:
    """Return the convolution of the input with the kernel."""
    kernel = weight.reshape(geometry.groups, weight.shape[0] // geometry.groups, -1)
    found = x.new_empty(x.shape[0], weight.shape[0], *outputs)
    for part in geometry.parts(x, outputs):
        rows = _matmul(kernel, geometry.columns(x[part], outputs))
        found[part] = rows.view(weight.shape[0], -1, *outputs).transpose(0, 1)
    return found


def input_gradient(g: Tensor, weight: Tensor, geometry: Geometry, inputs: Sequence[int]) -> Tensor:
    """Return the gradient by the input, or the transposed convolution."""
    kernel = weight.reshape(geometry.groups, weight.shape[0] // geometry.groups, -1).transpose(1, 2)
    found = g.new_empty(g.shape[0], weight.shape[1] * geometry.groups, *inputs)
    outputs = g.shape[2:]
    for part in geometry.parts(found, outputs):
        columns = _matmul(kernel, _rows(g[part], geometry.groups))
        found[part] = geometry.scatter(columns, inputs, outputs)
    return found


def weight_gradient(x: Tensor, g: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient by the kernel."""
    total: Tensor | None = None
    outputs = g.shape[2:]
    for part in geometry.parts(x, outputs):
        columns = geometry.columns(x[part], outputs)
        share = _matmul(_rows(g[part], geometry.groups), columns.transpose(1, 2))
        total = share if total is None else total.add_(share)
    return torch.zeros_like(weight) if total is None else total.view(weight.shape)


def _is_plain(*tensors: Tensor) -> bool:
    return all(
        each.dtype is torch.float32 and each.is_cpu and each.layout is torch.strided and each.numel()
        for each in tensors
    )


def _geometry(x: Tensor, weight: Tensor, sizes: Sequence[Sequence[int]], groups: int) -> Geometry | None:
    """Return the geometry; None for arguments that are refused by torch's own kernel, or left to it."""
    dims = weight.dim() - 2
    if not (_is_plain(x, weight) and x.dim() == weight.dim() and 0 < dims <= MOST_DIMENSIONS):
        return None
    if groups < 1 or weight.shape[0] % groups or any(len(each) not in {1, dims} for each in sizes):
        return None
    stride, padding, dilation = (tuple(each) if len(each) == dims else tuple(each) * dims for each in sizes)
    if min(stride) < 1 or min(padding) < 0 or min(dilation) < 1:
        return None
    return Geometry(tuple(weight.shape[2:]), stride, padding, dilation, groups)


def _outputs(x: Tensor, weight: Tensor, geometry: Geometry, more: Sequence[int] | None) -> list[int] | None:
    """Return the size of the result in each dimension; None for arguments that torch's own kernel refuses.

    Args:
        x: The input.
        weight: The kernel.
        geometry: The sizes.
        more: For a transposed convolution, what its result has more; else None.
    """
    if x.shape[1] != (weight.shape[0] if more is not None else weight.shape[1] * geometry.groups):
        return None
    spans = [step * (size - 1) + 1 for step, size in zip(geometry.dilation, geometry.kernel, strict=True)]
    sizes = zip(x.shape[2:], spans, geometry.stride, geometry.padding, strict=True)
    if more is None:
        found = [(size + 2 * pad - span) // move + 1 for size, span, move, pad in sizes]
    else:
        extra = tuple(more) if len(more) == len(spans) else tuple(more) * len(spans)
        if any(each >= max(pair) for each, *pair in zip(extra, geometry.stride, geometry.dilation, strict=True)):
            return None
        found = [(size - 1) * move - 2 * pad + span for size, span, move, pad in sizes]
        found = [size + each for size, each in zip(found, extra, strict=True)]
    return found if min(found) > 0 else None


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor | None:
    """Return the result of torch's operator of this name."""
    *sizes, transposed, output_padding, groups = options
    geometry = _geometry(x, weight, sizes, groups)
    outputs = None if geometry is None else _outputs(x, weight, geometry, output_padding if transposed else None)
    if geometry is None or outputs is None or (bias is not None and not _is_plain(bias)):
        return None
    compute = input_gradient if transposed else convolve
    found = compute(x, weight, geometry, outputs)
    if bias is not None:
        found += bias.view(-1, *(1,) * (x.dim() - 2))
    return found.contiguous(memory_format=_layout_of(x, weight))


def _layout_of(*tensors: Tensor) -> torch.memory_format:
    """Return the layout of a result, which is that of the channels last if one of the tensors has it."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensors[0].dim())
    plain = torch.contiguous_format
    if last is None:
        return plain
    is_last = any(each.is_contiguous(memory_format=last) and not each.is_contiguous() for each in tensors)
    return last if is_last else plain


def convolution_backward(g: Tensor, x: Tensor, weight: Tensor, *options: Any) -> tuple[Tensor | None, ...] | None:
    """Return the result of torch's operator of this name: the gradients by input, kernel and bias that are wanted."""
    _, *sizes, transposed, _, groups, wanted = options
    geometry = _geometry(x, weight, sizes, groups)
    if geometry is None or not _is_plain(g):
        return None
    of_input = of_weight = of_bias = None
    if wanted[0]:
        compute = convolve if transposed else input_gradient
        of_input = compute(g, weight, geometry, x.shape[2:]).contiguous(memory_format=_layout_of(x, weight))
    if wanted[1]:
        of_weight = weight_gradient(*((g, x) if transposed else (x, g)), weight, geometry)
    if wanted[2]:
        of_bias = g.sum([0, *range(2, g.dim())])
    return of_input, of_weight, of_bias
