"""The order of sections: every sample once, each block by one section, and any position by arithmetic."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from lockstep.data import SectionOrder

CASES = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(1, 9), min_size=1, max_size=30),
        "batch_size": st.integers(1, 12),
        "num_sections": st.integers(1, 6),
        "head": st.integers(0, 11),
        "key": st.none() | st.tuples(st.integers(-3, 3), st.integers(0, 3)),
        "in_order": st.integers(1, 4),
    }
)


def order_of(case: dict[str, Any]) -> SectionOrder:
    case = dict(case)
    lengths, in_order = case.pop("lengths"), case.pop("in_order")
    case["head"] %= case["batch_size"]
    return SectionOrder(lengths, range(0, len(lengths), in_order), **case)


@given(CASES)
def test_every_sample_comes_once_and_slices_agree(case: dict[str, Any]) -> None:
    order = order_of(case)
    whole = order[0 : len(order)]
    assert sorted(whole) == list(range(sum(case["lengths"])))
    for start in range(0, len(order), 5):
        assert order[start : start + 7] == whole[start : start + 7]
    assert order[1 : len(order) : 3] == whole[1::3]


@given(CASES)
def test_a_section_reads_its_blocks_one_after_the_other(case: dict[str, Any]) -> None:
    order = order_of(case)
    batch_size, head = case["batch_size"], case["head"] % case["batch_size"]
    block_of = np.repeat(np.arange(len(case["lengths"])), case["lengths"])
    blocks = block_of[list(order[head : len(order)])]
    batches = blocks[: len(blocks) // batch_size * batch_size].reshape(-1, batch_size)
    reads = 0
    for index in range(min(case["num_sections"], batch_size)):
        size, longer = divmod(batch_size, min(case["num_sections"], batch_size))
        first = index * size + min(index, longer)
        mine = batches[:, first : first + size + (index < longer)].ravel().tolist()
        changes = [mine[at] for at in range(len(mine)) if at == 0 or mine[at] != mine[at - 1]]
        assert len(changes) == len(set(changes)), "a block was left and entered again"
        # Blocks of one unit come in their order.
        for before, after in pairwise(changes):
            assert before // case["in_order"] != after // case["in_order"] or after == before + 1
        reads += len(changes)
    assert reads <= len(set(batches.ravel().tolist())) + case["num_sections"]


def test_one_section_without_shuffling_is_the_order_of_the_dataset() -> None:
    order = SectionOrder([4, 4, 3], [0, 1, 2], batch_size=4, num_sections=1, head=0, key=None)
    assert order[0:11] == tuple(range(11))


def test_seed_and_epoch_change_the_order_of_blocks_and_within_blocks() -> None:
    orders = {
        key: SectionOrder([50] * 20, range(20), batch_size=10, num_sections=2, head=0, key=key)[0:1000]
        for key in ((0, 0), (0, 1), (1, 0))
    }
    assert len(set(orders.values())) == 3
    for order in orders.values():
        first_block = order[0:5]
        assert len({index // 50 for index in first_block}) == 1
        assert first_block != tuple(range(first_block[0], first_block[0] + 5))
    assert len({order[0] // 50 for order in orders.values()}) > 1


@pytest.mark.parametrize("num_sections", [1, 2, 4, 8])
def test_memory_and_time_of_a_slice_do_not_depend_on_the_position(num_sections: int) -> None:
    # A billion samples: anything that is computed for each of them would not end.
    order = SectionOrder([10**6] * 1000, range(1000), batch_size=8, num_sections=num_sections, head=0, key=(0, 0))
    assert len(order[999_999_000:999_999_008]) == 8
