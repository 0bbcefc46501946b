"""Ranks with other code under the same names are refused, and ranks with the same code never are."""

# ruff: noqa: ARG005 - functions take what their callers give them

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from types import CodeType, MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.communicators import LocalCommunicator, MessageTable
from lockstep.errors import DisagreementError
from lockstep.updaters.ranks.consistency import BYTECODE, Code, _text, check_code, describe_code
from tests.support.programs.updates import BAD_RANK, outcome, rank
from tests.support.ranks import launch_on_ranks
from tests.support.runs import finalized


class Beside(LocalCommunicator):
    """Rank 0 of several, whose other ranks have other code."""

    def __init__(self, *others: Mapping[str, list[str]]) -> None:
        super().__init__()
        self._answers = iter([[b"another digest"], [json.dumps(each).encode() for each in others]])

    def exchange(self, payload: bytes, table: MessageTable | None = None) -> list[bytes]:  # noqa: ARG002 - only messages
        return [payload, *next(self._answers)]


def loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), target)


VARIANTS: dict[str, tuple[Any, Any]] = {
    "loss": (lambda model, x, y: loss(model, x, y) * 1, lambda model, x, y: loss(model, x, y) * 0.5),
    "converter": (
        lambda samples, device: ls.collate(samples[:], device),
        lambda samples, device: ls.collate(samples[::-1], device),
    ),
    "hook": (lambda module, given, output: output, lambda module, given, output: output * 2),
    "forward": (lambda self, x: self[0](x), lambda self, x: -self[0](x)),
    "class": (lambda self: "one", lambda self: "other"),
}
"""Pairs of functions of one name."""
NAMES = {
    "loss": "`loss_fn` <lambda>",
    "converter": "`converter` <lambda>",
    "hook": "hook of module '0' <lambda>",
    "forward": "`forward` of module '' <lambda>",
    "Sequential": "`MySequential.helper`",
    "SGD": "`MySGD.helper`",
    "TensorDataset": "`MyTensorDataset.helper`",
}
"""How the error names what differs, by what does."""


def program(different: str = "", variant: int = 0) -> ls.ParallelUpdater:
    """Build an updater of which one function, or a method of one class, is another on one rank."""

    def function(name: str) -> Any:
        return VARIANTS[name][variant if name == different else 0]

    def kind(base: type) -> Any:
        helper = VARIANTS["class"][variant if base.__name__ == different else 0]
        return type(f"My{base.__name__}", (base,), {"helper": helper})

    torch.manual_seed(0)
    model = kind(nn.Sequential)(nn.Linear(3, 2))
    model[0].register_forward_hook(function("hook"))
    model.forward = MethodType(function("forward"), model)
    optimizer = kind(torch.optim.SGD)(model.parameters(), lr=0.1)
    data = kind(TensorDataset)(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64))
    batches = ls.BatchIterator(data, 4)
    return ls.ParallelUpdater(
        batches, optimizer, model, devices=1, num_shards=2, loss_fn=function("loss"), converter=function("converter")
    )


def code_of(updater: ls.ParallelUpdater) -> Code:
    with finalized(updater):
        return describe_code(updater._engine.training, updater._engine.recipe)


def programs() -> dict[str, list[str]]:
    """Start each program on this rank, with other code on one rank."""
    found = {name: outcome(program(name, int(rank() == BAD_RANK)).update) for name in NAMES}
    return {**found, "equal": outcome(program().update), "more": outcome(with_more_on_rank_0().update)}


def with_more_on_rank_0() -> ls.ParallelUpdater:
    """Build an updater whose first rank has one more hook, and whose loss function closes over the rank."""
    own, updater = rank(), program()
    if own == 0:
        updater.get_all_models()["main"].register_forward_hook(lambda module, given, output: None)
    model = updater.get_all_models()["main"]
    return ls.ParallelUpdater(
        updater.get_iterator(),
        updater.get_optimizer("main"),
        model,
        devices=1,
        num_shards=2,
        loss_fn=functools.partial(lambda model, x, y, device: loss(model, x, y) + 0 * own, device=f"cpu:{own}"),
    )


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, list[str]]]:
    return launch_on_ranks(programs, 2)


@pytest.mark.parametrize("name", NAMES)
def test_other_code_is_refused_on_every_rank_and_named(outcomes: list[dict[str, list[str]]], name: str) -> None:
    for found in outcomes:
        kind, message, subject = found[name]
        assert (kind, subject) == ("DisagreementError", NAMES[name])
        assert message.startswith("Rank 1 must have rank 0's code, but on it")
        assert "Start every rank from the same files" in message


@pytest.mark.parametrize("name", ["equal", "more"])
def test_equal_code_is_not(outcomes: list[dict[str, list[str]]], name: str) -> None:
    assert [found[name][0] for found in outcomes] == ["nothing", "nothing"]


def test_only_names_that_both_have_are_compared() -> None:
    own = {BYTECODE: ["a"], "one": ["1"], "two": ["2", "3"]}
    check_code(Beside({**own, "three": ["4"]}), own)
    check_code(Beside({BYTECODE: ["a"]}), own)
    check_code(Beside({**own, "two": ["3"]}), own)  # one of two lambdas
    with pytest.raises(DisagreementError, match="Rank 2 must have rank 0's code, but on it one is code 5, not code 1"):
        check_code(Beside(own, {**own, "one": ["5"]}), own)


def test_other_bytecode_is_not_compared() -> None:
    own = {BYTECODE: ["a"], "one": ["1"]}
    check_code(Beside({BYTECODE: ["b"], "one": ["2"]}), own)


def body(x: int) -> Any:
    def inner() -> bool:
        return x in {"a", "b", 1.5}

    return inner


def test_the_text_of_code_has_neither_files_nor_lines_nor_the_order_of_sets() -> None:
    code = body.__code__
    moved = code.replace(co_filename="other.py", co_firstlineno=7)
    assert _text(moved) == _text(code)
    orders = frozenset([0, 8]), frozenset([8, 0])
    assert list(orders[0]) != list(orders[1])
    one, other = (code.replace(co_consts=(*code.co_consts, each)) for each in orders)
    assert _text(one) == _text(other) != _text(code)


@pytest.mark.parametrize("change", [1, 1.0, True, "a", b"a", None])
def test_a_constant_of_a_nested_function_is_code(change: Any) -> None:
    code = body.__code__
    inner = next(each for each in code.co_consts if isinstance(each, CodeType))
    changed = inner.replace(co_consts=(*inner.co_consts, change))
    consts = tuple(changed if each is inner else each for each in code.co_consts)
    assert _text(code.replace(co_consts=consts)) != _text(code)


def test_what_a_decorator_wraps_is_code() -> None:
    def wrapped(variant: int) -> Any:
        @functools.wraps(loss)
        def outer(*given: Any) -> Any:
            return inner(*given) * 1

        inner = outer.__wrapped__ = VARIANTS["loss"][variant]
        return functools.partial(outer)

    first, second = (code_of(updater_with(wrapped(each))) for each in (0, 1))
    assert first["`loss_fn` loss"] != second["`loss_fn` loss"]
    assert code_of(updater_with(wrapped(0))) == first


def updater_with(loss_fn: Any) -> ls.ParallelUpdater:
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ls.ParallelUpdater(ls.BatchIterator(data, 4), optimizer, model, devices=1, num_shards=2, loss_fn=loss_fn)


class Called:
    def __call__(self, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(model, x, y)


class Criterion(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss_fn", "name"),
    [
        (Called(), "`Called.__call__`"),
        (Called().__call__, "`loss_fn` Called.__call__"),
        (functools.partial(loss), "`loss_fn` loss"),
        (ls.supervised(Criterion()), "`Criterion.forward`"),
        (ls.supervised(functional.cross_entropy), "`criterion` of `loss_fn` cross_entropy"),
        (ls.BatchLoss(lambda model, x, y: model(x), lambda output: output.mean()), "`forward` of `loss_fn` <lambda>"),
    ],
)
def test_all_that_can_be_called_has_code(loss_fn: Any, name: str) -> None:
    assert name in code_of(updater_with(loss_fn))


def test_what_has_no_code_of_python_is_not_compared() -> None:
    found = code_of(updater_with(functools.lru_cache(loss)))
    assert not any(name.startswith("`loss_fn`") for name in found)
    made: dict[str, Any] = {"loss": loss}
    exec("def of_text(model, x, y): return loss(model, x, y)", made)  # noqa: S102 - as compilers of graphs do
    assert not any("of_text" in name for name in code_of(updater_with(made["of_text"])))
