"""More calls of kernels: odd, large and cache-sized shapes, several layouts, bfloat16, and whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

from lockstep.portable.cases import Case, convolution, module, of
from tests.support.workloads import ATTENTION, CONVNET, MLP, WIDE

SIDES = (1, 2, 15, 64, 127, 257)
LARGE = ((8, 20_000, 16), (300, 3000, 70), (512, 700, 512), (17, 1500, 1031), (1, 4096, 1000), (900, 32, 900))


def _products() -> Iterator[tuple[str, Case]]:
    for m, k, n in (*product(SIDES, (1, 31, 300, 1025), (3, 64, 130)), *LARGE):
        yield f"product {m}x{k}x{n}", of(torch.mm, (m, k), (k, n))
    for m, k, n in product((5, 64, 200), (17, 512), (10, 96)):
        yield f"linear {m}x{k}x{n}", of(F.linear, (m, k), (n, k), (n,))
        yield f"transposes {m}x{k}x{n}", of(lambda a, b: a.t() @ b.t(), (k, m), (n, k))
        yield f"products {m}x{k}x{n}", of(torch.bmm, (3, m, k), (3, k, n))
        yield f"bfloat16 product {m}x{k}x{n}", of(torch.mm, (m, k), (k, n), dtype=torch.bfloat16)
        yield f"float64 product {m}x{k}x{n}", of(torch.mm, (m, k), (k, n), dtype=torch.float64)


def _last(function: Callable[..., Tensor], x: Tensor, *others: Tensor, **options: Any) -> Tensor:
    return function(x.contiguous(memory_format=torch.channels_last), *others, **options)


def _convolutions() -> Iterator[tuple[str, Case]]:
    for channels, outputs, kernel, stride in product((3, 16, 40), (8, 33), (1, 3, 5), (1, 2)):
        shapes = (2, channels, 13, 11), (outputs, channels, kernel, kernel), (outputs,)
        options = {"stride": stride, "padding": kernel // 2}
        name = f"{channels} to {outputs}, {kernel}x{kernel}, stride {stride}"
        yield f"convolution {name}", convolution(F.conv2d, *shapes[:2], **options)
        yield f"convolution of the last channels {name}", of(partial(_last, F.conv2d, **options), *shapes)
    for outputs, kernel, stride in ((8, 5, 4), (16, 5, 4), (8, 7, 4), (8, 7, 3), (8, 7, 2), (16, 7, 2)):
        shapes = (1, 512, 24, 24), (outputs, 512, kernel, kernel)
        yield (
            f"convolution of 512 channels to {outputs}, {kernel}, {stride}",
            convolution(F.conv2d, *shapes, stride=stride),
        )
    for groups, dilation, padding in product((1, 2, 8), (1, 2), (0, 1)):
        options = {"groups": groups, "dilation": dilation, "padding": padding}
        for dims, plain, transposed in ((1, F.conv1d, F.conv_transpose1d), (2, F.conv2d, F.conv_transpose2d)):
            size, kernel = (9,) * dims, (3,) * dims
            name = f"{dims}D, {groups} groups, dilation {dilation}, padding {padding}"
            yield f"convolution {name}", convolution(plain, (2, 8, *size), (16, 8 // groups, *kernel), **options)
            yield (
                f"transposed convolution {name}",
                convolution(transposed, (2, 8, *size), (8, 16 // groups, *kernel), stride=2, **options),
            )


def _others() -> Iterator[tuple[str, Case]]:
    for rows, size in product((3, 40), (7, 64, 131, 1000, 5000)):
        yield f"softmax {rows}x{size}", of(partial(F.softmax, dim=-1), (rows, size))
        yield (
            f"layer norm {rows}x{size}",
            of(lambda x, w, b: F.layer_norm(x, w.shape, w, b), (rows, size), (size,), (size,)),
        )
        yield f"sum {rows}x{size}", of(torch.sum, (rows, size))
        yield f"gelu {rows}x{size}", of(F.gelu, (rows, size))
        yield f"logsumexp {rows}x{size}", of(partial(torch.logsumexp, dim=1), (rows, size))
    for queries, keys, width in product((5, 64, 200), (17, 128), (8, 64)):
        shapes = (2, 2, queries, width), (2, 2, keys, width), (2, 2, keys, width)
        yield f"attention {queries}, {keys}, {width}", of(F.scaled_dot_product_attention, *shapes)
    for work in (MLP, CONVNET, ATTENTION, WIDE):
        yield f"model {work}", module(work.build, 9, *work.shape)
        yield f"model {work} in bfloat16", module(work.build, 9, *work.shape, autocast=True)
    for name, make, shape in (
        ("LSTM", partial(nn.LSTM, 64, 96, batch_first=True), (16, 12, 64)),
        ("GRU", partial(nn.GRU, 64, 96, batch_first=True), (16, 12, 64)),
        ("encoder", partial(nn.TransformerEncoderLayer, 64, 4, 128, 0.0, batch_first=True), (8, 32, 64)),
    ):
        yield f"model {name}", module(make, *shape)
        yield f"model {name} in bfloat16", module(make, *shape, autocast=True)


LARGER: Mapping[str, Case] = {name: case for group in (_products, _convolutions, _others) for name, case in group()}
