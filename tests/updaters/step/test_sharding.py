"""Optimizers that ranks share out: the bits of whole ones, with a part of the state on each rank."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep import Communicator, snapshots
from lockstep.compat.nnabla import LAMB
from lockstep.plan import ALIGNMENT, Piece, slices
from lockstep.updaters.state import sharding
from lockstep.updaters.step import stepping
from tests.support.programs.sharding import (
    RUNS,
    Foreign,
    Late,
    Named,
    Nested,
    Noisy,
    Run,
    Stateless,
    Whole,
    advance,
    all_trained,
    trained,
    updater_of,
)
from tests.support.ranks import run_on_ranks
from tests.support.runs import finalized

BARE_STEP = stepping.bare_step

QUICK = ["AdamW, foreach", "SGD, fused", "AdamW, clipped", "AdamW, masters", "AdamW, more groups", "MomentumSGD"]


@pytest.mark.parametrize(
    ("size", "names", "devices"),
    [
        (2, QUICK, [2]),
        pytest.param(2, list(RUNS), [1, 2], marks=pytest.mark.slow),
        pytest.param(3, list(RUNS), [1, 2], marks=pytest.mark.slow),
    ],
)
def test_sharing_an_optimizer_out_changes_no_bit(size: int, names: list[str], devices: list[int]) -> None:
    alone = {name: trained(name) for name in names}
    for rank, found in enumerate(run_on_ranks(all_trained, size, names, devices)):
        assert [key for key, digest in found.items() if digest != alone[key[0]]] == [], f"rank {rank}"
        assert len(found) == len(names) * len(devices)


def test_each_rank_holds_its_part_and_what_is_misused_says_so() -> None:
    parts = run_on_ranks(_held, 2)
    held, whole = [part for part, _, _ in parts], parts[0][1]
    # The counts of steps, one for each piece, come on top.
    assert sum(held) == pytest.approx(whole, abs=60)
    assert max(held) < 0.8 * whole
    for _, _, messages in parts:
        for message in messages:
            assert "shard_optimizer=False" in message
        assert "directly" in messages[0]
        assert all("must not be stepped or read directly" in each for each in messages[1:-1])
        assert "got a call on rank 0 while others train" in messages[-1]


def _held(communicator: Communicator) -> tuple[int, int, list[str]]:
    run, messages = RUNS["AdamW, foreach"], []
    with finalized(updater_of(run, 1, shard=True, communicator=communicator)) as updater:
        updater.update()
        sharded = updater._training.sharded["main"]
        own = sharded.own_state() or {}
        held = sum(value.numel() for state in own.values() for value in state.values())
        state: Any = updater.state_dict()["optimizers"]["main"]
        whole = sum(value.numel() for each in state["state"].values() for value in each.values())
        optimizer = updater.get_optimizer("main")
        weight = optimizer.param_groups[0]["params"][0]
        reads = (optimizer.state.clear, lambda: weight in optimizer.state, lambda: optimizer.state.get(weight))
        for call in (optimizer.state_dict, optimizer.step, *reads, lambda: len(optimizer.state)):
            with pytest.raises(ls.errors.OrderError) as caught:
                call()
            messages.append(str(caught.value))
        with pytest.raises(ls.errors.OrderError) as caught:
            (updater.state_dict if communicator.rank == 0 else updater.update)()
        messages.append(str(caught.value))
        return held, whole, messages


@pytest.mark.parametrize("takes_turns", [False, True])
def test_a_second_updater_goes_on_with_the_state_of_the_first(takes_turns: bool) -> None:
    alone = _by_two_updaters(None, takes_turns)
    assert set(run_on_ranks(_by_two_updaters, 2, takes_turns)) == {alone}


def _by_two_updaters(communicator: Communicator | None, takes_turns: bool) -> str:
    """Train a model by two updaters with one optimizer, one after the other or in turn."""
    torch.manual_seed(7)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(2))

    def updater_for(phase: int) -> ls.ParallelUpdater:
        return ls.ParallelUpdater(
            [(x * (phase + 1),)],
            optimizer,
            model,
            devices=["cpu"],
            num_shards=2,
            loss_fn=lambda model, x: model(x).square().mean(),
            communicator=communicator,
            shard_optimizer=communicator is not None,
        )

    if takes_turns:
        with finalized(updater_for(0)) as first, finalized(updater_for(1)) as second:
            for _ in range(3):
                first.update()
                second.update()
            state = first.state_dict()["optimizers"]["main"]
    else:
        for phase in range(2):
            with finalized(updater_for(phase)) as updater:
                for _ in range(3):
                    updater.update()
                state = updater.state_dict()["optimizers"]["main"]
    return ls.digest(model, state)


def test_a_run_resumes_on_any_number_of_ranks_with_the_same_bits(tmp_path: Path) -> None:
    run = RUNS["AdamW, masters"]
    with finalized(updater_of(run, 1, shard=False)) as updater:
        advance(run, updater, 6)
        snapshots.save(updater, tmp_path / "whole")
    run_on_ranks(_continued, 3, "", str(tmp_path / "3"), 2, True)
    run_on_ranks(_continued, 2, str(tmp_path / "3"), str(tmp_path / "2"), 2, True)
    with finalized(updater_of(run, 1, shard="auto")) as updater:
        snapshots.restore(updater, tmp_path / "2")
        advance(run, updater, 2)
        snapshots.save(updater, tmp_path / "1")
    files = {path.name: path.read_bytes() for path in (tmp_path / "1").iterdir() if path.suffix != ".json"}
    assert files
    for name, content in files.items():
        assert (tmp_path / "whole" / name).read_bytes() == content, name


def _continued(communicator: Communicator, source: str, target: str, updates: int, shard: bool) -> None:
    run = RUNS["AdamW, masters"]
    with finalized(updater_of(run, 1, shard=shard, communicator=communicator)) as updater:
        if source:
            snapshots.restore(updater, source)
        advance(run, updater, updates)
        snapshots.save(updater, target)


def test_errors_of_one_rank_leave_all_ranks_as_they_were() -> None:
    alone = trained("AdamW, foreach")
    for message, digest in run_on_ranks(_interrupted, 2):
        assert "hook of rank 1" in message
        assert digest == alone


def _interrupted(communicator: Communicator) -> tuple[str, str]:
    """Raise in a hook of one rank, and go on."""
    run = RUNS["AdamW, foreach"]
    with finalized(updater_of(run, 1, shard=True, communicator=communicator)) as updater:

        def refuse(*_: Any) -> None:
            if communicator.rank == 1:
                raise RuntimeError("hook of rank 1")

        hook = updater.get_optimizer("main").register_step_pre_hook(refuse)
        with pytest.raises((RuntimeError, ls.errors.PeerError)) as caught:
            updater.update()
        hook.remove()
        return str(caught.value), advance(run, updater)


def test_several_optimizers_and_overflows_and_gradients_of_your_own() -> None:
    expected = _several(ls.LocalCommunicator(), shard=False)
    assert run_on_ranks(_several, 2) == [expected, expected]


def _several(communicator: Communicator, *, shard: bool = True) -> str:
    """Train two networks by a step function, of which one step is taken back, and one gradient overflows."""
    torch.manual_seed(0)
    models = {"first": nn.Linear(67, 130), "second": nn.Linear(130, 3)}
    optimizers = {name: torch.optim.AdamW(each.parameters(), lr=0.01) for name, each in models.items()}
    failing = [1]

    def loss(networks: dict[str, nn.Module], x: torch.Tensor) -> torch.Tensor:
        return networks["second"](networks["first"](x)).square().mean()

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        for name in optimizers:
            updater.compute_gradients(batch, loss_fn=loss, optimizer=name)
            updater.apply_gradients(name)
        if updater.iteration in failing:
            failing.clear()
            raise RuntimeError("taken back")

    generator = torch.Generator().manual_seed(1)
    updater = ls.ParallelUpdater(
        ls.BatchIterator(torch.randn(24, 67, generator=generator), 8, seed=2),
        optimizers,
        models,
        devices=1,
        num_shards=4,
        step_fn=step,
        communicator=communicator,
        shard_optimizer=shard,
    )
    with finalized(updater):
        updater.update()
        with pytest.raises((RuntimeError, ls.errors.PeerError)):
            updater.update()
        for _ in range(3):
            updater.update()
        return ls.digest(updater.state_dict())


def test_unknown_optimizers_are_compared_with_whole_steps_first() -> None:
    expected = [_foreign_digest(ls.LocalCommunicator(), kind, shard=False) for kind in (Foreign, Stateless)]
    for digests, refused in run_on_ranks(_foreign, 2):
        assert digests == expected
        assert "state that belongs to no parameter, got 'total'" in refused[-1]
        assert all("must be False for" in message and "Nothing has changed" in message for message in refused)


def _foreign_digest(communicator: Communicator, kind: type[Foreign], *, shard: Any) -> str:
    # It counts in an attribute, which is not saved.
    warnings.filterwarnings("ignore", "The saved state lacks")
    run = Run(lambda groups: kind(groups, lr=0.01))
    with finalized(updater_of(run, 1, shard=shard, communicator=communicator)) as updater:
        return advance(run, updater)


def _foreign(communicator: Communicator) -> tuple[list[str], list[str]]:
    refused = []
    warnings.filterwarnings("ignore", "The saved state lacks")
    for kind in (Whole, Noisy, Named):
        run = Run(lambda groups, kind=kind: kind(groups, lr=0.01))  # type: ignore[misc]
        with finalized(updater_of(run, 1, shard=True, communicator=communicator)) as updater:
            before = ls.digest(updater.state_dict())
            with pytest.raises(ValueError, match="shard_optimizer") as caught:
                updater.update()
            assert ls.digest(updater.state_dict()) == before
            refused.append(str(caught.value))
    return [_foreign_digest(communicator, kind, shard=True) for kind in (Foreign, Stateless)], refused


def _refused_after(communicator: Communicator, updates: int) -> None:
    """Check that the step of an optimizer is refused after a number of updates, and taken back."""
    warnings.filterwarnings("ignore", "The saved state lacks")
    run = Run(lambda groups: Late(groups, lr=0.01), {"audit_every": 0})
    with finalized(updater_of(run, 1, shard=True, communicator=communicator)) as updater:
        for _ in range(updates):
            updater.update()
        before = ls.digest(updater.state_dict())
        with pytest.raises(ValueError, match="must be False for Late"):
            updater.update()
        assert ls.digest(updater.state_dict()) == before


def test_unknown_optimizers_are_compared_again_when_a_warm_up_may_have_ended() -> None:
    run_on_ranks(_refused_after, 2, 8)


def refused_optimizers() -> dict[str, tuple[Any, str]]:
    return {
        "LBFGS": (lambda groups: torch.optim.LBFGS(groups[0]["params"]), "looks at whole parameters"),
        "Adafactor": (torch.optim.Adafactor, "looks at whole parameters"),
        "SparseAdam": (torch.optim.SparseAdam, "looks at whole parameters"),
        "LAMB": (lambda groups: LAMB(groups, lr=0.1), "looks at whole parameters"),
        "Nested": (lambda groups: Nested(groups, lr=0.1), "holds another optimizer"),
        "tensor option": (
            lambda groups: torch.optim.SGD([{**each, "mask": torch.ones(2)} for each in groups], lr=0.1),
            "a tensor of shape .* as its option 'mask'",
        ),
    }


@pytest.mark.parametrize("name", refused_optimizers())
def test_optimizers_that_cannot_be_shared_out_are_refused_by_name(name: str) -> None:
    make, reason = refused_optimizers()[name]
    with pytest.raises(ValueError, match=f"`shard_optimizer` must be False or 'auto' for the .* {reason}"):
        updater_of(Run(make), 1, shard=True)
    with finalized(updater_of(Run(make), 1, shard="auto")) as updater:
        assert not updater.shares_state


def test_sparse_gradients_and_wrong_choices_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(8, 3, sparse=True))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = ls.BatchIterator(torch.zeros(4, dtype=torch.long), 2)
    with pytest.raises(ValueError, match="sparse gradients of '0'"):
        ls.ParallelUpdater(batches, sgd, model, devices=1, num_shards=2, shard_optimizer=True)
    with pytest.raises(ValueError, match="must be True, False or 'auto', got 'yes'"):
        ls.ParallelUpdater(batches, sgd, model, devices=1, num_shards=2, shard_optimizer="yes")  # type: ignore[arg-type]


def test_large_models_are_shared_out_by_default_and_the_log_says_so_once() -> None:
    (small, none), (large, lines) = run_on_ranks(_automatic, 2)[0]
    assert (small, none) == (False, [])
    assert large
    assert len(lines) == 1
    assert "`shard_optimizer=False` keeps all of it" in lines[0]


def _automatic(communicator: Communicator) -> list[tuple[bool, list[str]]]:
    found, lines = [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("lockstep")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for size in (100, 8_000_000):
        model = nn.Linear(size, 1, bias=False)
        adam = torch.optim.Adam(model.parameters())
        batches = ls.BatchIterator(torch.zeros(4, 1), 2)
        updater = ls.ParallelUpdater(batches, adam, model, devices=1, num_shards=2, communicator=communicator)
        found.append((updater.shares_state, [line for line in lines if "shard_optimizer" in line]))
        updater.finalize()
    log.removeHandler(handler)
    log.setLevel(before)
    return found


def test_the_law_bites_each_way_to_break_it_is_caught() -> None:
    with finalized(updater_of(RUNS["AdamW, foreach"], 1, shard=False)) as updater:
        updater.update()
        updater.update()
        alone = ls.digest(updater.get_all_models()["main"])
    for found in run_on_ranks(_mutated, 2):
        assert sorted(found) == ["a block without an owner", "a step taken twice", "weights that are not gathered"]
        assert alone not in found.values()


def _mutated(communicator: Communicator) -> dict[str, str]:
    """Break how an optimizer is shared out."""
    mutants: dict[str, tuple[object, str, Any]] = {
        "a block without an owner": (sharding, "slices", _without_last_block),
        "a step taken twice": (stepping, "bare_step", _twice),
        "weights that are not gathered": (communicator, "gather_owned", lambda _: None),
    }
    found = {}
    for name, (owner, attribute, replacement) in mutants.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, attribute, replacement)
            updater = updater_of(RUNS["AdamW, foreach"], 1, shard=True, communicator=communicator)
            with finalized(updater):
                updater.update()
                updater.update()
                found[name] = ls.digest(updater.get_all_models()["main"])
    return found


def _without_last_block(sizes: Sequence[int], num_slices: int) -> list[list[Piece]]:
    """Leave the last block of the first rank to nobody."""
    cut = slices(sizes, num_slices)
    if not cut[0]:
        return cut
    last = cut[0][-1]
    cut[0][-1] = replace(last, stop=last.stop - ALIGNMENT, whole=False)
    return cut


def _twice(optimizer: torch.optim.Optimizer) -> None:
    BARE_STEP(optimizer)
    BARE_STEP(optimizer)
