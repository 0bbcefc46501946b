"""Compiled steps do what the others do."""

from __future__ import annotations

import pytest
import torch

from lockstep.compat.nnabla import LAMB, SGDW
from lockstep.optim import CorrectedMomentumSGD, HookedOptimizer, MomentumSGD, hooks

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    # torch's compiler imports a module of its own that uses what torch has deprecated.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))]


def put_grads(weights: list[torch.nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


def values(weights: list[torch.nn.Parameter]) -> list[list[float]]:
    return [weight.tolist() for weight in weights]


def compiles_lerp_exactly() -> bool:
    """Return whether this torch's compiler keeps the bits of `torch._foreach_lerp_`, which LAMB calls."""

    def lerp(values: list[torch.Tensor], others: list[torch.Tensor]) -> None:
        torch._foreach_lerp_(values, others, 0.1)

    found = []
    for function in (lerp, torch.compile(lerp, backend="eager")):
        values = [torch.arange(100.0) / 7]
        function(values, [torch.arange(100.0) / -11])
        found.append(values[0])
    return torch.equal(*found)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        pytest.param(CorrectedMomentumSGD, {}, marks=pytest.mark.slow),
        pytest.param(CorrectedMomentumSGD, {"missing_grad": "zero"}, marks=pytest.mark.slow),
        pytest.param(MomentumSGD, {}, marks=pytest.mark.slow),
        pytest.param(CorrectedMomentumSGD, {"nesterov": True}, marks=pytest.mark.slow),
        (CorrectedMomentumSGD, {"dampening": 0.5, "maximize": True}),
        pytest.param(MomentumSGD, {"correction": True}, marks=pytest.mark.slow),
        pytest.param(MomentumSGD, {"nesterov": True, "maximize": True}, marks=pytest.mark.slow),
        pytest.param(MomentumSGD, {"correction": True, "dampening": 0.5}, marks=pytest.mark.slow),
        pytest.param(SGDW, {"weight_decay": 0.25}, marks=pytest.mark.slow),
        pytest.param(LAMB, {"weight_decay": 0.25}, marks=pytest.mark.slow),
        (LAMB, {"bias_correction": False, "norm_bounds": (0.5, 1.5)}),
    ],
)
def test_compiled_step_has_the_bits_of_the_eager_one(cls: type[HookedOptimizer], options: dict[str, object]) -> None:
    if cls is LAMB and not compiles_lerp_exactly():
        pytest.skip(f"torch {torch.__version__} compiles torch._foreach_lerp_ to operations that round differently")
    eager, compiled = parameters(), parameters()
    reference, optimizer = cls(eager, **options), cls(compiled, **options)
    for each in (reference, optimizer):
        each.add_hook(hooks.GradientClipping(1.0))
    # The backend that runs the captured graphs as they are: what is tested is the capture.
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(4):
        for weights, each in ((eager, reference), (compiled, optimizer)):
            each.lr = 0.1 * (number + 1)
            put_grads(weights, number)
        reference.step()
        step()
    assert values(eager) == values(compiled)
    # The compiler of torch 2.15 drops attributes that the step of an optimizer sets, in some graphs.
    assert optimizer.t == 4 or torch.__version__ >= (2, 15)


def test_compiled_fused_step_is_fused_by_the_compiler() -> None:
    eager, compiled = parameters(), parameters()
    reference, optimizer = CorrectedMomentumSGD(eager), CorrectedMomentumSGD(compiled, fused=True)
    step = torch.compile(optimizer.step, backend="eager")
    for number in range(3):
        put_grads(eager, number)
        put_grads(compiled, number)
        reference.step()
        step()
    assert values(eager) == values(compiled)


def test_changing_a_rate_in_a_tensor_compiles_nothing_anew() -> None:
    torch._dynamo.utils.counters.clear()
    weights = parameters()
    optimizer = CorrectedMomentumSGD(weights, lr=torch.tensor(1.0), momentum=0.5)
    step = torch.compile(optimizer.step, backend="eager")
    for lr in (1.0, 0.5, 0.25, 0.125):
        optimizer.param_groups[0]["lr"].fill_(lr)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    # Powers of two, so nothing is rounded: 1 - 1·1 - 0.5·1.5 - 0.25·1.75 - 0.125·1.875.
    assert weights[1].tolist() == [-1.421875, -1.421875]
