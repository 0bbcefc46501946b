"""Laws of `DataParallel`: for any nest, dimension, workloads and devices, what one device would give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import nn

import lockstep as ls
from lockstep import nest

CLOSE = 1e-12  # relative, in float64: sums over shards are in another order


@dataclass(frozen=True)
class Call:
    """A call of a module.

    Attributes:
        samples: Of each input, along `dim`.
        dim: The dimension that counts them.
        dims: The number of dimensions of all inputs.
        tree: Containers with the number of an input at their ends.
        loads: The workload of each device.
        num_shards: Of the batch, None for one a device.
        parallel_backward: How backward runs.
    """

    samples: int
    dim: int
    dims: int
    tree: Any
    loads: list[int]
    num_shards: int | None
    parallel_backward: bool


TREES = st.recursive(
    st.just("tensor"),
    lambda parts: (
        st.lists(parts, min_size=1, max_size=3)
        | st.lists(parts, min_size=1, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), parts, min_size=1)
    ),
    max_leaves=5,
)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    dims = draw(st.integers(1, 4))
    return Call(
        samples=draw(st.integers(1, 12)),
        dim=draw(st.integers(-dims, dims - 1)),
        dims=dims,
        tree=draw(TREES),
        loads=draw(st.lists(st.integers(1, 9), min_size=1, max_size=5)),
        num_shards=draw(st.none() | st.integers(1, 6)),
        parallel_backward=draw(st.booleans()),
    )


class Everywhere(nn.Module):
    """Mix every input with all others, sample by sample, and with parameters."""

    def __init__(self, num_inputs: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, num_inputs, dtype=torch.float64))
        self.offset = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, inputs: Any, *, scale: torch.Tensor) -> Any:
        parts = nest.tensors(inputs)
        mixed = sum(part * gain for part, gain in zip(parts, self.gain, strict=True))
        return nest.map_tensors(lambda part: (part + mixed).tanh() * scale + self.offset, inputs)


class Noisy(Everywhere):
    """The same with random numbers."""

    def forward(self, inputs: Any, *, scale: torch.Tensor) -> Any:
        return nest.map_tensors(lambda each: nn.functional.dropout(each, 0.3), super().forward(inputs, scale=scale))


def inputs_of(call: Call) -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = [2] * call.dims
    shape[call.dim] = call.samples

    def build(tree: Any) -> Any:
        if isinstance(tree, dict):
            return {key: build(part) for key, part in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(map(build, tree))
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    return build(call.tree), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)


def results(module: nn.Module, call: Call) -> list[torch.Tensor]:
    """Give the outputs, and the gradients of a loss that looks at every pair of elements."""
    inputs, scale = inputs_of(call)
    outputs = nest.tensors(module(inputs, scale=scale))
    flat = torch.cat([each.flatten() for each in outputs])
    (torch.outer(flat, flat.flip(0)).sin().sum() + flat.logsumexp(0)).backward()
    gradients = [each.grad for each in [*nest.tensors(inputs), scale, *module.parameters()]]
    assert all(each is not None for each in gradients)
    return [each.detach() for each in [*outputs, *gradients]]


@given(calls())
def test_any_split_of_any_nest_gives_what_one_device_gives(call: Call) -> None:
    num_inputs = len(nest.tensors(inputs_of(call)[0]))
    expected = results(Everywhere(num_inputs), call)
    net = ls.DataParallel(
        Everywhere(num_inputs),
        ["cpu"] * len(call.loads),
        dim=call.dim,
        workloads=call.loads,
        num_shards=call.num_shards,
        parallel_backward=call.parallel_backward,
    )
    try:
        found = results(net, call)
    finally:
        net.release()
    for own, other in zip(found, expected, strict=True):
        assert own.shape == other.shape
        assert (own - other).norm() <= CLOSE * max(other.norm(), 1.0)


@given(calls(), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_with_a_number_of_shards_devices_and_workloads_change_no_bit(call: Call, num_shards: int, seed: int) -> None:
    num_inputs = len(nest.tensors(inputs_of(call)[0]))
    found = set()
    for loads in ([1], call.loads, call.loads[::-1]):
        net = ls.DataParallel(
            Noisy(num_inputs), ["cpu"] * len(loads), dim=call.dim, workloads=loads, num_shards=num_shards
        )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            try:
                found.add(ls.digest(results(net, call)))
            finally:
                net.release()
    assert len(found) == 1


def test_the_law_is_not_empty() -> None:
    """A mean of shards' gradients, which the law is to refuse, is far from what one device gives."""
    call = Call(5, 0, 2, "tensor", [1], None, parallel_backward=True)
    module = Everywhere(1)
    expected = results(module, call)[-1]
    inputs, scale = inputs_of(call)
    parts = []
    for part in (inputs[:3], inputs[3:]):
        module.zero_grad()
        flat = module(part, scale=scale).flatten()
        (torch.outer(flat, flat.flip(0)).sin().sum() + flat.logsumexp(0)).backward()
        parts.append(module.offset.grad.clone())
    assert abs((parts[0] + parts[1]) / 2 - expected) > 1e-3
