"""Laws of a step over shapes, dtypes, groups and missing gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from lockstep.compat.nnabla import LAMB
from lockstep.optim import CorrectedMomentumSGD, HookedOptimizer, MomentumSGD, hooks

SHAPE = st.lists(st.integers(0, 5), max_size=3).map(tuple)
DTYPE = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
TENSOR = st.tuples(SHAPE, DTYPE)
GROUP = st.fixed_dictionaries(
    {
        "tensors": st.lists(TENSOR, min_size=1, max_size=4),
        "lr": st.sampled_from([0.0, 0.1, 1.0]),
        "momentum": st.sampled_from([0.0, 0.9]),
        "missing_grad": st.sampled_from(["skip", "zero"]),
        "frozen": st.booleans(),
    }
)
GROUPS = st.lists(GROUP, min_size=1, max_size=3)
# For each step, which parameters have no gradient.
MISSING = st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=5)
CLASSES = st.sampled_from([CorrectedMomentumSGD, MomentumSGD, LAMB])


def build(cls: type[HookedOptimizer], groups: list[dict[str, Any]]) -> HookedOptimizer:
    generator = torch.Generator().manual_seed(0)
    return cls(
        [
            {
                **{key: value for key, value in group.items() if key not in {"tensors", "momentum"}},
                **of_rule(cls, group["momentum"]),
                "params": [
                    torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
                    for shape, dtype in group["tensors"]
                ],
            }
            for group in groups
        ]
    )


def of_rule(cls: type[HookedOptimizer], momentum: float) -> dict[str, Any]:
    return {"betas": (momentum, 0.5)} if cls is LAMB else {"momentum": momentum}


def weights(optimizer: HookedOptimizer) -> list[torch.nn.Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def put_grads(optimizer: HookedOptimizer, step: int, missing: set[int]) -> None:
    generator = torch.Generator().manual_seed(step)
    for index, weight in enumerate(weights(optimizer)):
        grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        weight.grad = None if index in missing else grad


def bits(optimizer: HookedOptimizer) -> list[bytes]:
    states = [optimizer.state.get(weight, {}) for weight in weights(optimizer)]
    kept = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
    tensors = [weight.detach() for weight in weights(optimizer)] + kept
    return [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]


@given(cls=CLASSES, groups=GROUPS, missing=MISSING)
def test_any_way_of_taking_parts_gives_the_same_bits(
    cls: type[HookedOptimizer], groups: list[dict[str, Any]], missing: list[set[int]]
) -> None:
    whole, parted = build(cls, groups), build(cls, groups)

    def one_by_one() -> None:
        for group in reversed(parted.param_groups):
            for weight in reversed(group["params"]):
                parted.part([{**group, "params": [weight]}]).advance()

    for step, without in enumerate(missing):
        put_grads(whole, step, without)
        put_grads(parted, step, without)
        whole.step()
        parted.step(advance=one_by_one)
    assert bits(whole) == bits(parted)
    assert whole.t == parted.t == len(missing)


@given(cls=CLASSES, groups=GROUPS, missing=MISSING, cut=st.integers(0, 5))
def test_save_and_load_in_the_middle_changes_no_bit(
    cls: type[HookedOptimizer], groups: list[dict[str, Any]], missing: list[set[int]], cut: int
) -> None:
    straight, resumed = build(cls, groups), build(cls, groups)
    for optimizer in (straight, resumed):
        optimizer.add_hook(hooks.GradientClipping(1.0))
        optimizer.add_hook(hooks.GradientNoise(0.1, seed=4))
    for step, without in enumerate(missing):
        if step == cut:
            values = [weight.detach().clone() for weight in weights(resumed)]
            saved = copy.deepcopy(resumed.state_dict())
            resumed = build(cls, groups)
            resumed.add_hook(hooks.GradientClipping(1.0))
            resumed.add_hook(hooks.GradientNoise(0.1, seed=0))
            resumed.load_state_dict(saved)
            with torch.no_grad():
                for weight, value in zip(weights(resumed), values, strict=True):
                    weight.copy_(value)
        for optimizer in (straight, resumed):
            put_grads(optimizer, step, without)
            optimizer.step()
    assert bits(straight) == bits(resumed)
    assert straight.t == resumed.t


@given(cls=CLASSES, groups=GROUPS, missing=MISSING)
def test_frozen_and_skipped_parameters_stay(
    cls: type[HookedOptimizer], groups: list[dict[str, Any]], missing: list[set[int]]
) -> None:
    optimizer = build(cls, groups)
    options = [group for group in optimizer.param_groups for _ in group["params"]]
    for step, without in enumerate(missing):
        before = bits(optimizer)
        put_grads(optimizer, step, without)
        optimizer.step()
        after = bits(optimizer)
        for index, group in enumerate(options):
            if group["frozen"] or (index in without and group["missing_grad"] == "skip"):
                assert before[index] == after[index]
    for weight, group in zip(weights(optimizer), options, strict=True):
        assert not (group["frozen"] and weight in optimizer.state)


def test_a_partial_step_is_not_the_step_of_a_stranger() -> None:
    """The laws above are not empty: parts that do not share state give other bits."""
    groups = [{"tensors": [((3,), torch.float32)], "lr": 0.1, "momentum": 0.9}]
    whole, parted = build(CorrectedMomentumSGD, groups), build(CorrectedMomentumSGD, groups)
    for step in range(2):
        put_grads(whole, step, set())
        put_grads(parted, step, set())
        whole.step()
        stranger = CorrectedMomentumSGD(parted.param_groups[0]["params"], lr=0.1)
        parted.step(advance=stranger.advance)
    assert bits(whole)[0] != bits(parted)[0]
    with pytest.raises(KeyError):
        parted.state[parted.param_groups[0]["params"][0]]["velocity"]
