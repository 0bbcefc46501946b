"""A loss and reported values of an evaluation that are no means over samples are named in its first pass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.extensions import Evaluator
from tests.support.runs import finalized

SHOWN = "is no mean over samples"
CLASSES = 3


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    labels = torch.arange(32) % CLASSES
    labels[3::7] = -100
    return list(zip(torch.randn(32, 4).split(16), labels.split(16), strict=True))


def warned(
    loss_fn: Callable[..., Any],
    num_devices: int = 1,
    *,
    num_shards: int | None = None,
    audit_every: int | None = None,
    passes: int = 1,
) -> list[str]:
    """Return what is said of means in evaluations between updates."""
    torch.manual_seed(1)
    model = nn.Linear(4, CLASSES)
    updater = ls.ParallelUpdater(
        ls.IterableBatches([tuple(each[:8] for each in batches()[0])]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model=model,
        devices=["cpu"] * num_devices,
        num_shards=4,
        loss_fn=ls.supervised(nn.CrossEntropyLoss(ignore_index=-100)),
        audit_every=audit_every,
    )
    trainer = ls.Trainer(updater, until=(passes, "iteration"))
    trainer.extend(Evaluator(batches(), loss_fn=loss_fn, num_shards=num_shards), trigger=(1, "iteration"))
    with finalized(updater), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.run()
    return [str(each.message) for each in said if SHOWN in str(each.message)]


def ignoring(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(net(x), y)


def weighted(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> ls.Loss:
    return ls.Loss(functional.cross_entropy(net(x), y), weight=(y >= 0).sum())


def counting(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    ls.report({"largest": net(x).max(), "size": net(x).square().mean()})
    return net(x).square().mean() + 0 * y.sum()


def drawing(net: nn.Module, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return functional.dropout(net(x) + torch.randn(len(x), CLASSES)).square().mean()


def failing(net: nn.Module, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    if len(x) < 4:
        raise SystemExit(1)
    return net(x).square().mean().sqrt()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_is_no_mean_is_named_once(num_devices: int) -> None:
    (loss,) = warned(ignoring, num_devices, passes=3)
    assert loss.startswith("`loss_fn` returns ")
    (reported,) = warned(counting, num_devices)
    assert reported.startswith("The reported value 'largest' is ")


@pytest.mark.parametrize("loss_fn", [weighted, drawing, failing, ls.supervised(nn.CrossEntropyLoss(reduction="sum"))])
def test_a_mean_and_what_is_not_known_raise_no_alarm(loss_fn: Callable[..., Any]) -> None:
    assert warned(loss_fn) == []


def test_whole_batches_and_a_run_without_audits_are_not_compared() -> None:
    assert warned(ignoring, num_shards=1) == []
    assert warned(ignoring, audit_every=0) == []


def recurrent(net: nn.Module, steps: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = net(steps)[0]
    return output.square().mean()


def test_without_a_trainer_the_dimension_of_samples_is_given_or_named() -> None:
    torch.manual_seed(0)
    net, steps = nn.GRU(5, 4).double(), torch.randn(12, 6, 5).double()
    with torch.no_grad():
        whole = float(recurrent(net, steps))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dim in (1, {0: 1}):
            evaluator = Evaluator([steps], loss_fn=recurrent, num_shards=3, batch_dim=dim)
            # Means over shards, rounded differently from one over all samples.
            assert evaluator.evaluate(net)["loss"] == pytest.approx(whole, rel=1e-12)
    with pytest.warns(UserWarning, match=SHOWN):
        Evaluator([steps], loss_fn=recurrent, num_shards=3).evaluate(net)
    with pytest.raises(TypeError, match="`batch_dim` must be an integer"):
        Evaluator([steps], loss_fn=recurrent, batch_dim="1")


def test_the_dimension_of_samples_is_by_default_that_of_the_updater(tmp_path: Path) -> None:
    net, steps = nn.GRU(5, 4), torch.randn(12, 6, 5)
    updater = ls.ParallelUpdater(
        ls.IterableBatches([steps]),
        torch.optim.SGD(net.parameters(), lr=0.1),
        net,
        devices=["cpu"],
        num_shards=3,
        loss_fn=recurrent,
        batch_dim=1,
    )
    trainer = ls.Trainer(updater, until=(1, "iteration"), out=tmp_path)
    trainer.extend(Evaluator([steps], loss_fn=recurrent), name="same", trigger=(1, "iteration"))
    trainer.extend(
        Evaluator([steps.swapaxes(0, 1)], loss_fn=lambda net, x: recurrent(net, x.swapaxes(0, 1)), batch_dim=0),
        name="own",
        trigger=(1, "iteration"),
    )
    with finalized(updater):
        trainer.run()
    assert trainer.observation["same/main/loss"] == trainer.observation["own/main/loss"]


def test_nothing_of_the_evaluation_changes() -> None:
    calls: list[int] = []

    def loss_fn(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        x.mul_(2)
        ls.report({"drawn": torch.randn(()) + x.mean()})
        return weighted(net, x, y).value

    def values(audit_every: int | None) -> dict[str, Any]:
        calls.clear()
        trainer_values: dict[str, Any] = {}
        model = nn.Linear(4, CLASSES)
        with torch.no_grad():
            model.weight.fill_(0.5)
            model.bias.copy_(torch.arange(CLASSES))
        updater = ls.ParallelUpdater(
            ls.IterableBatches(batches()),
            torch.optim.SGD(model.parameters(), lr=0.1),
            model=model,
            devices=["cpu"],
            num_shards=4,
            loss_fn=ls.supervised(nn.CrossEntropyLoss(ignore_index=-100)),
            audit_every=audit_every,
        )
        trainer = ls.Trainer(updater, until=(1, "iteration"))
        trainer.extend(Evaluator(batches(), loss_fn=loss_fn), trigger=(1, "iteration"))
        with finalized(updater), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer.run()
        trainer_values.update(trainer.observation)
        return {name: float(each) for name, each in trainer_values.items() if name.startswith("validation")}

    plain, plain_calls = values(0), [*calls]
    assert (values(None), plain_calls) == (plain, [4] * 8)
    # The shard, its two parts, and all once more because the loss is no mean.
    assert [*calls] == [*[4] * 4, *[4, 2, 2] * 3, *[4] * 4]
