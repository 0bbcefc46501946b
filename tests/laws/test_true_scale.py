"""What backward computes is the gradient of the mean: hooks and custom Functions see the numbers of a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.programs import true_scale
from tests.support.programs.true_scale import SEEN, Net, data, plain, updated
from tests.support.ranks import run_on_ranks
from tests.support.runs import finalized


def assert_equal_to_float64(found: torch.Tensor, wanted: torch.Tensor) -> None:
    # Rounded once in the share of each shard, and where a shard has other sums than the batch.
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize(("sizes", "num_shards"), [([12], 4), ([12], 5), ([12], None), ([7, 5], 3), ([3, 3, 1], 2)])
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
def test_a_threshold_on_activations_is_that_of_a_plain_loop(
    num_devices: int, sizes: list[int], num_shards: int | None, loss_scale: float | None
) -> None:
    options: dict[str, Any] = {"loss_scale": loss_scale}
    seen, gradients = updated(None, sizes, num_shards, num_devices=num_devices, options=options)
    wanted_seen, wanted = plain(sum(sizes), loss_scale=loss_scale or 1.0)
    assert_equal_to_float64(seen, wanted_seen)
    assert_equal_to_float64(gradients, wanted)
    # The threshold is reached in some places and not in others, or another scale would give the same.
    assert not torch.allclose(plain(sum(sizes), loss_scale=0.75)[1], plain(sum(sizes))[1])


@pytest.mark.parametrize("size", [2, 3])
def test_on_several_ranks_too(size: int) -> None:
    wanted_seen, wanted = plain(12)
    ranks = run_on_ranks(true_scale.updated, size, [7, 5], 3)
    assert_equal_to_float64(torch.cat([seen for seen, _ in ranks]), wanted_seen)
    for _, gradients in ranks:
        assert_equal_to_float64(gradients, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("loss_scale", [None, 4.0])
def test_a_loss_in_half_precision_starts_within_one_rounding(dtype: torch.dtype, loss_scale: float | None) -> None:
    starts: list[float] = []

    def in_half(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y).to(dtype)
        loss.register_hook(lambda gradient: starts.append(gradient.item()))
        return loss

    grads = {}
    for loss_fn in (in_half, nn.functional.mse_loss):
        model, given = Net(torch.float32), data(12, torch.float32)
        fn = ls.supervised(loss_fn) if loss_fn is not in_half else loss_fn
        updater = ls.ParallelUpdater(
            [given],
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            devices=["cpu"],
            num_shards=5,
            loss_fn=fn,
            loss_scale=loss_scale,
            audit_every=0,
        )
        with finalized(updater):
            updater.update()
        grads[loss_fn] = model.outer.weight.grad
    for start, size in zip(starts, [3, 3, 2, 2, 2], strict=True):
        assert start == pytest.approx((loss_scale or 1.0) * size / 12, rel=torch.finfo(dtype).eps / 2)
    # The rounding of the start is taken back in float32, so the gradients have no error of half precision.
    torch.testing.assert_close(grads[in_half], grads[nn.functional.mse_loss], rtol=1e-5, atol=1e-7)


def weighted(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> ls.Loss:
    """The weights are numbers of samples."""
    return ls.Loss(nn.functional.mse_loss(model(x), y), weight=len(x))


def mixed(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | ls.Loss:
    """Return a weight for the shards with a sample whose number is a multiple of five."""
    loss = nn.functional.mse_loss(model(x), y)
    return ls.Loss(loss, weight=len(x)) if (x[:, 0] % 5 == 0).any() else loss


class Smooth(Net):
    """The same without a threshold, for which the scale is no matter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.outer(self.inner(x).tanh())
        return output


def trained(loss_fn: Any, *, num_devices: int, first: slice = slice(None)) -> tuple[list[str], list[int]]:
    """Train on batches that are mixed, all with weights, mixed, and all without; return the digest after each."""
    x, y = data(20, torch.float32)
    rows = [[0, 1, 2, 3, 4, 6], [0, 5, 10, 15], [5, 6, 7, 8, 9, 11], [1, 2, 3, 4, 6, 7]][first]
    model, found, tries = Smooth(torch.float32), [], []
    updater = ls.ParallelUpdater(
        [(x[each], y[each]) for each in rows],
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * num_devices,
        num_shards=3,
        loss_fn=loss_fn,
    )
    with finalized(updater):
        for _ in rows:
            result = updater.update()
            found.append(ls.digest(model))
            tries.append(result.tries)
    return found, tries


def test_shards_with_and_without_weights_have_the_bits_of_weights_anywhere() -> None:
    alone, tries = trained(mixed, num_devices=1)
    assert tries == [1, 1, 1, 1]
    assert trained(mixed, num_devices=2)[0] == trained(mixed, num_devices=3)[0] == alone
    # Up to the last batch, whose shards are all without weights, all are summed as weights.
    assert trained(weighted, num_devices=2)[0][:3] == alone[:3]
    # What earlier updates were like has no influence.
    assert (
        trained(mixed, num_devices=1, first=slice(3, 4))[0]
        == trained(lambda model, x, y: nn.functional.mse_loss(model(x), y), num_devices=2, first=slice(3, 4))[0]
    )


def on_rank(communicator: ls.Communicator) -> list[str]:
    model = Smooth(torch.float32)
    x, y = data(20, torch.float32)
    updater = ls.ParallelUpdater(
        [(x[:6], y[:6]), (x[6:10], y[6:10]), (x[11:15], y[11:15])],
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"],
        num_shards=3,
        loss_fn=mixed,
        communicator=communicator,
    )
    found = []
    with finalized(updater):
        for _ in range(3):
            updater.update()
            found.append(ls.digest(model))
    return found


def test_ranks_agree_on_what_to_repeat() -> None:
    alone = on_rank(ls.LocalCommunicator())
    assert run_on_ranks(on_rank, 2) == [alone] * 2
    SEEN.clear()


def test_some_ignored_labels_are_a_mixture_and_give_the_mean_over_the_others() -> None:
    x, _ = data(12)
    labels = torch.arange(12) % 2
    labels[[1, 2, 9]] = -100
    for criterion in (nn.functional.cross_entropy, nn.CrossEntropyLoss()):
        model = Smooth()
        updater = ls.ParallelUpdater(
            [(x, labels)],
            torch.optim.SGD(model.parameters(), lr=0.1),
            model,
            devices=["cpu"] * 2,
            num_shards=4,
            loss_fn=ls.supervised(criterion),
        )
        with finalized(updater):
            updater.update()
        alone = Smooth()
        nn.functional.cross_entropy(alone(x), labels).backward()
        for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
            assert_equal_to_float64(mine.grad, other.grad)
