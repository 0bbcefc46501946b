"""Every row of docs/silent-errors.md that claims something has its test, most of them here."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, TensorDataset

import lockstep as ls
from tests.support.ranks import launch_on_ranks

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "silent-errors.md"
CLAIMS = {"prevented", "refused", "detected by the audit", "found by `verify`", "not covered"}
INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(12) % 3


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


@contextmanager
def updater_of(model: nn.Module, batches: Any = None, *, optimizer: Any = None, **options: Any) -> Iterator[Any]:
    """Build an updater of one device with 4 shards of batches of 6 samples, and end it."""
    updater = ls.ParallelUpdater(
        ls.BatchIterator(TensorDataset(INPUTS, TARGETS), 6) if batches is None else batches,
        torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5) if optimizer is None else optimizer,
        model,
        **{"devices": 1, "num_shards": 4, "loss_fn": ls.supervised(functional.cross_entropy), **options},
    )
    try:
        yield updater
    finally:
        updater.finalize()


def trained(between: Callable[[nn.Module], object] = lambda _: None, **options: Any) -> str:
    """Train for three updates, with something done between them, and return the digest of the weights."""
    model = network()
    with updater_of(model, **options) as updater:
        for _ in range(3):
            updater.update()
            between(model)
    return ls.digest(model)


def gradient(loss_fn: Any, inputs: torch.Tensor, targets: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the gradient of one batch for the first weight of a network of float64."""
    model = network().double()
    with updater_of(model, loss_fn=loss_fn, **options) as updater:
        updater.compute_gradients((inputs.double(), targets))
        return model[0].weight.grad.clone()


# The tests of the rows ---------------------------------------------------------------------------------


def test_a_model_without_a_trainable_layer_is_refused() -> None:
    model = network().requires_grad_(requires_grad=False)
    with (
        updater_of(model) as updater,
        pytest.raises(ValueError, match="`model` must have a parameter that requires a gradient, got none"),
    ):
        updater.update()


def test_gradients_of_earlier_updates_are_not_added() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for start in (0, 6, 0):
        optimizer.zero_grad()
        functional.cross_entropy(model(INPUTS[start : start + 6]), TARGETS[start : start + 6]).backward()
        optimizer.step()
    assert trained(num_shards=1) == ls.digest(model)


class Augmented(Dataset[Any]):
    """Samples with noise of NumPy, of which forked workers would all draw the same."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.from_numpy(np.random.normal(size=4)).float()  # of the global generator
        return INPUTS[index] + noise + torch.rand(4), TARGETS[index]


def test_workers_draw_the_numbers_that_one_process_draws() -> None:
    without, with_two = (trained(batches=ls.BatchIterator(Augmented(), 6, num_workers=each)) for each in (0, 2))
    assert with_two == without != trained()


def test_a_model_that_is_called_past_its_replica_is_refused() -> None:
    model = network()

    def loss_fn(_: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), y)

    before = ls.digest(model)
    with (
        updater_of(model, loss_fn=loss_fn, devices=2) as updater,
        pytest.raises(ValueError, match=r"gives '0\.weight' of your original model a gradient"),
    ):
        updater.update()
    assert ls.digest(model) == before


def moved(model: nn.Module) -> None:
    model.double().float()


def clipped(**options: Any) -> str:
    return trained(clip_grad_norm=0.01, **options)


def on_ranks() -> tuple[str, str]:
    return trained(moved), clipped()


@functools.cache
def of_ranks() -> list[tuple[str, str]]:
    return launch_on_ranks(on_ranks, 2)


def test_a_model_that_was_moved_away_and_back_is_still_synchronized() -> None:
    assert {trained(moved), trained(moved, devices=3), *(each[0] for each in of_ranks())} == {trained()}


def test_clipping_is_by_the_norm_of_the_one_gradient_of_all_ranks() -> None:
    assert {clipped(devices=3), *(each[1] for each in of_ranks())} == {clipped()} != {trained()}


def test_an_optimizer_of_replaced_parameters_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    with (
        pytest.raises(ValueError, match=r"`optimizer` must hold parameters of `model` only, got one of shape \(5, 4\)"),
        updater_of(model, optimizer=optimizer),
    ):
        pass


def test_one_row_of_ids_for_many_images_is_refused() -> None:
    batch = {"input_ids": torch.zeros(1, 7, dtype=torch.int64), "pixel_values": torch.ones(6, 4), "labels": TARGETS[:6]}
    loader = DataLoader([0], batch_size=None, collate_fn=lambda _: batch)

    def loss_fn(model: nn.Module, input_ids: Any, pixel_values: Any, labels: Any) -> torch.Tensor:
        return functional.cross_entropy(model(pixel_values), labels) + 0 * input_ids.sum()

    with (
        updater_of(network(), ls.IterableBatches(loader), loss_fn=loss_fn) as updater,
        pytest.raises(ValueError, match=r"`batch\['pixel_values'\]` must be as long as `batch\['input_ids'\]`"),
    ):
        updater.update()


def test_the_number_of_devices_and_ranks_scales_no_gradient() -> None:
    loss_fn = ls.supervised(functional.cross_entropy)
    model = network().double()
    functional.cross_entropy(model(INPUTS.double()), TARGETS).backward()
    found = [gradient(loss_fn, INPUTS, TARGETS, devices=each) for each in (1, 2, 3)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], model[0].weight.grad, rtol=1e-12, atol=1e-14)  # sums in another order


UNEVEN = TARGETS.clone()
UNEVEN[[0, 1, 2, 4, 5]] = -100
"""Targets of which four shards of three count 0, 1, 3 and 3."""


def test_token_counts_are_summed_over_all_ranks_before_the_division() -> None:
    model = network().double()
    functional.cross_entropy(model(INPUTS.double()), UNEVEN).backward()
    found = gradient(ls.token_mean(), INPUTS, UNEVEN, devices=3)
    torch.testing.assert_close(found, model[0].weight.grad, rtol=1e-12, atol=1e-14)  # sums in another order


def test_accumulation_is_the_mean_over_all_tokens() -> None:
    data = TensorDataset(INPUTS.double(), UNEVEN)
    weights = []
    for batch_size, options in ((12, {}), (6, {"accumulate": 2})):
        model = network().double()
        with updater_of(model, ls.BatchIterator(data, batch_size), loss_fn=ls.token_mean(), **options) as updater:
            updater.update()
        weights.append(model[0].weight.detach())
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-14)  # sums in another order


# The table ---------------------------------------------------------------------------------------------


def rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| [")]


def test_every_claim_has_its_test() -> None:
    found = rows()
    assert len({row[0] for row in found}) == len(found) > 15
    named = set()
    for error, in_ddp, claim, shown in found:
        assert re.match(r"\[.+\]\(https://", error), "a row has its source"
        assert in_ddp
        assert claim in CLAIMS
        assert (claim == "not covered") == (not shown.startswith("`"))
        if claim != "not covered":
            path, _, name = shown.strip("`").rpartition("::")
            text = (ROOT / (path or "tests/test_silent_errors.py")).read_text(encoding="utf-8")
            assert f"\ndef {name}(" in text
            named |= {name} if not path else set()
    own = re.findall(r"^def (test_\w+)\(", Path(__file__).read_text(encoding="utf-8"), re.MULTILINE)
    assert named == set(own) - {"test_every_claim_has_its_test"}
