"""Modules that get their shapes from the first batch get the same values everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.gan import run
from tests.support.runs import DAILY, Placement, cross_entropy, digests, finalized, state_digest, updater_for
from tests.support.workloads import MLP, Workload


class Lazy(nn.Module):
    """Lazy layers around ones with dropout and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.first = nn.LazyLinear(7)
        self.body = nn.Sequential(nn.BatchNorm1d(7), nn.Dropout(0.3), nn.LazyLinear(6), nn.LazyBatchNorm1d())
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.body(self.first(x)))


LAZY = Workload("lazy", Lazy, (6,))
SIZES: dict[str, Any] = {"batch_size": 10, "num_samples": 40}


@DAILY
def test_devices_are_only_places_for_a_lazy_model(placements: list[Placement]) -> None:
    for optimizer in ("sgd", "adamw", "corrected"):
        found = digests(LAZY, placements, num_shards=4, optimizer=optimizer, **SIZES)
        assert len(set(found.values())) == 1, found


def test_initialisation_leaves_no_other_trace() -> None:
    """One dry forward, which draws from no generator and counts in no buffer."""
    model = LAZY.model()
    before = torch.get_rng_state()
    with finalized(updater_for(LAZY, model=model, num_shards=4, **SIZES)) as updater:
        parameters = list(model.parameters())
        updater.compute_gradients(updater.get_iterator().peek())
        assert all(own is now for own, now in zip(parameters, model.parameters(), strict=True))
        assert not any(isinstance(parameter, nn.UninitializedParameter) for parameter in parameters)
        assert torch.equal(torch.get_rng_state(), before)
        assert vars(model)["calls"] == 1
        for norm in (model.body[0], model.body[3]):
            assert norm.num_batches_tracked == 0
            assert torch.equal(norm.running_mean, torch.zeros_like(norm.running_mean))
            assert torch.equal(norm.running_var, torch.ones_like(norm.running_var))
        weights = [model.first.weight, model.body[2].weight]
        assert weights[0].std() > 0
        assert weights[0].flatten()[0] / 6**-0.5 != weights[1].flatten()[0] / 7**-0.5


def test_values_depend_on_the_seed_and_not_on_the_shards() -> None:
    def weights(**options: Any) -> torch.Tensor:
        model = LAZY.model()
        with finalized(updater_for(LAZY, model=model, **SIZES, **options)) as updater:
            updater.compute_gradients(updater.get_iterator().peek())
        return torch.cat([model.first.weight.flatten(), model.body[2].weight.flatten()])

    first = weights(num_shards=4)
    assert torch.equal(weights(num_shards=2), first)
    assert not torch.equal(weights(num_shards=4, seed=1), first)


@pytest.mark.parametrize("updates", [0, 3])
def test_a_lazy_run_resumes(updates: int) -> None:
    def build() -> ls.ParallelUpdater:
        return updater_for(LAZY, num_shards=4, **SIZES)

    first = build()
    run(first, updates)
    state = first.state_dict()
    assert (state["models"]["main"]["first.weight"] is None) == (updates == 0)
    assert ls.digest(state)
    resumed, undisturbed = build(), build()
    resumed.load_state_dict(state)
    assert run(resumed, 6) == run(undisturbed, 6)


def test_a_state_without_values_is_refused_where_there_are_some() -> None:
    lazy, begun = (updater_for(LAZY, num_shards=4, **SIZES) for _ in range(2))
    run(begun, 1)
    before = ls.digest(begun.state_dict())
    with pytest.raises(ls.StateError, match=r"must hold values for 'first\.weight' of model 'main', got none"):
        begun.load_state_dict(lazy.state_dict())
    assert ls.digest(begun.state_dict()) == before


def test_a_forward_that_fails_at_first_changes_no_bit() -> None:
    failing = True

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if failing and isinstance(model, Lazy) and vars(model)["calls"] == 0:
            vars(model)["calls"] = 1
            model.first(x)
            raise RuntimeError("sprung")
        return cross_entropy(model, x, target)

    with finalized(updater_for(LAZY, num_shards=4, **SIZES, loss_fn=loss_fn)) as updater:
        with pytest.raises(RuntimeError, match="sprung"):
            updater.update()
        failing = False
        for _ in range(5):
            updater.update()
        disturbed = state_digest(updater)
    with finalized(updater_for(LAZY, num_shards=4, **SIZES)) as updater:
        for _ in range(5):
            updater.update()
        assert state_digest(updater) == disturbed


def test_a_step_that_fails_after_the_first_values_keeps_them() -> None:
    fail_at = 0

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.compute_gradients(batch)
        updater.apply_gradients()
        if updater.iteration == fail_at:
            raise RuntimeError("sprung")

    updater = updater_for(LAZY, num_shards=4, **SIZES, step_fn=step)
    with pytest.raises(RuntimeError, match="sprung"):
        updater.update()
    fail_at = -1
    undisturbed = updater_for(LAZY, num_shards=4, **SIZES)
    run(updater, 5)
    run(undisturbed, 5)
    assert state_digest(updater) == state_digest(undisturbed)


def test_an_ordinary_model_is_not_run_itself() -> None:
    model = MLP.model()
    original = id(model)  # in a replica, a hook that refers to the model refers to the replica

    def refuse(module: nn.Module, _: Any) -> None:
        assert id(module) != original

    model.register_forward_pre_hook(refuse)
    with finalized(updater_for(MLP, model=model)) as updater:
        updater.update()
