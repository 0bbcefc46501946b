"""MXNet's rule for cutting a batch by work loads, which is not lockstep's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch


def split_input_slice(
    batch_size: int, work_load_list: Sequence[float], *, rule: Literal["python", "scala"] = "python"
) -> list[slice]:
    """Cut a batch into one slice a device, as MXNet does.

    A device of load w gets ``round(w * batch_size / sum of loads)`` samples while there are some; the last
    one also gets what is left. (`lockstep.plan` gives shares that differ by one at most from the exact ones,
    and leaves no device without a sample while there are enough. MXNet's rule does neither.)

    Args:
        batch_size: At least 1.
        work_load_list: Relative speeds of the devices.
        rule: MXNet's Python rounds half to even, its Scala half up, in float32.

    Raises:
        ValueError: A slice comes out empty, or the loads have no finite sum other than 0.

    >>> split_input_slice(8, [1, 1, 1, 1, 1, 1])[-2:]
    [slice(4, 5, None), slice(5, 8, None)]
    """
    total = sum(work_load_list)
    if total == 0 or not math.isfinite(total):
        raise ValueError(f"`work_load_list` must have a finite sum other than 0, got {list(work_load_list)}.")
    shares = _half_up if rule == "scala" else _half_even
    lengths = shares(batch_size, work_load_list)
    lengths[-1] += max(batch_size - sum(lengths), 0)
    slices: list[slice] = []
    begin = 0
    for length in lengths:
        end = min(begin + length, batch_size)
        if begin >= end:
            raise ValueError(
                f"`work_load_list` must leave a sample for every device of a batch of {batch_size}, got "
                f"{list(work_load_list)}, by which device {len(slices)} has none. Give fewer devices or a "
                "larger batch."
            )
        slices.append(slice(begin, end))
        begin = end
    return slices


def loads_of(num_devices: int, work_load_list: Sequence[float] | None) -> list[float]:
    """Give one load a device, equal ones where none are given.

    Raises:
        ValueError: There is another number of loads than of devices.
    """
    loads = [1.0] * num_devices if work_load_list is None else list(work_load_list)
    if len(loads) != num_devices:
        raise ValueError(f"`workload` must hold one load a device ({num_devices}), got {len(loads)}.")
    return loads


def _half_even(batch_size: int, loads: Sequence[float]) -> list[int]:
    total = sum(loads)
    return [round(load * batch_size / total) for load in loads]


def _half_up(batch_size: int, loads: Sequence[float]) -> list[int]:
    """Round as the JVM does, after every operation in float32."""
    narrow = torch.tensor(list(loads), dtype=torch.float32)
    shares = narrow * batch_size / reduce(torch.add, narrow.unbind())
    return [math.floor(share + 0.5) for share in shares.tolist()]
