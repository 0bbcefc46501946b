"""Each input's gradient is written, added up or left out, by name and by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls

TWO = ["cpu", "cpu"]
X, Y = torch.arange(10.0).reshape(5, 2), torch.ones(5, 2)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor, y: Any) -> torch.Tensor:
        return self.scale * x * (y["more"] if isinstance(y, dict) else y)


def after_two(input_grads: Any, y: Any = Y, **options: Any) -> tuple[list[Any], torch.Tensor]:
    """Run forward and backward twice; give the gradients of inputs and of the parameter."""
    model = Pair()
    with ls.ReplicaGroup(model, TWO, input_grads=input_grads, **options) as group:
        for _ in range(2):
            group.forward((X, y))
            group.backward(torch.ones(5, 2))
        assert model.scale.grad is not None
        return group.input_grads(), model.scale.grad


@pytest.mark.parametrize("grad_mode", ["write", "add"])
def test_one_adds_and_the_other_writes_whatever_parameters_do(grad_mode: str) -> None:
    (x, y), scale = after_two({"x": "add", "y": "write"}, grad_mode=grad_mode)
    assert torch.equal(x, 2 * 2 * Y)
    assert torch.equal(y, 2 * X)
    assert scale.item() == X.sum().item() * (2 if grad_mode == "add" else 1)


def test_an_input_that_is_not_named_has_none() -> None:
    (x, y), _ = after_two({"y": "add"})
    assert x is None
    assert torch.equal(y, 2 * 2 * X)


def test_a_name_is_for_all_that_an_argument_holds() -> None:
    (x, y), _ = after_two({"x": "null", "y": "add", "y['more']": "write"}, {"more": Y})
    assert x is None
    assert torch.equal(y, 2 * X)


def test_with_nothing_but_null_there_are_none() -> None:
    with ls.ReplicaGroup(Pair(), TWO, input_grads={"x": "null"}) as group:
        group.forward((X, Y))
        group.backward(Y)
        with pytest.raises(ls.OrderError, match="require input_grads=True"):
            group.input_grads()


def test_true_is_the_word_of_the_parameters() -> None:
    for grad_mode, times in (("write", 1), ("add", 2), ({"scale": "add"}, 1)):
        (x, _), _ = after_two(True, grad_mode=grad_mode)
        assert torch.equal(x, times * 2 * Y)


def test_a_word_or_a_name_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`input_grads\['x'\]` must be 'write', 'add' or 'null', got 'sum'"):
        ls.ReplicaGroup(Pair(), TWO, input_grads={"x": "sum"})
    with (
        ls.ReplicaGroup(Pair(), TWO, input_grads={"z": "add"}) as group,
        pytest.raises(ValueError, match="`input_grads` must name some of x, y, got 'z'"),
    ):
        group.forward((X, Y))
    with pytest.raises(ValueError, match="`input_grads` must be False in a group with training=False"):
        ls.ReplicaGroup(Pair(), TWO, input_grads={"x": "add"}, training=False)
