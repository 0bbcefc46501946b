"""Sums of buffers that nobody reads are those that the host knows, to the bit, wherever shards ran."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import lockstep as ls
from lockstep.replicas.buffers.buffer_refs import BufferRule, BufferRules, buffer_refs
from lockstep.replicas.buffers.buffer_sums import BufferSum, combine_buffers, create_packs
from lockstep.tree import Tensors
from tests.support.reads import Reads

FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.bool)
WEIGHTS = (3, 3, 2, 2, 2)
"""Of five shards."""


def model_of() -> nn.Module:
    """Hold two buffers of each format, one of them with a NaN where it can be."""
    model = nn.Module()
    draw = torch.Generator().manual_seed(0)
    for dtype in FORMATS:
        for shape in ((3,), (), (2, 2)):
            start = torch.randn(shape, generator=draw, dtype=torch.float64).mul(4).to(dtype)
            model.register_buffer(f"{str(dtype).replace('.', '_')}_{len(shape)}", start)
    model.register_buffer("nan", torch.tensor([0.1, float("nan"), -0.0]))
    return model


def rules_of(rule: BufferRule) -> BufferRules:
    """Use a rule for all formats that have it."""
    return {"*bool*": "first", "*complex*": "mean" if rule in ("min", "max") else rule, "*": rule}


def left_by(shard: int, starts: list[torch.Tensor], changes: list[list[bool]]) -> Tensors:
    """Give what a shard leaves: other numbers, the same ones, or nothing."""
    draw = torch.Generator().manual_seed(shard + 1)
    left: Tensors = []
    for index, start in enumerate(starts):
        if not changes[shard][index % len(changes[shard])]:
            left.append(None if index % 2 else start.clone())
        else:
            step = torch.randn(start.shape, generator=draw, dtype=torch.float64)
            left.append((start + 3 * step.to(start.device)).to(start.dtype))
    return left


def combined(
    kind: str, changes: list[list[bool]], cut: int, *, rule: BufferRule, device: str = "cpu", one_nan: bool = False
) -> tuple[str, int]:
    """Sum up shards in two places, name the buffers that come of it, and count what is read.

    With one NaN, all bits that stand for a NaN are taken for the same.
    """
    model = model_of().to(device)
    slots = buffer_refs(model, rules_of(rule))
    starts = [start for slot in slots if (start := slot.get()) is not None]
    packs = create_packs(starts, [slot.rule for slot in slots], together=kind != "known")
    sums: list[BufferSum] = []
    with Reads() as reads:
        for run in (range(cut), range(cut, len(WEIGHTS))):
            place = BufferSum.empty(run.start, starts, packs)
            for shard in run:
                place.add(shard, left_by(shard, starts, changes), WEIGHTS[shard])
            sums.append(place.resolve() if kind == "read" else place)
        combine_buffers(sums, slots, weight=sum(WEIGHTS))
    for buffer in filter(torch.is_floating_point, model.buffers() if one_nan else ()):
        buffer[buffer.isnan()] = torch.nan
    return ls.digest(model), reads.count


changes = st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=5, max_size=5)


@given(changes=changes, cut=st.integers(1, 4), rule=st.sampled_from(get_args(BufferRule)))
def test_packed_or_known_or_read_they_are_the_same(changes: list[list[bool]], cut: int, rule: BufferRule) -> None:
    known, _ = combined("known", changes, cut, rule=rule)
    packed, reads = combined("packed", changes, cut, rule=rule)
    assert packed == known
    assert reads == 0
    assert combined("read", changes, cut, rule=rule) == (known, 2)  # once a place
    moved = any(any(each) for each in changes)
    assert (known != ls.digest(model_of())) == moved


@pytest.mark.parametrize("kind", ["known", "packed"])
def test_a_flag_on_the_device_leaves_them_as_they_are(kind: str) -> None:
    model = model_of()
    slots = buffer_refs(model)
    starts = [start for slot in slots if (start := slot.get()) is not None]
    packs = create_packs(starts, [slot.rule for slot in slots], together=kind == "packed")
    for flag, stays in ((1.0, True), (0.0, False)):
        place = BufferSum.empty(0, starts, packs)
        place.add(0, left_by(0, starts, [[True]]), 1)
        combine_buffers([place], slots, weight=1, found_inf=torch.tensor(flag))
        assert (ls.digest(model) == ls.digest(model_of())) == stays


@pytest.mark.gpu
def test_on_a_gpu_they_are_those_of_a_cpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    changes = [[True, False, True, True], [False] * 4, [True] * 4, [False, True, False, False], [True] * 4]
    # The result of an addition to a NaN has other bits there.
    on_cpu, _ = combined("known", changes, 2, rule="mean", one_nan=True)
    on_gpu, _ = combined("packed", changes, 2, rule="mean", device="cuda:0", one_nan=True)
    assert on_gpu == on_cpu


@pytest.mark.parametrize("resolved", [False, True], ids=["on the device", "read, as for other ranks"])
@pytest.mark.parametrize("rule", get_args(BufferRule))
def test_a_single_shard_leaves_what_it_has_left(rule: BufferRule, resolved: bool) -> None:
    model = model_of()
    refs = buffer_refs(model, rules_of(rule))
    starts = [buffer.clone() for buffer in model.buffers()]
    left = left_by(0, starts, [[True, False, True]])
    packs = create_packs(starts, [ref.rule for ref in refs], together=True)
    found = BufferSum.empty(0, starts, packs)
    found.add(0, left, 1, alone=True)
    combine_buffers([found.resolve() if resolved else found], refs, weight=1)
    expected = [start if value is None else value for value, start in zip(left, starts, strict=True)]
    assert list(map(ls.digest, map(torch.Tensor.clone, model.buffers()))) == list(map(ls.digest, expected))
