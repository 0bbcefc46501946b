"""Steps of one's own that nobody looks at: nothing is read, and nothing is other than if it were."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.updaters.step.custom_step import _any
from tests.support.reads import Reads
from tests.support.runs import finalized
from tests.support.skipping import Spoiling, skipping, told

NUM_UPDATES = 6
NAMES = ("left", "right")
BAD = {(1, "left"), (2, "right"), (4, "left"), (4, "right")}
"""The computations whose gradients are not finite."""


def spoiling_losses() -> dict[str, Spoiling]:
    """Make the losses of both networks, each infinite in its bad computations."""

    def loss_of(name: str, nets: dict[str, nn.Module], x: torch.Tensor) -> torch.Tensor:
        return mse_loss(nets[name](x).float(), x.float())

    return {name: Spoiling(partial(loss_of, name), {update for update, bad in BAD if bad == name}) for name in NAMES}


def in_turn(updater: ls.ParallelUpdater, batch: Any, losses: dict[str, Any]) -> None:
    for name in NAMES:
        updater.compute_gradients(batch, loss_fn=losses[name], optimizer=name)
        updater.apply_gradients(name)


def both_then_both(updater: ls.ParallelUpdater, batch: Any, losses: dict[str, Any]) -> None:
    for name in NAMES:
        updater.compute_gradients(batch, loss_fn=losses[name], optimizer=name)
    for name in NAMES:
        updater.apply_gradients(name)


SCALES = [None, 64.0, ls.DynamicLossScale(2.0**8, interval=1), ls.RampLossScale(8.0)]
ORDERS: dict[str, Callable[..., None]] = {"in turn": in_turn, "both, then both": both_then_both}


def updater_of(
    order: str,
    *,
    reads: bool = False,
    devices: int = 1,
    step: Any = None,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> ls.ParallelUpdater:
    """Make an updater of two networks; see `skipping`."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        nets = {name: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(dtype) for name in NAMES}
        x = torch.randn(36, 3).to(dtype)
    optimizers = {name: torch.optim.AdamW(net.parameters(), lr=0.1, fused=True) for name, net in nets.items()}
    losses = spoiling_losses()
    return skipping(
        ls.BatchIterator(TensorDataset(x), 9),
        optimizers,
        nets,
        step_fn=step or (lambda updater, batch: ORDERS[order](updater, batch, losses)),
        reads=reads,
        devices=["cpu"] * devices,
        **{"loss_scale": ls.DynamicLossScale(2.0**8, interval=2), **options},
    )


@pytest.mark.each_value
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("order", ORDERS)
def test_it_is_what_skipping_on_the_host_is(order: str, scale: Any) -> None:
    unread = updater_of(order, loss_scale=scale)
    assert unread.why_it_waits is None
    ours = told(unread, NUM_UPDATES)
    assert ours == told(updater_of(order, reads=True, loss_scale=scale), NUM_UPDATES)
    assert ours == told(updater_of(order, devices=2, loss_scale=scale), NUM_UPDATES)
    assert ours["applied"] == [update != 4 for update in range(NUM_UPDATES)]


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["bf16", "bf16-true", "fp16-true"])
@pytest.mark.parametrize("order", ORDERS)
def test_the_same_in_half_precision(order: str, precision: str) -> None:
    dtype = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}.get(precision, torch.float32)
    options: dict[str, Any] = {"precision": precision, "dtype": dtype, "loss_scale": 16.0}
    ours = told(updater_of(order, **options), NUM_UPDATES)
    assert ours == told(updater_of(order, reads=True, **options), NUM_UPDATES)
    assert ours == told(updater_of(order, devices=2, **options), NUM_UPDATES)
    assert ours["applied"] == [update != 4 for update in range(NUM_UPDATES)]


@pytest.mark.parametrize("order", ORDERS)
def test_nothing_is_read(order: str) -> None:
    for reads in (False, True):
        with finalized(updater_of(order, reads=reads)) as updater:
            updater.update()
            with Reads() as counted:
                for _ in range(3):
                    updater.update()
            assert (counted.count == 0) == (not reads)


def test_an_error_takes_back_what_nobody_has_read() -> None:
    failing = {3}

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        in_turn(updater, batch, losses)
        if updater.iteration in failing:
            failing.clear()
            raise RuntimeError("three")

    losses = spoiling_losses()
    with finalized(updater_of("", step=step)) as updater:
        results = [updater.update() for _ in range(3)]
        with pytest.raises(RuntimeError, match="three"):
            updater.update()
        assert updater.why_it_waits is None
        assert (updater.iteration, updater.applied_updates) == (3, 3)
        # Finite, finite, bad | finite, finite, bad: twice up from 2⁸ and twice down.
        assert updater.loss_scale == ls.DynamicLossScale(2.0**8, interval=2)
        assert [each.applied for each in results] == [True] * 3
        assert not updater.update().applied  # the losses' fifth update
        assert (updater.iteration, updater.applied_updates) == (4, 3)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], False),
        ([False, False], False),
        ([False, torch.tensor(1.0)], True),
        ([torch.tensor(0.0), torch.tensor(0.0)], False),
        ([torch.tensor(0.0), True], True),
        ([True, torch.tensor(0.0)], True),
    ],
)
def test_a_gradient_that_was_read_counts_beside_those_on_the_device(flags: list[Any], expected: bool) -> None:
    assert bool(_any(flags)) is expected
