"""Copies of state: by value, and as many tensors as there were."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.updaters.state.checkpoint import copy_state
from tests.support.small_updater import mean_of_output, updater_of


def test_a_tied_weight_is_copied_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    with updater_of(model, torch.ones(4, 3), loss_fn=mean_of_output) as updater:
        state = updater.state_dict()["models"]["main"]
    assert state["0.weight"] is state["1.weight"]
    assert state["0.bias"] is not state["1.bias"]
    assert torch.equal(state["0.weight"], model[0].weight)
    assert state["0.weight"].data_ptr() != model[0].weight.data_ptr()


def test_what_only_begins_at_one_place_is_copied_by_itself() -> None:
    flat = torch.arange(6.0)
    views = {"all": flat, "head": flat[:3], "table": flat.view(2, 3), "turned": flat.view(3, 2).t()}
    views["again"] = flat.view(2, 3)
    copy = copy_state(views)
    assert all(torch.equal(copy[name], view) for name, view in views.items())
    assert copy["again"] is copy["table"]
    assert len({each.data_ptr() for each in copy.values()}) == len(views) - 1


def test_conjugated_and_negated_views_are_not_taken_for_what_they_are_of() -> None:
    number = torch.tensor([1 + 2j])
    negated = number.conj().imag
    copy = copy_state([number, number.conj(), number.imag, negated])
    assert copy[1].item() == 1 - 2j
    assert (copy[2].item(), copy[3].item()) == (2.0, -2.0)


def test_empty_tensors_are_each_their_own() -> None:
    first, second = copy_state([torch.empty(0), torch.empty(0)])
    assert first is not second
