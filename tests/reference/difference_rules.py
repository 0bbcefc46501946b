"""What ours comes to where it differs from an original by a rule, computed from what the case was given."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from chainer_rules import CHAINER_RULES
from table_rules import gradients_of_the_first_alone, output_of_the_first, weights_of_the_first

Content = Mapping[str, Any]


def fair_slices(content: Content, _path: str) -> list[Any]:
    """Give the lengths of lockstep's slices for each size of a batch."""
    return [fair_lengths(size, content["loads"]) for size in content["sizes"]]


def fair_lengths(size: int, loads: Sequence[float]) -> list[int] | str:
    """Share samples by the largest remainder, ties to the earlier; none is empty while there are enough."""
    if not loads or size < 1 or not all(0 < load < math.inf for load in loads):
        return "refused"
    whole = sum(map(Fraction, loads))
    exact = [Fraction(load) * size / whole for load in loads]
    lengths = [math.floor(share) for share in exact]
    by_remainder = sorted(range(len(loads)), key=lambda device: lengths[device] - exact[device])
    for device in by_remainder[: size - sum(lengths)]:
        lengths[device] += 1
    while 0 in lengths and size >= len(lengths):
        lengths[lengths.index(max(lengths))] -= 1
        lengths[lengths.index(0)] += 1
    return lengths


def fair_bounds(content: Content, _path: str) -> list[list[int]]:
    """Give where those of equal devices begin and end, for an edge that says how many rows there are."""
    recorded = content["result"]["slices"]
    lengths = fair_lengths(recorded[-1][1], [1] * len(recorded))
    return [[sum(map(int, lengths[:device])), sum(map(int, lengths[: device + 1]))] for device in range(len(lengths))]


def shares_of_a_whole_output(content: Content, path: str) -> list[Any]:
    """Give each device's gradient of the input that all have whole, in the network with three outputs.

    Its last output is the square of that input. Ours gives a device the gradient of this output by the
    device's share of the samples; the original gives every device all of it.
    """
    number = int(path.split(".")[1])
    forward, backward, observed = content["steps"][number - 2 : number + 1]
    shared, out_grad = _array(forward["data"][1]), _array(backward["out_grads"][2])
    slices = observed["slices"]
    return [
        (_array(theirs) - (1 - (stop - start) / slices[-1][1]) * 2 * shared * out_grad).tolist()
        for theirs, (start, stop) in zip(observed["input_grads_per_device"][1], slices, strict=True)
    ]


def sum_of_shares(content: Content, path: str) -> Any:
    """Give the sum of those over devices."""
    return torch.tensor(shares_of_a_whole_output(content, path)).sum(0).tolist()


def shapes_of_later_outputs(content: Content, _path: str) -> list[list[int]]:
    """Give the shapes of all merged outputs but the first."""
    return [shape for _, shape in content["steps"][-1]["output_shapes"][1:]]


def _array(recorded: Content) -> torch.Tensor:
    return torch.tensor(recorded["data"], dtype=torch.float64).reshape(recorded["shape"])


RULES: dict[str, Callable[[Content, str], Any]] = {
    rule.__name__: rule
    for rule in (
        fair_slices,
        fair_bounds,
        shares_of_a_whole_output,
        sum_of_shares,
        shapes_of_later_outputs,
        weights_of_the_first,
        gradients_of_the_first_alone,
        output_of_the_first,
        *CHAINER_RULES,
    )
}
"""By the name that an entry has in `rule`."""
