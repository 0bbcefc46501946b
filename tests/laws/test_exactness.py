"""The gradient is that of the mean loss over the whole batch, however the batch is cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.small_updater import updater_of

MOST_SAMPLES = 32
WIDTH = 5
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(MOST_SAMPLES, WIDTH, generator=GENERATOR, dtype=torch.float64)
Y = torch.randn(MOST_SAMPLES, generator=GENERATOR, dtype=torch.float64)
TOKENS = torch.randint(0, 7, (MOST_SAMPLES,), generator=GENERATOR).double()
"""How many tokens of a sample count; none in a seventh of them."""


class Net(nn.Module):
    """Something with curvature, and no two gradients alike."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.inner = nn.Parameter(torch.randn(WIDTH, 3, generator=generator, dtype=torch.float64))
        self.outer = nn.Parameter(torch.randn(3, generator=generator, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.inner).tanh() @ self.outer


def mean_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square().mean()


def token_loss(model: nn.Module, x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor) -> ls.Loss:
    """Weigh samples by tokens; where there is none, the mean is NaN and the weight 0."""
    total = ((model(x) - y).square() * tokens).sum()
    return ls.Loss(total / tokens.sum(), weight=tokens.sum())


LOSSES = {"samples": mean_loss, "tokens": token_loss}


def expected(loss: str, num_samples: int) -> list[torch.Tensor]:
    """The gradient of the whole batch at once, by PyTorch alone."""
    model = Net()
    value = LOSSES[loss](model, X[:num_samples], Y[:num_samples], TOKENS[:num_samples])
    return list(torch.autograd.grad(value.value if isinstance(value, ls.Loss) else value, model.parameters()))


def check(updater: ls.ParallelUpdater, loss: str, num_samples: int) -> None:
    result = updater.compute_gradients((X[:num_samples], Y[:num_samples], TOKENS[:num_samples]))
    weight = float(num_samples) if loss == "samples" else float(TOKENS[:num_samples].sum())
    assert result.weight == weight
    if weight == 0:
        assert all(parameter.grad is None for parameter in updater.get_all_models()["main"].parameters())
        return
    found = [parameter.grad for parameter in updater.get_all_models()["main"].parameters()]
    for gradient, wanted in zip(found, expected(loss, num_samples), strict=True):
        # Another order of additions rounds differently: a few units in 1e-16 for each of some 160 terms.
        assert (gradient - wanted).norm() <= 1e-12 * wanted.norm()


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a sum of so many positive ones, in order."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, total)))


def some_splits(devices: int) -> list[tuple[int, ...]]:
    """For every second number of samples the least even splits and another one."""
    rng = random.Random(devices)  # noqa: S311 - which cases to look at
    splits: list[tuple[int, ...]] = []
    for total in range(devices, MOST_SAMPLES + 1, 2):
        lopsided = (total - devices + 1, *[1] * (devices - 1))
        cut = sorted(rng.sample(range(1, total), devices - 1))
        splits += {lopsided, lopsided[::-1], tuple(b - a for a, b in itertools.pairwise((0, *cut, total)))}
    return splits


def check_splits(devices: int, loss: str, splits: Sequence[tuple[int, ...]], **options: Any) -> None:
    model = Net()
    with updater_of(model, devices=devices, loss_fn=LOSSES[loss], **options) as updater:
        for split in splits:
            # What a device is given is in proportion to its work load, so these are the sizes.
            updater._engine.replicas.workloads = [float(size) for size in split]
            check(updater, loss, sum(split))
            assert len(split) == devices


@pytest.mark.each_value
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("devices", [2, 5])
def test_splits_over_devices_give_the_gradient_of_the_whole(devices: int, loss: str) -> None:
    check_splits(devices, loss, some_splits(devices))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    ("devices", "most"), [(1, MOST_SAMPLES), (2, MOST_SAMPLES), (3, MOST_SAMPLES), (4, 18), (5, 15)]
)
def test_every_split_over_devices_gives_the_gradient_of_the_whole(devices: int, most: int, loss: str) -> None:
    for total in range(devices, most + 1):
        # Every gradient is that of the first update here, which would be audited.
        check_splits(devices, loss, list(compositions(total, devices)), audit_every=0)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("devices", [2, 5])
def test_fewer_samples_than_devices_leave_some_idle(devices: int, loss: str) -> None:
    with updater_of(Net(), devices=devices, loss_fn=LOSSES[loss]) as updater:
        for num_samples in range(1, devices):
            check(updater, loss, num_samples)


@pytest.mark.each_value
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_shards", [1, 3, 13, 40])
def test_any_number_of_shards_gives_the_gradient_of_the_whole(num_shards: int, loss: str) -> None:
    with updater_of(Net(), devices=3, num_shards=num_shards, loss_fn=LOSSES[loss]) as updater:
        for num_samples in range(1, MOST_SAMPLES + 1):
            check(updater, loss, num_samples)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_shards", range(1, MOST_SAMPLES + 2))
def test_every_number_of_shards_gives_the_gradient_of_the_whole(num_shards: int, loss: str) -> None:
    for devices in range(1, 6):
        with updater_of(Net(), devices=devices, num_shards=num_shards, loss_fn=LOSSES[loss], audit_every=0) as updater:
            for num_samples in range(1, MOST_SAMPLES + 1):
                check(updater, loss, num_samples)


@pytest.mark.parametrize("devices", [1, 2])
def test_an_update_of_weight_zero_moves_nothing_and_is_counted(devices: int) -> None:
    def nothing(model: nn.Module, x: torch.Tensor) -> ls.Loss:
        return ls.Loss(model(x).sum() / 0.0, weight=0)

    model = nn.BatchNorm1d(1)
    before = ls.digest(model)
    with updater_of(model, torch.randn(4, 1), devices=devices, num_shards=2, loss_fn=nothing) as updater:
        result = updater.update()
    assert not result.applied
    assert (result.weight, result.tries, result.nonfinite) == (0, 1, None)
    assert result.loss.isnan()
    assert updater.iteration == 1
    assert ls.digest(model) == before


@pytest.mark.filterwarnings("ignore:`loss_fn` must return the mean over the samples:UserWarning")
def test_the_law_is_not_empty_a_mean_of_means_is_another_gradient() -> None:
    with updater_of(Net(), devices=2, loss_fn=lambda *batch: ls.Loss(mean_loss(*batch), weight=1)) as updater:
        updater._engine.replicas.workloads = [20.0, 4.0]
        updater.compute_gradients((X[:24], Y[:24], TOKENS[:24]))
        found = updater.get_all_models()["main"].inner.grad
        wanted = expected("samples", 24)[0]
        assert (found - wanted).norm() > 1e-2 * wanted.norm()
