"""The finiteness check finds what is not finite, and nothing else; and division rounds once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lockstep.precision import (
    HALF_PRECISION,
    first_nonfinite,
    nonfinite_flag,
    nonfinite_flags,
    resolve_conj_neg,
    unscale_,
    unscale_and_check_,
)
from lockstep.precision.finite import gradients_of

INF, NAN = float("inf"), float("nan")
CPU = torch.device("cpu")

FINITE = {
    "ordinary": torch.randn(5),
    "empty": torch.empty(0),
    "scalar": torch.tensor(1.0),
    "complex": torch.randn(3, dtype=torch.complex64),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "sparse": torch.tensor([[0.0, 1.0]]).to_sparse(),
    "half": torch.ones(4, dtype=torch.float16),
    "double": torch.full((3,), 1e300, dtype=torch.float64),
    "channels last": torch.ones(1, 2, 3, 3).to(memory_format=torch.channels_last),
    "squares overflow": torch.full((4,), 3e38),
    "sums overflow and cancel": torch.cat([torch.full((64,), 3e38), torch.full((64,), -3e38)]),
}

NONFINITE = {
    "infinity": torch.tensor([1.0, INF]),
    "NaN": torch.tensor([NAN, 1.0]),
    "complex": torch.tensor([complex(0.0, NAN)]),
    "conjugated": torch.tensor([complex(0.0, INF)]).conj(),
    "sparse": torch.tensor([[0.0, INF]]).to_sparse(),
    "infinities of both signs": torch.tensor([INF, -INF]),
    "half": torch.tensor([-INF], dtype=torch.float16),
    "last of many": torch.cat([torch.ones(100_003), torch.tensor([NAN])]),
    "a sum of sparse parts": torch.sparse_coo_tensor([[0, 0]], [3e38, 3e38], (2,), check_invariants=True),
}


def divided(tensors: list[torch.Tensor], factor: float | torch.Tensor) -> tuple[list[torch.Tensor], float]:
    ours = [resolve_conj_neg(tensor.clone()) for tensor in tensors]
    return ours, unscale_(ours, factor).item()


@pytest.mark.parametrize("name", FINITE)
def test_finite_tensors_pass(name: str) -> None:
    ours, flag = divided([FINITE[name]], 1.0)
    assert flag == 0.0
    assert nonfinite_flag(ours, CPU).item() == 0.0
    assert nonfinite_flags(ours).tolist() == [0.0]
    assert unscale_and_check_(ours, 1.0)
    assert torch.equal(ours[0].to_dense(), FINITE[name].to_dense())
    assert first_nonfinite({name: FINITE[name], "absent": None}) is None


@pytest.mark.parametrize("name", NONFINITE)
def test_others_are_found_among_finite_ones(name: str) -> None:
    tensors = {**{f"finite {key}": tensor for key, tensor in FINITE.items()}, name: NONFINITE[name]}
    ours, flag = divided(list(tensors.values()), 1.0)
    assert flag == 1.0
    assert nonfinite_flag(ours, CPU).item() == 1.0
    assert nonfinite_flags(ours).tolist() == [0.0] * len(FINITE) + [1.0]
    assert not unscale_and_check_(ours, 1.0)
    assert first_nonfinite(tensors) == name


def test_nothing_is_finite() -> None:
    assert unscale_([], 3.0).item() == 0.0
    assert unscale_and_check_([], 3.0)
    assert nonfinite_flag([], CPU).item() == 0.0
    assert first_nonfinite({"absent": None}) is None


def as_number(factor: float) -> float:
    return factor


def as_tensor(factor: float) -> torch.Tensor:
    return torch.tensor(factor, dtype=torch.float64)


@pytest.mark.parametrize("make", [as_number, as_tensor])
@pytest.mark.parametrize("factor", [2.0**-10, 0.7, 1.0, 3.0, 2.0**17, 2.0**126])
def test_division_is_rounded_once(make: Callable[[float], float | torch.Tensor], factor: float) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [
        torch.randn(1000, generator=generator, dtype=dtype)
        for dtype in (torch.float32, torch.float64, torch.complex64, torch.float16, torch.bfloat16)
    ]
    tensors.append(torch.tensor([[0.0, 5.0]]).to_sparse())
    ours, flag = divided(tensors, make(factor))
    assert flag == 0.0
    looked = [resolve_conj_neg(tensor.clone()) for tensor in tensors]
    assert unscale_and_check_(looked, make(factor))
    assert all(torch.equal(a.to_dense(), b.to_dense()) for a, b in zip(looked, ours, strict=True))
    for quotient, tensor in zip(ours[:-1], tensors[:-1], strict=True):
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        wide = real.float() if real.dtype in HALF_PRECISION else real
        # The factor is taken in the gradient's format, for halves in float32.
        exact = (wide / torch.tensor([factor], dtype=wide.dtype)).to(real.dtype)
        assert torch.equal(torch.view_as_real(quotient) if tensor.is_complex() else quotient, exact)
    assert torch.equal(ours[-1].to_dense(), torch.tensor([[0.0, 5.0]]) / factor)


@pytest.mark.parametrize("make", [as_number, as_tensor])
def test_it_is_the_quotient_that_is_checked(make: Callable[[float], float | torch.Tensor]) -> None:
    assert divided([torch.tensor([1e38])], make(2.0**-14))[1] == 1.0
    assert divided([torch.tensor([1e38])], make(2.0**14))[1] == 0.0
    assert not unscale_and_check_([torch.tensor([1e38])], make(2.0**-14))


def test_gradients_are_settled_where_they_are() -> None:
    weight = torch.nn.Parameter(torch.tensor([complex(1.0, 2.0)]))
    (weight.conj() * complex(0.0, 1.0)).real.sum().backward()
    assert weight.grad.is_conj()  # else this test shows nothing
    before = weight.grad.clone()
    (gradient,) = gradients_of([weight, torch.nn.Parameter(torch.ones(1))])
    assert gradient is weight.grad
    assert not gradient.is_conj()
    assert torch.equal(gradient, before)


@pytest.mark.gpu
@pytest.mark.parametrize("make", [as_number, as_tensor])
@pytest.mark.parametrize("number", [2.0**17, 3.0])  # more than float16 holds, and one whose inverse is rounded
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gpu_divides_as_a_cpu(
    dtype: torch.dtype, number: float, make: Callable[[float], float | torch.Tensor]
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    here, there = [torch.arange(1.0, 99.0, dtype=dtype)], [torch.arange(1.0, 99.0, dtype=dtype).cuda()]
    factor = make(number)
    unscale_(here, factor)
    unscale_(there, factor.cuda() if isinstance(factor, torch.Tensor) else factor)
    assert torch.equal(here[0], there[0].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*FINITE, *NONFINITE])
def test_a_gpu_says_the_same(name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    tensors = [tensor for family in (FINITE, NONFINITE) for key, tensor in family.items() if key == name]
    for tensor in tensors:
        here, there = resolve_conj_neg(tensor.clone()), resolve_conj_neg(tensor.cuda())
        assert nonfinite_flags([here]).tolist() == nonfinite_flags([there]).tolist()
        assert unscale_([here], 3.0).item() == unscale_([there], 3.0).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_defaults_of_the_caller_do_not_reach_the_kernels(dtype: torch.dtype) -> None:
    one, bad = FINITE["ordinary"], NONFINITE["infinity"]
    torch.set_default_dtype(dtype)
    torch.set_default_device("meta")
    try:
        flags = [divided([one.clone()], 8.0)[1], divided([bad.clone()], 3.0)[1]]
        named = first_nonfinite({"one": one, "bad": bad})
        every = nonfinite_flags([one, bad])
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert flags == [0.0, 1.0]
    assert named == "bad"
    assert every.dtype == torch.float32
    assert every.tolist() == [0.0, 1.0]
