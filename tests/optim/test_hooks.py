"""Hooks: what each does to gradients, on whose optimizers, when, and how deterministic they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.optimizer import Optimizer

from lockstep.errors import StateError
from lockstep.optim import CorrectedMomentumSGD, MomentumSGD, hooks
from lockstep.optim.norm import CHUNK_NUMEL, global_norm, norms
from tests.support.optimizers import same_bits

ALL = [
    hooks.WeightDecay(0.1),
    hooks.Lasso(0.1),
    hooks.GradientClipping(1.0),
    hooks.GradientHardClipping(-0.5, 0.25),
    hooks.GradientNoise(0.1, seed=3),
    hooks.GradientLARS(weight_decay=0.1),
]
SHAPES = [(2, 3), (2, 0, 3), (), (CHUNK_NUMEL + 5,)]


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=dtype)) for shape in SHAPES]
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator, dtype=dtype)
    return weights


def grads(weights: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    return [weight.grad.clone() for weight in weights if weight.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("hook", ALL, ids=lambda hook: hook.name)
@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.Adam, CorrectedMomentumSGD, MomentumSGD])
def test_hook_does_the_same_on_every_optimizer(
    hook: hooks.GradientHook, cls: type[Optimizer], dtype: torch.dtype
) -> None:
    by_call, by_torch, by_add = parameters(dtype), parameters(dtype), parameters(dtype)
    before = grads(by_call)
    copy.deepcopy(hook)(cls(by_call))
    expected = grads(by_call)
    assert not same_bits(before, expected)

    seen = cls(by_torch)
    seen.register_step_pre_hook(copy.deepcopy(hook))
    seen.step()
    assert same_bits(grads(by_torch), expected)

    ours = CorrectedMomentumSGD(by_add)
    ours.add_hook(copy.deepcopy(hook))
    ours.step()
    assert same_bits(grads(by_add), expected)


@pytest.mark.parametrize("hook", ALL, ids=lambda hook: hook.name)
def test_hook_leaves_missing_gradients_and_frozen_groups_alone(hook: hooks.GradientHook) -> None:
    weights = parameters()
    weights[0].grad = None
    frozen = parameters()
    before = grads(frozen)
    optimizer = CorrectedMomentumSGD([{"params": weights}, {"params": frozen, "frozen": True}])
    optimizer.add_hook(copy.deepcopy(hook))
    optimizer.step()
    assert weights[0].grad is None
    assert same_bits(grads(frozen), before)


@pytest.mark.parametrize("hook", ALL, ids=lambda hook: hook.name)
def test_hook_without_any_gradient_does_nothing(hook: hooks.GradientHook) -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight])
    copy.deepcopy(hook)(optimizer)
    assert weight.grad is None


def test_hook_on_one_group_sees_that_group_alone() -> None:
    first, second = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])
    optimizer = CorrectedMomentumSGD([{"params": [first]}, {"params": [second]}])
    optimizer.add_hook(hooks.GradientClipping(2.5), group=1)
    optimizer.call_hooks()
    assert first.grad.tolist() == [3.0, 4.0]
    assert second.grad.tolist() == [1.5, 2.0]


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (hooks.WeightDecay(0.5), [2.0, 0.5]),
        (hooks.Lasso(0.5), [1.5, 0.5]),
        (hooks.GradientHardClipping(-0.5, 0.25), [0.25, 0.25]),
        (hooks.GradientLARS(threshold=0.0, weight_decay=0.5, eps=0.5), None),
        (hooks.GradientLARS(threshold=10.0, weight_decay=0.5), [2.0, 0.5]),
        (hooks.GradientLARS(threshold=10.0, weight_decay=0.5, clip=0.25), [1.25, -0.25]),
        # Below the threshold the coefficient takes no part either.
        (hooks.GradientLARS(threshold=10.0, weight_decay=0.5, coefficient=0.25), [2.0, 0.5]),
    ],
)
def test_values(hook: hooks.GradientHook, expected: list[float] | None) -> None:
    weight = torch.nn.Parameter(torch.tensor([2.0, -1.0]))
    weight.grad = torch.tensor([1.0, 1.0])
    hook(torch.optim.SGD([weight]))
    if expected is None:
        ratio = 5**0.5 / (0.5 + 2**0.5 + 0.5 * 5**0.5)
        # Norms are rounded on their way.
        torch.testing.assert_close(weight.grad, torch.tensor([2.0 * ratio, 0.5 * ratio]), rtol=1e-6, atol=0)
    else:
        assert weight.grad.tolist() == expected


def test_a_coefficient_that_is_a_power_of_two_scales_the_rates_exactly() -> None:
    plain, scaled = parameters(), parameters()
    hooks.GradientLARS(weight_decay=0.1)(torch.optim.SGD(plain))
    hooks.GradientLARS(weight_decay=0.1, coefficient=2.0**-10)(torch.optim.SGD(scaled))
    assert same_bits(grads(scaled), [grad * 2.0**-10 for grad in grads(plain)])


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        ([0.0, 0.0], [0.0, 0.0]),
        ([0.3, 0.4], [0.3, 0.4]),
        ([30.0, 40.0], [0.6, 0.8]),
        ([float("inf"), 1.0], [float("nan"), 0.0]),
        ([float("nan"), 1.0], [float("nan"), float("nan")]),
    ],
)
def test_clipping_by_norm(gradient: list[float], expected: list[float]) -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor(gradient)
    hooks.GradientClipping(1.0)(torch.optim.SGD([weight]))
    # The one rate for all is rounded before it is used.
    torch.testing.assert_close(weight.grad, torch.tensor(expected), rtol=2e-7, atol=0, equal_nan=True)


def test_norms_do_not_depend_on_threads_layout_or_neighbours() -> None:
    generator = torch.Generator().manual_seed(0)
    big = torch.randn(300, 500, generator=generator)
    small = [torch.randn(7, 3, generator=generator), torch.randn((), generator=generator)]
    threads = torch.get_num_threads()
    ours, plain = set(), set()
    try:
        for count in (1, 2, 3, 4, 7):
            torch.set_num_threads(count)
            ours.add((global_norm([big, *small]).item(), norms([big])[0].item()))
            ours.add((global_norm([big.t().contiguous().t(), *small]).item(), norms([*small, big])[2].item()))
            plain.add(big.sum().item())
    finally:
        torch.set_num_threads(threads)
    assert len(ours) == 1
    # Not an empty law: a plain sum of the same elements changes with the number of threads.
    assert len(plain) > 1


def test_norms_are_right() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in [(3 * CHUNK_NUMEL + 1,), (2, 0), (), (5, 5)]]
    exact = torch.cat([tensor.flatten() for tensor in tensors]).double()
    # Float32 sums of up to 49153 terms in blocks.
    torch.testing.assert_close(global_norm(tensors).double(), exact.norm(), rtol=1e-6, atol=0)
    for norm, tensor in zip(norms(tensors), tensors, strict=True):
        torch.testing.assert_close(norm.double(), tensor.double().norm(), rtol=1e-6, atol=0)


def test_many_norms_are_joined_in_pieces() -> None:
    ones = list(torch.ones(CHUNK_NUMEL + 9).unbind())
    assert global_norm(ones).item() == pytest.approx((CHUNK_NUMEL + 9) ** 0.5, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_in_half_precision_are_summed_in_float32(dtype: torch.dtype) -> None:
    norm = global_norm([torch.full((4096,), 0.1, dtype=dtype), torch.ones(1)])
    assert norm.dtype == torch.float32
    exact = (4096 * torch.tensor(0.1, dtype=dtype).double().square() + 1).sqrt()
    # 4096 equal terms in a few lanes of float32; in half precision the sum would stop at 256 times a term.
    torch.testing.assert_close(norm.double(), exact, rtol=1e-5, atol=0)


def test_noise_leaves_the_default_generator_alone_and_goes_on_from_its_state() -> None:
    before = torch.random.get_rng_state()
    straight, resumed = parameters(), parameters()
    noise = hooks.GradientNoise(0.3, seed=11)
    optimizer = torch.optim.SGD(straight)
    noise(optimizer)
    saved = noise.state_dict()
    assert saved == {"seed": 11, "t": 1}
    first = grads(straight)
    noise(optimizer)
    assert torch.equal(torch.random.get_rng_state(), before)

    other = hooks.GradientNoise(0.3, seed=0)
    other.load_state_dict(saved)
    for weight, grad in zip(resumed, first, strict=True):
        weight.grad = grad
    other(torch.optim.SGD(resumed))
    assert same_bits(grads(resumed), grads(straight))


def test_noise_fades_as_the_paper_says() -> None:
    weight = torch.nn.Parameter(torch.zeros(20000))
    noise = hooks.GradientNoise(0.3, seed=1)
    for t in range(0, 1000, 250):
        noise.t = t
        weight.grad = torch.zeros(20000)
        noise(torch.optim.SGD([weight]))
        # 20000 draws know their deviation to 0.5 %; five times that.
        assert weight.grad.std().item() == pytest.approx((0.3 / (1 + t) ** 0.55) ** 0.5, rel=0.025)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hooks.WeightDecay(-1), "`rate` must be finite and at least 0, got -1"),
        (lambda: hooks.Lasso(float("nan")), "`rate` must be finite and at least 0, got nan"),
        (lambda: hooks.GradientClipping(0), "`threshold` must be above 0, got 0"),
        (lambda: hooks.GradientHardClipping(1, -1), r"`lower` must be at most `upper` \(-1\), got 1"),
        (lambda: hooks.GradientNoise(-1), "`eta` must be finite and at least 0, got -1"),
        (lambda: hooks.GradientNoise(1, seed=2**32), r"`seed` must lie in 0..2\*\*32 - 1, got 4294967296"),
        (lambda: hooks.GradientLARS(-1), "`threshold` must be finite and at least 0, got -1"),
        (lambda: hooks.GradientLARS(weight_decay=-1), "`weight_decay` must be finite and at least 0, got -1"),
        (lambda: hooks.GradientLARS(clip=0.0), "`clip` must be above 0 or None, got 0"),
        (lambda: hooks.GradientLARS(eps=0), "`eps` must be above 0, got 0"),
        (lambda: hooks.GradientLARS(coefficient=0), "`coefficient` must be finite and above 0, got 0"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# Registration ---------------------------------------------------------------------------------


class Recorder:
    """Writes down its calls: its name, whom it was called for, the count it saw."""

    def __init__(self, name: str, log: list[Any], *, timing: str = "pre", per_parameter: bool = False) -> None:
        self.name, self.log, self.timing, self.per_parameter = name, log, timing, per_parameter

    def __call__(self, optimizer: CorrectedMomentumSGD, *parameter: torch.Tensor) -> None:
        whom = [weight.item() for weight in parameter] or sum(len(group["params"]) for group in optimizer.param_groups)
        self.log.append((self.name, whom, optimizer.t))


def test_order_and_times_of_calls() -> None:
    weights = [torch.nn.Parameter(torch.tensor(float(value))) for value in (1, 2, 3)]
    for weight in weights[:2]:
        weight.grad = torch.tensor(1.0)
    optimizer = CorrectedMomentumSGD([{"params": weights[:1]}, {"params": weights[1:]}], lr=1.0)
    log: list[Any] = []
    optimizer.add_hook(Recorder("group post", log), timing="post", group=1)
    optimizer.add_hook(Recorder("post", log, timing="post"))
    optimizer.add_hook(Recorder("group pre", log), group=1)
    optimizer.add_hook(Recorder("each", log, per_parameter=True))
    optimizer.add_hook(Recorder("each post", log, per_parameter=True), timing="post")
    optimizer.add_hook(Recorder("group each", log, per_parameter=True), group=1)
    optimizer.add_hook(lambda _: log.append("function"), name="function")
    optimizer.step()
    assert log == [
        ("each", [1.0], 0),
        ("each", [2.0], 0),
        "function",
        ("group pre", 2, 0),
        ("group each", [2.0], 0),
        ("group post", 2, 1),
        ("post", 3, 1),
        ("each post", [0.0], 1),
        ("each post", [1.0], 1),
    ]


def test_cleared_gradients_are_zeros_again_for_the_next_hook() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = CorrectedMomentumSGD([weight], missing_grad="zero")
    seen = []
    optimizer.add_hook(lambda target: target.zero_grad(), name="clear")
    optimizer.add_hook(lambda target: seen.append(target.param_groups[0]["params"][0].grad.tolist()), name="look")
    optimizer.step()
    assert seen == [[0.0, 0.0]]


def test_names_are_unique_in_their_place_and_hooks_can_be_removed() -> None:
    optimizer = CorrectedMomentumSGD([torch.nn.Parameter(torch.ones(1))])
    optimizer.add_hook(hooks.WeightDecay(0.1))
    optimizer.add_hook(hooks.WeightDecay(0.1), name="second")
    optimizer.add_hook(hooks.WeightDecay(0.1), group=0)
    with pytest.raises(KeyError, match="must be new among the hooks of the optimizer, got 'WeightDecay'"):
        optimizer.add_hook(hooks.WeightDecay(0.2), timing="post")
    optimizer.remove_hook("WeightDecay")
    with pytest.raises(KeyError, match=r"must be one of \['second'\], got 'WeightDecay'"):
        optimizer.remove_hook("WeightDecay")
    optimizer.remove_hook("WeightDecay", group=0)
    assert [entry["hook"] for entry in optimizer.state_dict()["hooks"]] == ["'second' (pre, on the optimizer)"]


class Nameless:
    timing = "soon"

    def __call__(self, optimizer: Optimizer) -> None: ...


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hook": 3}, TypeError, "`hook` must be callable, got int"),
        (
            {"hook": print, "timing": "later"},
            ValueError,
            "`timing` must be 'pre', 'post' or 'auto', got 'later'",
        ),
        ({"hook": Nameless(), "name": "x"}, ValueError, "`hook.timing` must be 'pre' or 'post', got 'soon'"),
        (
            {"hook": Nameless(), "timing": "pre"},
            ValueError,
            "`name` must be given for a hook that has neither",
        ),
        ({"hook": print, "group": 1}, ValueError, r"`group` must lie in 0..0, got 1"),
        ({"hook": print, "group": -1}, ValueError, r"`group` must lie in 0..0, got -1"),
    ],
)
def test_strange_hooks_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    optimizer = CorrectedMomentumSGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(error, match=message):
        optimizer.add_hook(**arguments)
    assert optimizer.state_dict()["hooks"] == []


def test_call_hooks_refuses_an_unknown_timing() -> None:
    optimizer = CorrectedMomentumSGD([torch.nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="`timing` must be 'pre' or 'post', got 'auto'"):
        optimizer.call_hooks("auto")


def test_saved_state_holds_the_stream_of_a_hook() -> None:
    straight, resumed = parameters(), parameters()
    optimizer, other = CorrectedMomentumSGD(straight), CorrectedMomentumSGD(resumed)
    optimizer.add_hook(hooks.GradientNoise(0.1, seed=5))
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for ours, theirs in zip(straight, resumed, strict=True):
        theirs.data.copy_(ours.data)
        theirs.grad = ours.grad.clone() if ours.grad is not None else None
    other.add_hook(hooks.GradientNoise(0.1, seed=99))
    other.load_state_dict(saved)
    optimizer.step()
    other.step()
    assert same_bits(list(straight), list(resumed))


def test_saved_state_of_a_hook_is_checked_before_anything_changes() -> None:
    optimizer = CorrectedMomentumSGD(parameters())
    optimizer.add_hook(hooks.GradientNoise(0.1, seed=5))
    optimizer.add_hook(hooks.GradientNoise(0.1, seed=6), name="second")
    saved = optimizer.state_dict()
    saved["hooks"][1]["state"] = {"seed": 6}
    optimizer.step()
    before = optimizer.state_dict()["hooks"]
    with pytest.raises(StateError, match="must hold 'seed', 't'; missing: 't'"):
        optimizer.load_state_dict(saved)
    assert optimizer.t == 1
    assert optimizer.state_dict()["hooks"] == before


def test_clipping_takes_gradients_of_several_dtypes_as_one_vector() -> None:
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
    weights = [torch.nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in dtypes]
    for weight in weights:
        weight.grad = torch.full_like(weight, 2.0)
    hooks.GradientClipping(2.0)(torch.optim.SGD(weights))
    assert [weight.grad.item() for weight in weights if weight.grad is not None] == [1.0] * 4


@pytest.mark.parametrize("hook", ALL, ids=lambda hook: hook.name)
@pytest.mark.parametrize("cls", [CorrectedMomentumSGD, MomentumSGD])
def test_nothing_is_read_from_the_device(hook: hooks.GradientHook, cls: type[CorrectedMomentumSGD]) -> None:
    # Tensors on this device have shapes and no numbers, so that whoever reads one fails.
    weight = torch.nn.Parameter(torch.ones(CHUNK_NUMEL + 3, device="meta"))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(RuntimeError, match="meta"):
        weight.grad.norm().item()
    optimizer = cls([weight])
    optimizer.add_hook(copy.deepcopy(hook))
    optimizer.step()
    assert optimizer.t == 1


def test_the_norm_of_a_sparse_gradient_is_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"must be that of dense tensors, got one of .*sparse=False"):
        hooks.GradientClipping(1.0)(torch.optim.SGD(embedding.parameters(), lr=0.1))
