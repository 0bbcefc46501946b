"""What a table of Torch7 comes to without its defects, by what is recorded of it.

Its replicas can have other weights than the first one, where that was changed from outside; and gradients of
their own, which they were cloned with and which the next backward adds to the first one's. Ours have the
first one's weights, and no gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

Content = Mapping[str, Any]


def weights_of_the_first(content: Content, path: str) -> list[Any]:
    """Give the weights of a replica."""
    return [_plain(each) for each in _entry(content, path)["after"]["params"][0]]


def gradients_of_the_first_alone(content: Content, path: str) -> list[Any]:
    """Give the gradients of a replica: those of the first, without what others were born with; else none."""
    _, number, *_, replica = path.split(".")
    grads = [_array(each) for each in _entry(content, path)["after"]["grads"][0]]
    if int(replica) > 0:
        return [_record(torch.zeros_like(each)) for each in grads]
    surplus = [torch.zeros_like(each) for each in grads]
    before: list[Any] = []
    for entry in content["log"][: int(number) + 1]:
        if entry["op"].startswith("zero"):
            surplus = [torch.zeros_like(each) for each in surplus]
        if entry["op"] in {"backward", "accGradParameters"}:
            for others in before:
                surplus = [one + _array(other) for one, other in zip(surplus, others, strict=True)]
        before = entry["after"]["grads"][1:]
    return [_record(one - other) for one, other in zip(grads, surplus, strict=True)]


def output_of_the_first(content: Content, path: str) -> Any:
    """Give the output of a forward in which all replicas have the first one's weights."""
    entry = _entry(content, path)
    weights = [_array(each) for each in entry["after"]["params"][0]]
    layers = list(zip(weights[::2], weights[1::2], strict=True))
    if isinstance(entry["input"], list):
        first, others = entry["input"]
        outputs = [_record(_linear(each, *layer)) for each, layer in zip([first, *others], layers, strict=True)]
        return [outputs[0], outputs[1:]]
    output = entry["input"]
    for layer in layers:
        output = _record(_linear(output, *layer))
    return output


def _entry(content: Content, path: str) -> Any:
    return content["log"][int(path.split(".")[1])]


def _linear(recorded: Content, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(_array(recorded).reshape(recorded["shape"] or [0, 2]), weight, bias)


def _array(recorded: Content) -> torch.Tensor:
    return torch.tensor(recorded["data"], dtype=torch.float64).reshape(recorded["shape"] or [0])


def _plain(recorded: Content) -> dict[str, Any]:
    return {"shape": recorded["shape"], "data": recorded["data"]}


def _record(array: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(array.shape) if array.numel() else [], "data": array.flatten().tolist()}
