"""Sparse tensors over ranks: laid out and added up as in one process."""

from __future__ import annotations

import torch

from lockstep import ProcessCommunicator
from lockstep.communicators import Contribution
from lockstep.tree import PartialSum, Tensors, total
from tests.support.ranks import run_on_ranks

LIKE = [torch.empty(6, 2), torch.empty(3), torch.empty(6, 2)]


def part(shard: int) -> PartialSum:
    """What a shard has: a sparse tensor with elements in parts, a dense one, and one of either kind."""
    generator = torch.Generator().manual_seed(shard)
    rows = torch.randint(0, 6, (1, 4), generator=generator)
    sparse = torch.sparse_coo_tensor(rows, torch.randn(4, 2, generator=generator), (6, 2), check_invariants=True)
    dense = torch.randn(3, generator=generator)
    mixed = torch.randn(6, 2, generator=generator) if shard == 0 else sparse.clone().coalesce()
    return PartialSum(shard, [None if shard == 2 else sparse, dense, mixed])


def add_up(communicator: ProcessCommunicator) -> tuple[Tensors, list[bool]]:
    contributions = [Contribution.of([part(2 * rank), part(2 * rank + 1)]) for rank in range(communicator.size)]
    mine = [part(2 * communicator.rank), part(2 * communicator.rank + 1)]
    summed = communicator.sum_partials(mine, contributions, LIKE)
    layouts = [tensor is not None and tensor.is_sparse for tensor in summed]
    return [tensor if tensor is None else tensor.to_dense() for tensor in summed], layouts


def test_sparse_parts_of_ranks_give_the_bits_of_one_process() -> None:
    size = 3
    expected = [tensor for tensor in total([part(shard) for shard in range(2 * size)]) if tensor is not None]
    for got, layouts in run_on_ranks(add_up, size):
        assert layouts == [tensor.is_sparse for tensor in expected]
        assert all(torch.equal(mine, one.to_dense()) for mine, one in zip(got, expected, strict=True))
