"""Small calls of kernels, whose results show whether a machine computes portable kernels.

Each case returns outputs and gradients. Its inputs come from integers, so no random generator takes part. All cases
together take a few tenths of a second.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the usual name

POOL: Final = 1 << 17
"""How many different numbers the inputs are made of."""


@lru_cache(maxsize=1)
def _pool() -> Tensor:
    """Return numbers in [-1, 1), from integers that are mixed, as float64."""
    mixed = torch.arange(1, POOL + 1, dtype=torch.int64) * 2_654_435_769 % (1 << 32)
    mixed = (mixed ^ (mixed >> 15)) * 2_246_822_519 % (1 << 32)
    mixed ^= mixed >> 13
    return (mixed >> 8).double() / (1 << 23) - 1


class Numbers:
    """Makes the inputs of one case.

    Args:
        name: The name of the case, from which the inputs follow.
    """

    def __init__(self, name: str) -> None:
        self._next = zlib.crc32(name.encode()) % POOL

    def __call__(
        self, *shape: int, low: float = -1.0, high: float = 1.0, dtype: torch.dtype = torch.float32, grad: bool = True
    ) -> Tensor:
        """Return the next numbers, between two bounds."""
        size = prod(shape)
        pool = _pool()
        start, self._next = self._next, (self._next + size + 1) % POOL
        flat = pool[start : start + size] if start + size <= POOL else pool.roll(-start).repeat(-(-size // POOL))[:size]
        scaled = (flat + 1) * ((high - low) / 2) + low
        return scaled.to(dtype).reshape(shape).requires_grad_(grad)

    def integers(self, *shape: int, below: int) -> Tensor:
        """Return the next integers from 0 to a bound."""
        return self(*shape, low=0, high=below, dtype=torch.float64, grad=False).long()

    def definite(self, size: int) -> Tensor:
        """Return a symmetric matrix whose eigenvalues are positive."""
        square = self(size, size, grad=False)
        return ((square + square.t()) / 2 + size * torch.eye(size)).requires_grad_()


Case = Callable[[Numbers], Sequence[Tensor]]
"""A call of kernels, from the maker of its inputs to its results."""


def both(
    numbers: Numbers, function: Callable[..., Any], *inputs: Tensor, parameters: Sequence[Tensor] = ()
) -> list[Tensor]:
    """Return the outputs of a function and the gradients of its inputs."""
    outputs = function(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else [each for each in outputs if isinstance(each, Tensor)]
    leaves = [each for each in (*inputs, *parameters) if each.requires_grad]
    roots = [each for each in outputs if each.requires_grad]
    seeds = [numbers(*each.shape, dtype=each.dtype, grad=False) for each in roots]
    found = torch.autograd.grad(roots, leaves, seeds, allow_unused=True) if roots else ()
    return [each.detach() for each in (*outputs, *found) if each is not None]


def of(function: Callable[..., Any], *shapes: Sequence[int], **options: Any) -> Case:
    """Return the case of a function of tensors, with its gradients."""
    return lambda numbers: both(numbers, function, *(numbers(*shape, **options) for shape in shapes))


plain: Final = partial(of, grad=False)
"""Return the case of a function of tensors without gradients."""


def module(make: Callable[[], nn.Module], *shape: int, scale: float = 0.2, autocast: bool = False) -> Case:
    """Return the case of a module in train mode, with numbers as weights."""

    def case(numbers: Numbers) -> list[Tensor]:
        with torch.random.fork_rng(devices=[]):
            made = make()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(numbers(*parameter.shape, low=-scale, high=scale, grad=False))

        def forward(x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                found = made(x)
            return found[0] if isinstance(found, tuple) else found

        return both(numbers, forward, numbers(*shape), parameters=list(made.parameters()))

    return case


def _products() -> Iterator[tuple[str, Case]]:
    sizes = [(5, 3, 2), (33, 35, 37), (64, 64, 64), (7, 2048, 5), (1, 784, 10), (130, 70, 41), (16, 1500, 24)]
    for dtype in (torch.float32, torch.float64):
        kind = str(dtype).removeprefix("torch.")

        made = partial(of, dtype=dtype)
        for m, k, n in sizes:
            yield f"{kind} product {m}x{k}x{n}", made(torch.mm, (m, k), (k, n))
        yield f"{kind} product of transposes", made(lambda a, b: a.t() @ b.t(), (65, 70), (90, 65))
        yield f"{kind} product of slices", made(lambda a, b: a[:, 3:] @ b[::2], (70, 71), (136, 90))
        yield f"{kind} product of an expanded row", made(lambda a, b: a.expand(70, 80) @ b, (1, 80), (80, 90))
        yield f"{kind} sum of a product", made(_addmm, (40, 90), (90, 80), (80,))
        yield f"{kind} scaled product", made(partial(_addmm, beta=0.5, alpha=2), (40, 90), (90, 80), (40, 80))
        yield f"{kind} matrix and vector", made(torch.mv, (133, 301), (301,))
        yield f"{kind} dot product", made(torch.dot, (4097,), (4097,))
        yield f"{kind} outer product", made(torch.addr, (33, 37), (33,), (37,))
        for b, m, k, n in ((8, 16, 16, 16), (5, 33, 17, 29), (3, 2, 2, 2), (2, 65, 64, 66)):
            yield f"{kind} {b} products {m}x{k}x{n}", made(torch.bmm, (b, m, k), (b, k, n))
        yield f"{kind} sum of products", made(torch.baddbmm, (3, 9, 11), (3, 9, 17), (3, 17, 11))
        yield f"{kind} distances", made(torch.cdist, (40, 33), (50, 33))
    yield "linear", of(F.linear, (96, 300), (31, 300), (31,))
    yield "linear of three dimensions", of(F.linear, (5, 7, 133), (92, 133), (92,))
    yield "linear of one row", of(F.linear, (1, 500), (300, 500), (300,))
    yield "bilinear", of(F.bilinear, (9, 5), (9, 7), (4, 5, 7), (4,))
    yield "einsum", of(partial(torch.einsum, "bhqd,bhkd->bhqk"), (2, 3, 11, 8), (2, 3, 13, 8))


def _addmm(a: Tensor, b: Tensor, c: Tensor, **options: Any) -> Tensor:
    return torch.addmm(c, a, b, **options)


CONVOLUTIONS: Final[Mapping[str, tuple[Sequence[int], Sequence[int], dict[str, Any]]]] = {
    "3x3": ((2, 8, 14, 14), (16, 8, 3, 3), {"padding": 1}),
    "3x3 of stride 2": ((2, 16, 13, 13), (24, 16, 3, 3), {"padding": 1, "stride": 2}),
    "of 4 groups": ((2, 8, 9, 9), (12, 2, 3, 3), {"groups": 4}),
    "of each channel": ((2, 16, 9, 9), (16, 1, 3, 3), {"groups": 16, "padding": 1}),
    "1x1": ((2, 48, 10, 10), (40, 48, 1, 1), {}),
    "of dilation 2": ((2, 4, 15, 15), (6, 4, 3, 3), {"dilation": 2}),
    "5x3": ((3, 5, 11, 13), (7, 5, 5, 3), {"padding": 2}),
    "7x7": ((1, 3, 24, 24), (32, 3, 7, 7), {"stride": 2, "padding": 3}),
    "of 64 channels": ((1, 64, 8, 8), (64, 64, 3, 3), {"padding": 1}),
    "of 512 channels": ((1, 512, 10, 10), (4, 512, 5, 5), {"stride": 4}),
}
"""The shapes of input and kernel, and the arguments of each convolution of two dimensions."""


def convolution(function: Callable[..., Any], x: Sequence[int], weight: Sequence[int], **options: Any) -> Case:
    """Return the case of a convolution with a bias."""
    biases = weight[1] * options.get("groups", 1) if "transpose" in function.__name__ else weight[0]
    return of(lambda a, b, c: function(a, b, c, **options), x, weight, (biases,))


def _convolutions() -> Iterator[tuple[str, Case]]:
    for name, (x, weight, options) in CONVOLUTIONS.items():
        yield f"convolution {name}", convolution(F.conv2d, x, weight, **options)
    yield "convolution of the last channels", of(_of_last_channels, (2, 16, 8, 8), (32, 16, 3, 3), (32,))
    yield "convolution in float64", of(_padded, (2, 5, 8, 8), (7, 5, 3, 3), dtype=torch.float64)
    yield "convolution of one dimension", convolution(F.conv1d, (3, 8, 50), (12, 8, 5), padding=2)
    yield "convolution of three dimensions", convolution(F.conv3d, (1, 3, 6, 7, 8), (4, 3, 3, 3, 3), padding=1)
    transposed = partial(convolution, stride=2)
    yield "transposed convolution", transposed(F.conv_transpose2d, (2, 8, 6, 6), (8, 5, 4, 4), padding=1)
    grouped = partial(transposed, groups=2, output_padding=1)
    yield "transposed convolution of 2 groups", grouped(F.conv_transpose2d, (2, 8, 5, 5), (8, 3, 3, 3))
    yield "transposed convolution of one dimension", transposed(F.conv_transpose1d, (2, 8, 16), (8, 5, 4))
    cube = (1, 4, 4, 4, 4), (4, 3, 3, 3, 3)
    yield "transposed convolution of three dimensions", transposed(F.conv_transpose3d, *cube)


def _padded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1)


def _of_last_channels(x: Tensor, *others: Tensor) -> Tensor:
    return _padded(x.contiguous(memory_format=torch.channels_last), *others)


def _normalizations() -> Iterator[tuple[str, Case]]:
    for size in (32, 131):
        yield f"layer norm of {size}", of(partial(_normalize, F.layer_norm), (17, size), (size,), (size,))
    yield "rms norm", of(partial(_normalize, F.rms_norm), (17, 131), (131,))
    yield "group norm", of(lambda x, w, b: F.group_norm(x, 3, w, b), (4, 12, 5, 5), (12,), (12,))
    yield "instance norm", of(F.instance_norm, (4, 6, 9, 9))
    yield "batch norm of images", module(lambda: nn.BatchNorm2d(24), 8, 24, 7, 7)
    yield "batch norm of vectors", module(lambda: nn.BatchNorm1d(20), 33, 20)
    yield "batch norm in evaluation", module(lambda: nn.BatchNorm2d(24).eval(), 8, 24, 7, 7)
    for shape, dim in (((33, 10), -1), ((5, 1000), -1), ((9, 257), -1), ((17, 23), 0), ((4, 6, 8, 8), 1)):
        for name, function in (("softmax", F.softmax), ("log softmax", F.log_softmax)):
            yield f"{name} of {shape} over {dim}", of(partial(function, dim=dim), shape, low=-6, high=6)
    yield "cross entropy", lambda n: both(n, lambda x: F.cross_entropy(x, n.integers(64, below=10)), n(64, 10))
    smooth = partial(F.cross_entropy, label_smoothing=0.1)
    yield (
        "cross entropy with smooth labels",
        lambda n: both(n, lambda x: smooth(x, n.integers(63, below=11)), n(63, 11)),
    )


def _normalize(function: Callable[..., Tensor], x: Tensor, *others: Tensor) -> Tensor:
    return function(x, x.shape[-1:], *others)


ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    **{name: getattr(F, name) for name in ("relu", "gelu", "silu", "mish", "elu", "selu", "celu")},
    **{name: getattr(F, name) for name in ("softplus", "hardswish", "softsign", "tanhshrink")},
    "gelu by tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "leaky relu": F.leaky_relu,
    "log sigmoid": F.logsigmoid,
    "glu": partial(F.glu, dim=0),
}

FUNCTIONS: Final[Mapping[str, tuple[float, float]]] = {
    **dict.fromkeys(("exp", "sinh", "cosh", "asinh", "expm1"), (-9.0, 9.0)),
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt", "reciprocal", "lgamma", "digamma"), (0.01, 20.0)),
    **dict.fromkeys(("sin", "cos", "tan", "atan", "tanh", "erf", "erfc", "i0", "sinc"), (-4.0, 4.0)),
    **dict.fromkeys(("asin", "acos", "atanh", "erfinv"), (-0.99, 0.99)),
    "exp2": (-20.0, 20.0),
    "log1p": (-0.9, 20.0),
    "acosh": (1.01, 20.0),
    "logit": (0.01, 0.99),
}
"""The bounds of the arguments of each function."""


def _functions() -> Iterator[tuple[str, Case]]:
    for name, function in ACTIVATIONS.items():
        yield name, of(function, (20, 131), low=-6, high=6)
        yield f"{name} of few", of(function, (2, 3), low=-6, high=6)
    for name, (low, high) in FUNCTIONS.items():
        function = getattr(torch, name)
        for dtype in (torch.float32, torch.float64):
            kind = f"{str(dtype).removeprefix('torch.')} {name}"
            make = partial(plain, low=low, high=high, dtype=dtype)
            yield kind, of(function, (1099,), low=low, high=high, dtype=dtype)
            yield f"{kind} of few", make(function, (5,))
            yield f"{kind} of one", make(function, ())
            yield f"{kind} of strides", make(partial(_of_strides, function), (41, 43))


def _of_strides(function: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    return [function(x.t()[::2]), function(x.reshape(-1)[::3])]


PAIRS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "division": torch.div,
    "power": lambda a, b: torch.pow(a.abs() + 0.1, b),
    **{name: getattr(torch, name) for name in ("fmod", "remainder", "atan2", "hypot", "logaddexp")},
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.7),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b + 3, value=0.7),
    "scaled sum": lambda a, b: torch.add(a, b, alpha=0.3),
    "xlogy": lambda a, b: torch.xlogy(a, b.abs() + 0.1),
    "distance": torch.dist,
    "cosine similarity": lambda a, b: F.cosine_similarity(a.view(-1, 11), b.view(-1, 11)),
    "squared error": F.mse_loss,
    "smooth L1": F.smooth_l1_loss,
    "Huber": F.huber_loss,
    "binary cross entropy": lambda a, b: F.binary_cross_entropy_with_logits(a, (b.detach() + 1) / 2),
    "divergence": lambda a, b: F.kl_div(a, (b + 1) / 2, reduction="batchmean"),
    "Gaussian likelihood": lambda a, b: F.gaussian_nll_loss(a, b, b.detach().abs() + 0.1),
    "Poisson likelihood": lambda a, b: F.poisson_nll_loss(a, b.abs()),
}


def _pairs() -> Iterator[tuple[str, Case]]:
    for name, function in PAIRS.items():
        yield name, of(function, (1111,), (1111,))
    for power in (2, 3, 0.5, -0.5, 2.5, -1):
        yield f"power {power}", of(partial(torch.pow, exponent=power), (1099,), low=0.1, high=9)


REDUCTIONS: Final[Mapping[str, Callable[..., Tensor]]] = {
    **{name: getattr(torch, name) for name in ("sum", "mean", "logsumexp", "cumsum", "logcumsumexp")},
    "variance": torch.var,
    "deviation": torch.std,
    "product": lambda x, dim: torch.prod(x + 1.2, dim),
    "cumprod": lambda x, dim: torch.cumprod(x + 1.2, dim),
    "norm": lambda x, dim: torch.linalg.vector_norm(x, dim=dim),
    "1-norm": lambda x, dim: torch.linalg.vector_norm(x, 1, dim=dim),
    "3-norm": lambda x, dim: torch.linalg.vector_norm(x, 3, dim=dim),
}


def _reductions() -> Iterator[tuple[str, Case]]:
    for name, function in REDUCTIONS.items():
        for shape, dim in (((40, 61), 0), ((3, 5, 77), 1), ((2, 1031), 1)):
            yield f"{name} of {shape} over {dim}", of(partial(function, dim=dim), shape)
        yield f"{name} of a slice", plain(partial(_of_slice, function), (64, 99))
    for dtype in (torch.bfloat16, torch.float64):
        yield f"sum in {dtype}", plain(_sums, (40, 131), (9001,), dtype=dtype)


def _of_slice(function: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    return [function(x.t()[1:, ::2], dim=dim) for dim in (0, 1)]


def _sums(rows: Tensor, long: Tensor) -> list[Tensor]:
    return [rows.sum(0), rows.sum(1), long.sum()]


OPTIMIZERS: Final[Mapping[str, Callable[..., torch.optim.Optimizer]]] = {
    "SGD": partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4, nesterov=True),
    "Adam": partial(torch.optim.Adam, weight_decay=1e-4),
    "AdamW": partial(torch.optim.AdamW, amsgrad=True),
    **{name: getattr(torch.optim, name) for name in ("Adagrad", "RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam")},
}
HAVE_FUSED: Final = ("SGD", "Adam", "AdamW", "Adagrad")


def _optimizer(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Case:
    def case(numbers: Numbers) -> list[Tensor]:
        weights = [numbers(7, 131), numbers(33, 5), numbers(1)]
        optimizer = make(weights, lr=0.01, **options)
        for _ in range(3):
            for weight in weights:
                weight.grad = numbers(*weight.shape, grad=False)
            optimizer.step()
        state = [each for one in optimizer.state.values() for each in one.values() if isinstance(each, Tensor)]
        return [each.detach() for each in (*weights, *state)]

    return case


def _optimizers() -> Iterator[tuple[str, Case]]:
    for name, make in OPTIMIZERS.items():
        yield f"{name} one by one", _optimizer(make, foreach=False)
        yield f"{name} over lists", _optimizer(make, foreach=True)
        if name in HAVE_FUSED:
            yield f"{name} fused", _optimizer(make, fused=True)


def _networks() -> Iterator[tuple[str, Case]]:
    yield "LSTM", module(lambda: nn.LSTM(12, 24, 2, batch_first=True), 5, 9, 12)
    yield "LSTM both ways", module(lambda: nn.LSTM(12, 24, bidirectional=True, batch_first=True), 5, 9, 12)
    yield "GRU", module(lambda: nn.GRU(12, 24, batch_first=True), 5, 9, 12)
    yield "RNN", module(lambda: nn.RNN(12, 24, batch_first=True), 5, 9, 12)
    attention = F.scaled_dot_product_attention
    yield "attention", of(attention, *[(2, 4, 28, 24)] * 3)
    yield "causal attention", of(partial(attention, is_causal=True), *[(2, 3, 37, 16)] * 3)
    yield "cross attention", of(attention, (2, 3, 17, 8), *[(2, 3, 70, 8)] * 2)
    encoder = partial(nn.TransformerEncoderLayer, 32, 4, 48, 0.0, batch_first=True)
    yield "encoder", module(encoder, 5, 11, 32)
    yield "encoder with gelu", module(partial(encoder, activation="gelu"), 5, 11, 32)
    yield "encoder in evaluation", module(lambda: encoder().eval(), 5, 11, 32)
    for name, make, shape in (
        ("linear", lambda: nn.Linear(133, 71), (40, 133)),
        ("convolution", lambda: nn.Conv2d(8, 16, 3, padding=1), (2, 8, 9, 9)),
        ("LSTM", lambda: nn.LSTM(12, 24, batch_first=True), (5, 9, 12)),
        ("encoder", encoder, (5, 11, 32)),
    ):
        yield f"{name} in bfloat16", module(make, *shape, autocast=True)
    yield "products in bfloat16", of(torch.bmm, (3, 17, 33), (3, 33, 19), dtype=torch.bfloat16)
    for name, function in (("gelu", F.gelu), ("exp", torch.exp), ("softmax", lambda x: F.softmax(x, -1))):
        yield f"{name} in bfloat16", plain(function, (17, 131), dtype=torch.bfloat16)


def _decompositions() -> Iterator[tuple[str, Case]]:
    linalg = torch.linalg
    for size in (40, 129, 150):
        yield f"Cholesky of {size}", _of_definite(lambda matrix: linalg.cholesky(matrix.detach()), size)
    yield "Cholesky and its gradient", _of_definite(linalg.cholesky, 33)
    yield "QR", of(linalg.qr, (40, 20))
    yield "singular values", of(linalg.svdvals, (30, 20))
    yield "eigenvalues", _of_definite(linalg.eigvalsh, 25)
    yield "solve", _of_definite(linalg.solve, 33, (33, 5))
    yield "inverse", _of_definite(linalg.inv, 33)
    yield "determinant", _of_definite(linalg.slogdet, 20)
    yield "matrix exponential", of(linalg.matrix_exp, (10, 10))
    yield "triangular solve", _of_definite(partial(linalg.solve_triangular, upper=False), 33, (33, 5))
    yield "least squares by QR", plain(lambda a, b: linalg.lstsq(a, b, driver="gels").solution, (30, 7), (30, 2))
    for name, size in (("of 100", 100), ("of 128", 128), ("of a prime", 131)):
        yield f"Fourier transform {name}", of(partial(_as_real, torch.fft.rfft), (3, size))
    yield "Fourier transform of two dimensions", of(partial(_as_real, torch.fft.rfft2), (3, 12, 18))


def _of_definite(function: Callable[..., Any], size: int, *shapes: Sequence[int]) -> Case:
    """Return the case of a function of a symmetric matrix with positive eigenvalues, and of other tensors."""
    return lambda numbers: both(numbers, function, numbers.definite(size), *(numbers(*shape) for shape in shapes))


def _as_real(transform: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.view_as_real(transform(x))


def _images() -> Iterator[tuple[str, Case]]:
    image = (2, 3, 9, 11)
    for name, function in {
        "bilinear resize": partial(F.interpolate, scale_factor=1.7, mode="bilinear"),
        "bicubic resize": partial(F.interpolate, size=(13, 15), mode="bicubic"),
        "antialiased resize": partial(F.interpolate, size=(5, 6), mode="bilinear", antialias=True),
        "average pooling": partial(F.avg_pool2d, kernel_size=3),
        "adaptive pooling": partial(F.adaptive_avg_pool2d, output_size=(3, 4)),
        "maximum pooling": partial(F.max_pool2d, kernel_size=3),
        "power pooling": partial(F.lp_pool2d, norm_type=2.0, kernel_size=3),
        "unfold": partial(F.unfold, kernel_size=3),
        "local response": partial(F.local_response_norm, size=3),
    }.items():
        yield name, of(function, image)
    yield "grid sample", of(partial(F.grid_sample, align_corners=False), image, (2, 5, 6, 2))
    yield "embedding", lambda n: both(n, lambda w: F.embedding(n.integers(33, 7, below=50), w), n(50, 19))
    yield "embedding bag", lambda n: both(n, lambda w: F.embedding_bag(n.integers(33, 7, below=50), w), n(50, 32))
    yield "scatter", lambda n: both(n, lambda x: torch.zeros(20).scatter_add(0, n.integers(300, below=20), x), n(300))
    yield "index", lambda n: both(n, lambda x: x[n.integers(30, below=20)], n(20, 7))


GROUPS: Final = (
    *(_products, _convolutions, _normalizations, _functions, _pairs),
    *(_reductions, _optimizers, _networks, _decompositions, _images),
)
CASES: Final[Mapping[str, Case]] = {name: case for group in GROUPS for name, case in group()}
"""All cases, by the name that an error uses for them."""
