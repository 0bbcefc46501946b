"""Common mistakes of a first script: each message says what was given, the rule and the cure."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.runs import finalized


class Output(dict[str, Any]):
    """An output like those of transformers, which are dicts with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class Classifier(nn.Module):
    """A model like those of transformers, which returns a loss only if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Output:
        logits = self.layer(x)
        return Output(loss=None if labels is None else nn.functional.cross_entropy(logits, labels), logits=logits)


@dataclass
class Graph:
    """A batch of an unknown kind."""

    nodes: int = 3


X, Y = torch.ones(4, 3), torch.zeros(4, dtype=torch.long)
BOXES = ([torch.ones(3, 8, 8)] * 4, [{"boxes": torch.ones(2, 4)}] * 4)
SUPERVISED = r"Pass loss_fn=lockstep\.supervised\(criterion\), which calls the model with all entries"
WEAK: dict[str, tuple[Any, Any, Any, str]] = {
    "a model that does not take the batch": (
        nn.Linear(3, 2),
        (X, Y),
        None,
        r"Without `loss_fn` the model is called with the whole batch .* 3 were given. The batch is \(Tensor, Tensor\). "
        + SUPERVISED,
    ),
    "keywords that a model does not take": (
        nn.Linear(3, 2),
        {"x": X},
        None,
        r"Without `loss_fn` the model is called .* 'x'.* The batch is \(x=\). " + SUPERVISED,
    ),
    "outputs for a loss": (nn.Linear(3, 2), X, None, r"a tensor of one element, got shape \(4, 2\)\. " + SUPERVISED),
    "no labels": (
        Classifier(),
        {"x": X},
        None,
        r"Without `loss_fn` the model must return .* got a Output\. Its `loss` is None, .* add 'labels' to the batch",
    ),
    "the loss of no labels": (
        Classifier(),
        {"x": X},
        lambda model, **batch: model(**batch).loss,
        r"`loss_fn` must return a tensor or a lockstep\.Loss, got a NoneType\. Return the loss\.",
    ),
    "graphs": (
        nn.Linear(3, 2),
        Graph(),
        None,
        r"`batch` must hold at least one tensor, got none\. Got a batch of type Graph\. .* give the samples themselves",
    ),
    "boxes": (
        nn.Linear(3, 2),
        BOXES,
        None,
        r"`batch\[1\]\[0\]\['boxes'\]` must be as long as .* Got a batch of type tuple\. .*by a `converter`",
    ),
}


@pytest.mark.parametrize("name", WEAK)
def test_common_mistakes_are_met_with_a_cure(name: str) -> None:
    model, batch, loss_fn, message = WEAK[name]
    updater = ls.StandardUpdater([batch], torch.optim.SGD(model.parameters(), lr=0.1), model, loss_fn=loss_fn)
    with finalized(updater), pytest.raises((ls.ReplicaError, TypeError, ValueError), match=message):
        updater.update()


@pytest.mark.parametrize(
    "criterion", [nn.functional.cross_entropy, partial(nn.functional.cross_entropy, label_smoothing=0.1)]
)
def test_a_criterion_that_is_a_function_is_refused(criterion: Any) -> None:
    model = nn.Linear(3, 2)
    message = r"`loss_fn` must take the model before the batch, got a criterion, cross_entropy\. Pass lockstep\.superv"
    with pytest.raises(TypeError, match=message):
        ls.StandardUpdater([(X, Y)], torch.optim.SGD(model.parameters(), lr=0.1), model, loss_fn=criterion)


def test_a_type_error_of_the_model_itself_is_left_as_it_is() -> None:
    class Wrong(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name of the base class
            return len(input.size(0))  # type: ignore[arg-type]  # on purpose

    model = Wrong(3, 2)
    updater = ls.StandardUpdater([X], torch.optim.SGD(model.parameters(), lr=0.1), model)
    with finalized(updater), pytest.raises(ls.ReplicaError, match=r"raised TypeError on cpu .*: object of type 'int'"):
        updater.update()


def test_a_port_in_use_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        message = rf"Rank 0 must be able to listen on 127.0.0.1:{port} .*If another run uses the port, set another one"
        with pytest.raises(RuntimeError, match=message):
            ls.ProcessCommunicator()


def test_a_warning_names_the_line_of_the_program() -> None:
    model = nn.Linear(3, 2).eval()
    updater = ls.StandardUpdater(
        [(X, Y)], torch.optim.SGD(model.parameters(), lr=0.1), model, loss_fn=ls.supervised(nn.CrossEntropyLoss())
    )
    with finalized(updater), pytest.warns(UserWarning, match="The model was in evaluation mode") as found:
        updater.update()
    assert [each.filename for each in found] == [__file__]
