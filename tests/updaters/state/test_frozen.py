"""Frozen parameters: a resumed run trains those that the uninterrupted run trains."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.errors import StateError
from tests.support.resuming import PatientSnapshot

FROZEN = ["0.weight", "0.bias"]


class Unfreeze(ls.Extension):
    """Unfreezes the first layer after one update, as scripts do that train the head of a network first."""

    trigger = (1, "iteration")

    def __init__(self, after: int) -> None:
        self.after = after

    def __call__(self, trainer: ls.Trainer) -> None:
        if trainer.updater.iteration == self.after:
            trainer.updater.get_all_models()["main"][0].requires_grad_(True)  # type: ignore[index]  # a Sequential


def build(out: Path, updates: int, *, frozen: bool = True, devices: int = 1, after: int = 3) -> ls.Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].requires_grad_(not frozen)
    generator = torch.Generator().manual_seed(1)
    samples = list(zip(torch.randn(40, 6, generator=generator), torch.arange(40) % 3, strict=True))
    updater = ls.ParallelUpdater(
        ls.BatchIterator(samples, 8, shuffle=True, seed=0),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model,
        devices=["cpu"] * devices,
        num_shards=4,
        loss_fn=ls.supervised(functional.cross_entropy),
    )
    trainer = ls.Trainer(updater, (updates, "iteration"), out=out, extensions=[Unfreeze(after)])
    trainer.extend(PatientSnapshot(), trigger=(2, "iteration"))
    return trainer


def weights(trainer: ls.Trainer) -> str:
    return ls.digest(trainer.updater.get_all_models()["main"])


def flags(trainer: ls.Trainer) -> list[bool]:
    return [each.requires_grad for each in trainer.updater.get_all_models()["main"].parameters()]


@pytest.mark.parametrize("devices", [1, 2])
def test_layers_that_were_unfrozen_stay_so_in_a_resumed_run(tmp_path: Path, devices: int) -> None:
    whole = build(tmp_path / "whole", 9)
    whole.run()
    build(tmp_path / "run", 4).run()
    # The script freezes the layer as it did at first, and passes its update of unfreezing no more.
    resumed = build(tmp_path / "run", 9, devices=devices)
    with pytest.warns(UserWarning, match=r"Other parameters are frozen .* saved: 0\.weight, 0\.bias\. Their `requires"):
        resumed.run(resume="auto")
    assert (weights(resumed), flags(resumed)) == (weights(whole), [True] * 4)


def test_layers_that_are_frozen_all_the_time_need_no_word(tmp_path: Path) -> None:
    whole = build(tmp_path / "whole", 6, after=99)
    whole.run()
    build(tmp_path / "run", 4, after=99).run()
    resumed = build(tmp_path / "run", 6, devices=2, after=99)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.run(resume="auto")
    assert (weights(resumed), flags(resumed)) == (weights(whole), [False, False, True, True])


def test_a_script_that_freezes_other_layers_is_refused_unless_that_is_accepted(tmp_path: Path) -> None:
    build(tmp_path, 4, frozen=False).run()
    with pytest.raises(StateError, match=r"frozen is \['0.weight', '0.bias'\] here and 'nothing' in the snapshot"):
        build(tmp_path, 6).run(resume="auto")
    resumed = build(tmp_path, 6)
    before = ls.digest(resumed.updater.get_all_models()["main"][0])  # type: ignore[index]  # a Sequential
    resumed.run(resume="auto", accept=("frozen",))
    assert flags(resumed) == [False, False, True, True]
    assert ls.digest(resumed.updater.get_all_models()["main"][0]) != before  # type: ignore[index]  # that of the snapshot


def test_the_other_way_round(tmp_path: Path) -> None:
    build(tmp_path, 4, after=99).run()
    with pytest.raises(StateError, match=r"frozen is 'nothing' here and \['0.weight', '0.bias'\] in the snapshot"):
        build(tmp_path, 6, frozen=False).run(resume="auto")
    resumed = build(tmp_path, 6, frozen=False)
    resumed.run(resume="auto", accept=("frozen",))
    assert flags(resumed) == [True] * 4


@pytest.mark.parametrize("frozen", [{"main": ["0.weights"]}, {"gen": []}])
def test_a_state_of_other_parameters_is_refused(tmp_path: Path, frozen: dict[str, list[str]]) -> None:
    updater = build(tmp_path, 1).updater
    state: dict[str, Any] = {**updater.state_dict(), "frozen": frozen}
    before = ls.digest(updater.state_dict())
    with pytest.raises(StateError, match=r"`state\['frozen'\]` must name parameters of the models \['main'\]"):
        updater.load_state_dict(state)
    assert ls.digest(updater.state_dict()) == before


def test_a_failed_load_leaves_the_flags(tmp_path: Path) -> None:
    updater = build(tmp_path, 1, frozen=False).updater
    state: dict[str, Any] = {**updater.state_dict(), "frozen": {"main": FROZEN}, "loss_scale": {}}
    with pytest.raises(StateError):
        updater.load_state_dict(state)
    assert all(each.requires_grad for each in updater.get_all_models()["main"].parameters())
