"""A search for a learning rate that leaves no trace in the run."""

from __future__ import annotations

import math
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep as ls
from lockstep import Communicator, LRFinderResult
from tests.support.ranks import run_on_ranks
from tests.support.runs import Placement, cross_entropy, finalized, state_digest, updater_for
from tests.support.workloads import MLP, TRANSFORMER

SEARCH: dict[str, Any] = {"min_lr": 1e-4, "max_lr": 100.0, "num_updates": 30}


def searched(num_devices: int, **options: Any) -> LRFinderResult:
    with finalized(updater_for(TRANSFORMER, Placement(num_devices), num_shards=3, **options)) as updater:
        return ls.find_lr(updater, **SEARCH)


def on_ranks(communicator: Communicator) -> LRFinderResult:
    return searched(1, communicator=communicator)


def test_the_losses_are_the_same_on_any_placement() -> None:
    expected = searched(1)
    assert expected.suggestion is not None
    assert searched(2) == searched(3) == expected
    assert run_on_ranks(on_ranks, 2) == [expected] * 2


@pytest.mark.each_value
@pytest.mark.parametrize("begun", [0, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "corrected"])
def test_the_run_is_as_it_was(optimizer: str, begun: int) -> None:
    def run(*, search: bool) -> list[Any]:
        updater = updater_for(TRANSFORMER, Placement(2), num_shards=3, optimizer=optimizer)
        rate = torch.optim.lr_scheduler.LambdaLR(updater.get_optimizer("main"), lambda count: 1 / (1 + count))
        updater.finalize()
        updater = ls.ParallelUpdater(
            updater.get_iterator("main"),
            updater.get_optimizer("main"),
            updater.get_all_models()["main"],
            devices=["cpu"] * 2,
            num_shards=3,
            loss_fn=cross_entropy,
            scheduler=rate,
        )
        with finalized(updater), torch.random.fork_rng():
            torch.manual_seed(3)
            random.seed(3)
            for _ in range(begun):
                updater.update()
            before = [
                ls.digest(updater.state_dict()),
                *[each.grad is None for each in updater.get_all_models()["main"].parameters()],
            ]
            if search:
                ls.find_lr(updater, **SEARCH)
                after = [
                    ls.digest(updater.state_dict()),
                    *[each.grad is None for each in updater.get_all_models()["main"].parameters()],
                ]
                assert after == before
            drawn = torch.rand(1).item(), random.random()  # noqa: S311 - no secret
            for _ in range(5):
                updater.update()
            return [state_digest(updater), updater.get_iterator("main").state_dict(), *drawn]

    assert run(search=True) == run(search=False)


@pytest.mark.filterwarnings(
    "ignore:The optimizer, a hook, the step function or a BatchLoss drew:lockstep.errors.RandomStreamWarning"
)
def test_the_default_generators_are_as_they_were() -> None:
    def states() -> bytes:
        return pickle.dumps((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state(legacy=False)))

    with finalized(updater_for(MLP)) as updater:
        for draw in (torch.rand, lambda _: random.random(), np.random.rand):  # noqa: S311 - what a search draws from
            updater.get_optimizer("main").register_step_pre_hook(lambda *_, draw=draw: draw(1) and None)
        before = states()
        ls.find_lr(updater, num_updates=3)
    assert states() == before


def test_the_rates_grow_and_groups_keep_their_ratio() -> None:
    seen: list[list[float]] = []
    model = MLP.model()
    parameters = list(model.parameters())
    sgd = torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.05}])
    sgd.register_step_pre_hook(lambda optimizer, *_: seen.append([group["lr"] for group in optimizer.param_groups]))
    batches = ls.BatchIterator(MLP.data(), 9, seed=0)
    with finalized(ls.ParallelUpdater(batches, sgd, model, devices=1, loss_fn=cross_entropy)) as updater:
        result = ls.find_lr(updater, min_lr=1e-3, max_lr=1e-1, num_updates=5)
        assert [one for one, _ in seen] == pytest.approx([1e-3, 10**-2.5, 1e-2, 10**-1.5, 1e-1])
        assert [other / one for one, other in seen] == pytest.approx([0.5] * 5)
        assert result.lrs == tuple(one for one, _ in seen)
        assert [group["lr"] for group in sgd.param_groups] == [0.1, 0.05]
        seen.clear()
        ls.find_lr(updater, min_lr=1.0, max_lr=3.0, num_updates=3, mode="linear")
        assert [one for one, _ in seen] == pytest.approx([1.0, 2.0, 3.0])


def test_the_losses_are_those_of_a_run_with_these_rates() -> None:
    with finalized(updater_for(MLP, num_shards=2)) as updater:
        result = ls.find_lr(updater, min_lr=1e-3, max_lr=1.0, num_updates=6)
    average = 0.0
    with finalized(updater_for(MLP, num_shards=2)) as updater:
        for index, (lr, loss, smoothed) in enumerate(zip(result.lrs, result.losses, result.smoothed, strict=True)):
            updater.get_optimizer("main").param_groups[0]["lr"] = lr
            assert float(updater.update().loss) == loss
            average = 0.98 * average + 0.02 * loss
            assert smoothed == pytest.approx(average / (1 - 0.98 ** (index + 1)))


def test_a_search_that_diverges_ends_early() -> None:
    with finalized(updater_for(MLP, num_shards=2)) as updater:
        result = ls.find_lr(updater, min_lr=1e-2, max_lr=1e8, num_updates=60)
        assert result.diverged
        assert len(result.lrs) < 60
        longer = ls.find_lr(updater, min_lr=1e-2, max_lr=1e3, num_updates=20, stop_factor=None)
        assert len(longer.lrs) == 20 or not math.isfinite(longer.losses[-1])


def result_of(smoothed: list[float], **options: Any) -> LRFinderResult:
    lrs = tuple(10.0**index for index in range(len(smoothed)))
    return LRFinderResult(lrs, tuple(smoothed), tuple(smoothed), diverged=False, **options)


@pytest.mark.parametrize(
    ("smoothed", "options", "suggestion"),
    [
        ([9, 9, 8, 4, 3, 3, 9], {"skip_begin": 0, "skip_end": 1}, 10.0**2),  # from 9 to 4
        ([9, 9, 8, 4, 3, 3, 9], {"skip_begin": 2, "skip_end": 1}, 10.0**3),  # from 8 to 3
        ([1, 2, 3, 4, 5, 6], {"skip_begin": 0, "skip_end": 0}, None),
        ([3, 2, 1], {}, None),
        ([9, 5, math.nan, math.nan, math.nan], {"skip_begin": 0, "skip_end": 0}, None),
        ([9, 8, 4, 3.5, math.inf, math.inf], {"skip_begin": 0, "skip_end": 0}, 10.0),
    ],
)
def test_the_suggestion_is_where_the_loss_falls_fastest(
    smoothed: list[float], options: dict[str, int], suggestion: float | None
) -> None:
    assert result_of(smoothed, **options).suggestion == suggestion


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = result_of([9, 9, 8, 4, 3, 3, 9], skip_begin=0).plot(tmp_path / "lr.png")
    assert (tmp_path / "lr.png").read_bytes().startswith(b"\x89PNG")
    axes = figure.axes[0]
    assert [line.get_label() for line in axes.lines] == ["loss", "smoothed", "suggestion 100"]
    assert axes.get_xscale() == "log"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"min_lr": 0.0}, ValueError, "`min_lr` must be finite and above 0, got 0.0"),
        ({"max_lr": 1e-8}, ValueError, r"`max_lr` must be above `min_lr` \(1e-07\), got 1e-08"),
        ({"num_updates": 2}, ValueError, "`num_updates` must be at least 3, got 2"),
        ({"stop_factor": 1.0}, ValueError, "`stop_factor` must be above 1, got 1.0"),
        ({"mode": "log"}, ValueError, "`mode` must be 'exponential' or 'linear', got 'log'"),
        ({"optimizer": "gen"}, KeyError, "gen"),
        ({"loss": "gen/loss"}, KeyError, "`loss` must be one of loss, skipped, got 'gen/loss'"),
    ],
)
def test_what_is_wrong_is_refused(options: dict[str, Any], error: type, message: str) -> None:
    with finalized(updater_for(MLP, num_shards=2)) as updater:
        before = ls.digest(updater.state_dict())
        with pytest.raises(error, match=message):
            ls.find_lr(updater, **options)
        assert ls.digest(updater.state_dict()) == before
    with pytest.raises(TypeError, match="`updater` must be a ParallelUpdater, got a Linear"):
        ls.find_lr(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_modes_are_those_of_before() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Dropout())

    def step_fn(updater: ls.ParallelUpdater, batch: Any) -> None:
        model[1].eval()
        updater.compute_gradients(batch)
        updater.apply_gradients()

    updater = ls.ParallelUpdater(
        ls.BatchIterator(MLP.data(), 8),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"],
        loss_fn=cross_entropy,
        step_fn=step_fn,
    )
    with finalized(updater):
        ls.find_lr(updater, **SEARCH)
    assert model[1].training
