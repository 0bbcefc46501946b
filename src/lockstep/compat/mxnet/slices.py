"""MXNet's rule for splitting a batch by workloads, which differs from that of lockstep."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from functools import reduce
from typing import Literal

import torch


def split_input_slice(
    batch_size: int, work_load_list: Sequence[float], *, rule: Literal["python", "scala"] = "python"
) -> list[slice]:
    """Split a batch into one slice per device, as MXNet does.

    A device of workload w gets ``round(w * batch_size / sum of workloads)`` samples as long as there are some;
    the last device also gets the remaining ones. (`lockstep.plan` assigns numbers that differ from the exact
    proportions by at most one, and leaves no device without a sample if there are enough. MXNet's rule does
    neither.)

    Args:
        batch_size: The number of samples, at least 1.
        work_load_list: The relative speeds of the devices.
        rule: The rounding: "python" rounds half to even, "scala" rounds half up, in float32.

    Raises:
        ValueError: If a slice is empty, or the sum of the workloads, as the rule computes it, is 0 or not finite.

    >>> split_input_slice(8, [1, 1, 1, 1, 1, 1])[-2:]
    [slice(4, 5, None), slice(5, 8, None)]
    """
    shares = (_shares_in_float32 if rule == "scala" else _shares)(batch_size, work_load_list)
    if not shares or not all(map(math.isfinite, shares)):
        raise ValueError(
            "`work_load_list` must have a finite sum other than 0, and finite products with the batch size "
            f"({batch_size}), got {list(work_load_list)}."
        )
    # Python's `round` rounds half to even.
    lengths = [math.floor(share + 0.5) if rule == "scala" else round(share) for share in shares]
    # Rounding down on every device can leave several samples, all of which go to the last one.
    lengths[-1] += max(batch_size - sum(lengths), 0)
    slices: list[slice] = []
    begin = 0
    for length in lengths:
        end = min(begin + length, batch_size)
        if begin >= end:
            raise ValueError(
                f"`work_load_list` must leave a sample for every device of a batch of {batch_size}, got "
                f"{list(work_load_list)}, by which device {len(slices)} has none. Use fewer devices or a "
                "larger batch."
            )
        slices.append(slice(begin, end))
        begin = end
    return slices


def check_workloads(num_devices: int, work_load_list: Sequence[float] | None) -> list[float]:
    """Check that there is one workload per device, and return the workloads; None stands for equal ones.

    Raises:
        ValueError: If the number of workloads is not the number of devices.
    """
    loads = [1.0] * num_devices if work_load_list is None else list(work_load_list)
    if len(loads) != num_devices:
        raise ValueError(f"`workload` must hold one workload per device ({num_devices}), got {len(loads)}.")
    return loads


def _shares(batch_size: int, loads: Sequence[float]) -> list[float]:
    """Return the exact share of each device, which is NaN if the sum of the workloads is 0."""
    # Not by `sum`, which compensates for rounding from Python 3.12 on; MXNet's Python did not.
    total = reduce(operator.add, loads, 0)
    return [load * batch_size / total if total else math.nan for load in loads]


def _shares_in_float32(batch_size: int, loads: Sequence[float]) -> list[float]:
    """Return the exact share of each device, where each operation is in float32 as in the JVM."""
    narrow = torch.tensor(list(loads), dtype=torch.float32)
    shares: list[float] = (narrow * batch_size / reduce(torch.add, narrow.unbind(), torch.zeros(()))).tolist()
    return shares
