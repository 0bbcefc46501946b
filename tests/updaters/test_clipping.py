"""`clip_grad_norm`: torch's clipping with one shard, the same bits on any placement, and every kind of step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.ranks import launch_on_ranks

loss_fn = ls.supervised(nn.functional.cross_entropy)


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 5, generator=generator) * 9, torch.arange(8) % 3) for _ in range(count)]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def train(model: nn.Module, optimizer: Any, **options: Any) -> list[ls.UpdateResult]:
    options = {"devices": 1, "num_shards": 4, "loss_fn": loss_fn, "clip_grad_norm": 0.1, **options}
    updater = ls.ParallelUpdater(batches(), optimizer, model, **options)
    results = [updater.update() for _ in range(4)]
    updater.finalize()
    return results


def norms(results: list[ls.UpdateResult]) -> list[float]:
    return [float(result.grad_norm) for result in results if result.grad_norm is not None]


def test_one_shard_is_torchs_clipping() -> None:
    model, other = net(), net()
    optimizer = torch.optim.AdamW(other.parameters(), lr=0.1)
    expected = []
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), y).backward()
        expected.append(float(nn.utils.clip_grad_norm_(other.parameters(), 0.1)))
        optimizer.step()
    results = train(model, torch.optim.AdamW(model.parameters(), lr=0.1), num_shards=1)
    assert norms(results) == expected
    assert min(expected) > 0.1
    assert ls.digest(model) == ls.digest(other)
    assert "grad_norm" in results[0].observation()


def run(devices: int) -> tuple[str, list[float]]:
    model = net()
    optimizer = ls.CorrectedMomentumSGD(model.parameters(), lr=0.1)
    return_values = norms(train(model, optimizer, devices=["cpu"] * devices))
    return ls.digest(model), return_values


def test_placement_changes_no_bit() -> None:
    alone = run(1)
    assert run(3) == alone
    assert launch_on_ranks(run, 2, 2) == [alone] * 2
    plain = net()
    train(plain, ls.CorrectedMomentumSGD(plain.parameters(), lr=0.1), clip_grad_norm=None)
    assert ls.digest(plain) != alone[0]


def test_the_loss_scale_does_not_change_the_norm() -> None:
    model, scaled = net(), net()
    plain = norms(train(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    found = norms(train(scaled, torch.optim.SGD(scaled.parameters(), lr=0.1), loss_scale=1024.0))
    assert found == plain
    assert ls.digest(model) == ls.digest(scaled)


def test_an_infinite_limit_only_measures() -> None:
    model, plain = net(), net()
    found = train(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_grad_norm=float("inf"))
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), clip_grad_norm=None)
    assert len(norms(found)) == 4
    assert ls.digest(model) == ls.digest(plain)


def test_master_weights_hold_the_clipped_gradient() -> None:
    model = net().to(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    updater = ls.ParallelUpdater(
        [(x.bfloat16(), y) for x, y in batches()],
        optimizer,
        model,
        devices=2,
        num_shards=4,
        loss_fn=loss_fn,
        precision="bf16-true",
        clip_grad_norm=0.1,
    )
    before = {name: weight.clone() for name, weight in updater.master_weights().items()}
    updater.update()
    moved = [updater.master_weights()[name] - weight for name, weight in before.items()]
    assert float(torch.cat([each.flatten() for each in moved]).norm()) == pytest.approx(0.1, rel=1e-3)


def test_several_optimizers_have_limits_of_their_own() -> None:
    model = net()
    before = [each.detach().clone() for each in model.parameters()]
    optimizers = {
        "first": torch.optim.SGD(model[0].parameters(), lr=1.0),
        "last": torch.optim.SGD(model[2].parameters(), lr=1.0),
    }
    results = train(model, optimizers, clip_grad_norm={"last": 0.1}, loss_fn=loss_fn)
    updater = ls.ParallelUpdater(
        batches(), optimizers, model, devices=1, num_shards=2, loss_fn=loss_fn, clip_grad_norm=0.1
    )
    kept = [each.detach().clone() for each in model.parameters()]
    updater.update()
    moved = [float((now.detach() - then).norm()) for now, then in zip(model.parameters(), kept, strict=True)]
    assert (moved[0] ** 2 + moved[1] ** 2) ** 0.5 == pytest.approx(0.1, rel=1e-3)
    assert (moved[2] ** 2 + moved[3] ** 2) ** 0.5 == pytest.approx(0.1, rel=1e-3)
    assert len(norms(results)) == 4
    assert not torch.equal(before[0], kept[0])


def test_a_step_function_clips_too_and_frozen_groups_do_not_count() -> None:
    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.compute_gradients(batch)
        updater.apply_gradients()

    model, other = net(), net()
    found = norms(train(model, torch.optim.SGD(model.parameters(), lr=0.1), step_fn=step))
    assert found == norms(train(other, torch.optim.SGD(other.parameters(), lr=0.1)))
    assert ls.digest(model) == ls.digest(other)
    model = net()
    groups = [{"params": model[0].parameters(), "frozen": True}, {"params": model[2].parameters()}]
    frozen = norms(train(model, ls.MomentumSGD(groups, lr=0.1)))
    assert frozen[0] < found[0]


def test_a_skipped_update_has_no_norm() -> None:
    model = net()
    given = batches()
    given[0][0][0] = torch.inf
    updater = ls.ParallelUpdater(
        given,
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=1,
        num_shards=2,
        loss_fn=loss_fn,
        on_overflow="skip",
        clip_grad_norm=1.0,
    )
    first, second = updater.update(), updater.update()
    assert first.grad_norm is None
    assert "grad_norm" not in first.observation()
    assert second.grad_norm is not None


def test_the_recipe_names_it_only_if_it_is_given() -> None:
    model = net()
    fields = []
    for clip in (None, 0.5):
        updater = ls.ParallelUpdater(
            batches(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            devices=1,
            loss_fn=loss_fn,
            clip_grad_norm=clip,
        )
        fields.append(updater.recipe_fields())
    assert "clip_grad_norm" not in fields[0]
    assert fields[1]["clip_grad_norm"] == 0.5


@pytest.mark.parametrize(
    ("clip", "error", "message"),
    [
        (0.0, ValueError, "must be above 0, got 0.0"),
        ("1", TypeError, "must be a number for .main., got a str"),
        ({"other": 1.0}, ValueError, r"must name optimizers \(\['main'\]\), got \['other'\]"),
    ],
)
def test_wrong_limits(clip: Any, error: type[Exception], message: str) -> None:
    model = net()
    with pytest.raises(error, match=message):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_grad_norm=clip)


@pytest.mark.parametrize("several", [False, True])
def test_sparse_gradients_are_refused_before_anything_changes(several: bool) -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(20, 3))
    kinds = {"last": model[2], "first": model[0]} if several else {"main": model}
    optimizers = {name: torch.optim.SGD(each.parameters(), lr=0.1) for name, each in kinds.items()}
    batch = torch.arange(40).reshape(8, 5) % 9, torch.arange(8) % 3
    updater = ls.ParallelUpdater(
        [batch], optimizers, model, devices=1, num_shards=2, loss_fn=loss_fn, clip_grad_norm=1.0
    )
    before = ls.digest(model)
    with pytest.raises(TypeError, match=r"`clip_grad_norm`, must be that of dense tensors, .* Pass sparse=False"):
        updater.update()
    assert (updater.iteration, ls.digest(model)) == (0, before)


def test_lbfgs_cannot_be_clipped() -> None:
    model = net()
    with pytest.raises(ValueError, match="`clip_grad_norm` must be None for LBFGS"):
        train(model, torch.optim.LBFGS(model.parameters()))
