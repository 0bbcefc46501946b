"""A group against one device: random nests, dimensions, loads and devices, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import lockstep as ls
from lockstep import nest

EXACT: dict[str, float] = {"rtol": 1e-12, "atol": 1e-12}


@dataclass(frozen=True)
class Leaf:
    """A tensor of a nested input: its shape without samples, and where the samples go; None for nowhere."""

    shape: tuple[int, ...]
    dim: int | None

    def tensor(self, num_samples: int, generator: torch.Generator) -> torch.Tensor:
        shape = list(self.shape)
        if self.dim is not None:
            shape.insert(self.dim, num_samples)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    @property
    def size(self) -> int:
        return int(torch.Size(self.shape).numel())


def leaves(*, whole: bool) -> st.SearchStrategy[Leaf]:
    shapes = st.lists(st.integers(1, 3), max_size=2).map(tuple)
    dims = st.none() if whole else st.integers(0, 2)
    made = st.tuples(shapes, dims)
    return made.map(lambda pair: Leaf(pair[0], None if pair[1] is None else min(pair[1], len(pair[0]))))


def nests(leaf: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.sampled_from(["a", "b", "c"])
    return st.recursive(
        leaf,
        lambda part: (
            st.lists(part, max_size=3) | st.lists(part, max_size=3).map(tuple) | st.dictionaries(keys, part, max_size=3)
        ),
        max_leaves=4,
    )


BATCHES = st.tuples(leaves(whole=False), nests(leaves(whole=False) | leaves(whole=True)))
"""A first input that is cut, and a nest with anything in it."""

LOADS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=5)


def spread(spec: Any, make: Any) -> Any:
    """Put something in the place of each leaf."""
    if isinstance(spec, Leaf):
        return make(spec)
    if isinstance(spec, dict):
        return {key: spread(part, make) for key, part in spec.items()}
    return type(spec)(spread(part, make) for part in spec)


def named(spec: Any, name: str) -> list[tuple[str, Leaf]]:
    """List the leaves by path."""
    if isinstance(spec, Leaf):
        return [(name, spec)]
    pairs = spec.items() if isinstance(spec, dict) else enumerate(spec)
    return [found for key, part in pairs for found in named(part, f"{name}[{key!r}]")]


class Model(nn.Module):
    """Uses every input and gives a nest: samples along the first dimension, the last one, and a mean."""

    def __init__(self, found: list[tuple[str, Leaf]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leaves = [leaf for _, leaf in found]
        self.weights = nn.ParameterList(torch.randn(leaf.size, 3, dtype=torch.float64) for leaf in self.leaves)

    def forward(self, first: torch.Tensor, others: Any) -> Any:
        hidden: Any = 0.0
        for tensor, leaf, weight in zip(nest.tensors((first, others)), self.leaves, self.weights, strict=True):
            cut = tensor if leaf.dim is None else tensor.movedim(leaf.dim, 0)
            rows = cut.reshape(1 if leaf.dim is None else len(cut), -1)
            hidden = hidden + torch.tanh(rows @ weight)
        return {"rows": hidden, "others": [hidden.t().square(), (hidden.mean(),)]}


OUTPUT_DIM = {"others[0]": 1}


@given(BATCHES, LOADS, st.integers(1, 9), st.none() | st.integers(1, 7))
def test_gradients_are_those_of_one_device(
    spec: tuple[Leaf, Any], loads: list[float], num_samples: int, num_shards: int | None
) -> None:
    generator = torch.Generator().manual_seed(num_samples)
    found = named(spec[0], "first") + named(spec[1], "others")
    batch = tuple(spread(part, lambda leaf: leaf.tensor(num_samples, generator)) for part in spec)
    model, alone = Model(found), Model(found)
    grads = {
        "rows": torch.randn(num_samples, 3, generator=generator, dtype=torch.float64),
        "others": [
            torch.randn(3, num_samples, generator=generator, dtype=torch.float64),
            (torch.randn((), generator=generator, dtype=torch.float64),),
        ],
    }
    with ls.ReplicaGroup(
        model,
        ["cpu"] * len(loads),
        workloads=loads,
        batch_dim={path: leaf.dim for path, leaf in found},
        output_dim=OUTPUT_DIM,
        input_grads=True,
        num_shards=num_shards,
    ) as group:
        out = group.forward(batch)
        group.backward(grads)
        input_grads = group.input_grads()
        parts = group.gradients(merge=False)
    inputs = [tensor.clone().requires_grad_() for tensor in nest.tensors(batch)]
    rest = iter(inputs)
    wanted = alone(*nest.map_tensors(lambda _: next(rest), batch))
    torch.autograd.backward(nest.tensors(wanted), nest.tensors(grads))
    for ours, theirs in zip(nest.tensors(out), nest.tensors(wanted), strict=True):
        torch.testing.assert_close(ours, theirs.detach(), **EXACT)
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, **EXACT)
        there = [part for part in parts[name] if part is not None]
        torch.testing.assert_close(sum(there), other.grad, **EXACT)
    for ours, theirs in zip(input_grads, inputs, strict=True):
        torch.testing.assert_close(ours, theirs.grad, **EXACT)


class Noisy(nn.Module):
    """Draws and has buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(x)
        return result


def bits(loads: list[float], num_shards: int | None, num_samples: int) -> str:
    """Train a little on devices of these speeds; give all bits."""
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(num_samples, 4, generator=torch.Generator().manual_seed(5))
    group = ls.ReplicaGroup(model, ["cpu"] * len(loads), workloads=loads, num_shards=num_shards, input_grads=True)
    with group:
        torch.manual_seed(7)
        seen = []
        for _ in range(2):
            seen.append(group.forward(x))
            group.backward(torch.ones(num_samples, 2))
            seen.append(group.input_grads()[0])
            optimizer.step()
    return ls.digest(model, seen, torch.get_rng_state())


@given(LOADS, st.integers(2, 6), st.integers(12, 20))
def test_with_a_number_of_shards_devices_and_loads_do_not_matter(
    loads: list[float], num_shards: int, num_samples: int
) -> None:
    assert bits(loads, num_shards, num_samples) == bits([1.0], num_shards, num_samples)


def test_without_a_number_of_shards_they_do() -> None:
    assert bits([1.0], None, 12) != bits([1.0, 1.0], None, 12)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 2, 0]])
def test_the_order_of_the_sum_is_what_makes_the_bits_equal(order: list[int]) -> None:
    """Show that the law is not empty: the shards' gradients added in another order have other bits."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    x, grads = torch.randn(64, 64), torch.randn(64, 64)
    with ls.ReplicaGroup(model, ["cpu"] * 4) as group:
        group.forward(x)
        group.backward(grads)
        parts = group.gradients(merge=False)["weight"]
        pairs = (parts[order[0]] + parts[order[1]]) + (parts[order[2]] + parts[order[3]])
        assert torch.equal(pairs, model.weight.grad) is (order == [0, 1, 2, 3])
