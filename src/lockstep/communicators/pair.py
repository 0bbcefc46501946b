"""The ordered sum where any order is the tree's: two ranks, each with one partial sum of the same tensors.

Addition of two numbers is commutative, so torch's own all_reduce, which adds each element once, has the bits
of the tree. Only of two NaNs it is open whose bits remain; formats of 16 bits are left out, because backends
round them in ways of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from lockstep.communicators.channel import Channel
from lockstep.communicators.communicator import Contribution
from lockstep.communicators.packing import all_reduce
from lockstep.tree import PartialSum, Tensors

PAIR: Final = 2
EXACT: Final = (torch.float32, torch.float64)
"""Formats in which every backend adds two numbers with the one rounding that IEEE 754 asks for."""


def is_pair(contributions: Sequence[Contribution], like: Sequence[torch.Tensor]) -> bool:
    """Tell whether two ranks bring one partial sum each, of the same tensors and in formats that add exactly.

    >>> one, two = Contribution((0,), (3,)), Contribution((4,), (3,))
    >>> is_pair([one, two], [torch.ones(1), torch.ones(1)]), is_pair([one], []), is_pair([one, two, two], [])
    (True, False, False)
    """
    return (
        len(contributions) == PAIR
        and all(len(each.shards) == 1 and not each.sparse for each in contributions)
        and contributions[0].present == contributions[1].present
        and all(tensor.dtype in EXACT for tensor in like)
    )


@torch.no_grad()
def sum_pair(channel: Channel, partial: PartialSum, divisor: float) -> Tensors:
    """Add up what each of two ranks has, in place, and divide it."""
    present = [tensor for tensor in partial.tensors if tensor is not None]
    all_reduce(channel, present)
    if divisor != 1.0 and present:
        torch._foreach_div_(present, divisor)
    return partial.tensors
