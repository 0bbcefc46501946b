"""What shards find in their batches does not depend on where, when and how often they run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import lockstep as ls
from lockstep.plan import Shard
from lockstep.updaters.setup.batches import Conversion
from tests.support.ranks import run_on_ranks
from tests.support.small_updater import finalized

SIZE = 8


def mse_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a loss whose gradient overflows at the largest loss scale."""
    return functional.mse_loss(output, target) * 64


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(24, 4, generator=generator), torch.randn(24, 2, generator=generator))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def as_list() -> list[Any]:
    return [(x.clone(), y.clone()) for x, y in DataLoader(data(), SIZE)]


def in_place(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x.mul_(0.5).add_(1)), y)


def forward_in_place(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
    return model(x.mul_(0.5).add_(1)), y


def trained(source: Any, devices: int, *, updates: int = 5, num_shards: int = 4, **options: Any) -> tuple[str, int]:
    """Return the digest of a model after some updates, and the attempts that they took."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
    places = ["cpu"] * devices
    with finalized(
        ls.ParallelUpdater(source, optimizer, model, devices=places, num_shards=num_shards, **options)
    ) as updater:
        tries = sum(updater.update().tries for _ in range(updates))
    return ls.digest(model), tries


def out_of_place(source: Callable[[], Any], **options: Any) -> str:
    """Return the digest that the loss in place must give: the same loss on batches that have been changed before."""

    def changed() -> Iterator[Any]:
        kept = source()
        while True:
            for x, y in kept:
                # A list keeps what is changed in it, and a loader makes new batches.
                yield (x.mul_(0.5).add_(1) if isinstance(kept, list) else x * 0.5 + 1), y

    return trained(changed(), 1, loss_fn=ls.supervised(mse_loss), **options)[0]


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("source", [as_list, lambda: DataLoader(data(), SIZE)], ids=["list", "loader"])
class TestChangedInPlace:
    def test_a_loss_that_changes_its_batch(self, source: Callable[[], Any], devices: int) -> None:
        assert trained(source(), devices, loss_fn=in_place)[0] == out_of_place(source)

    def test_strided_shards(self, source: Callable[[], Any], devices: int) -> None:
        assert trained(source(), devices, loss_fn=in_place, split="strided")[0] == out_of_place(source, split="strided")

    def test_a_retry_finds_the_first_batch(self, source: Callable[[], Any], devices: int) -> None:
        # Rises after the first update, so that a later one overflows too.
        scale = ls.DynamicLossScale(factor=2.0**127, backoff=2.0**-100, growth=2.0**100, interval=4, maximum=2.0**127)
        digest, tries = trained(source(), devices, loss_fn=in_place, loss_scale=scale, updates=6)
        assert tries > 6
        assert digest == out_of_place(source, updates=6)

    def test_a_loss_over_the_whole_batch(self, source: Callable[[], Any], devices: int) -> None:
        def out(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
            return model(x), y

        def changed() -> Iterator[Any]:
            kept = source()
            while True:
                for x, y in kept:
                    yield (x.mul_(0.5).add_(1) if isinstance(kept, list) else x * 0.5 + 1), y

        whole = trained(changed(), 1, loss_fn=ls.BatchLoss(out, lambda pair: mse_loss(*pair)))
        loss = ls.BatchLoss(forward_in_place, lambda pair: mse_loss(*pair))
        assert trained(source(), devices, loss_fn=loss)[0] == whole[0]

    def test_an_update_that_failed_is_repeated(self, source: Callable[[], Any], devices: int) -> None:
        model, failures = network(), [True]

        def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = in_place(model, x, y)
            if failures:
                failures.clear()
                raise OSError("once")
            return loss

        optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
        with finalized(
            ls.ParallelUpdater(source(), optimizer, model, devices=["cpu"] * devices, num_shards=4, loss_fn=loss_fn)
        ) as updater:
            with pytest.raises(ls.ReplicaError, match="once"):
                updater.update()
            for _ in range(5):
                updater.update()
        assert ls.digest(model) == out_of_place(source)


def test_a_closure_evaluated_again_finds_the_first_batch() -> None:
    digests = []
    for loss_fn in (in_place, lambda model, x, y: mse_loss(model(x * 0.5 + 1), y)):
        model = network()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
        batches = DataLoader(data(), SIZE)
        with finalized(
            ls.ParallelUpdater(batches, optimizer, model, devices=["cpu"] * 2, num_shards=4, loss_fn=loss_fn)
        ) as updater:
            for _ in range(3):
                updater.update()
        digests.append(ls.digest(model))
    assert digests[0] == digests[1]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_change_that_begins_late_is_undone_when_a_shard_runs_again(devices: int) -> None:
    found = []

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return in_place(model, x, y) if updater.iteration > 4 else mse_loss(model(x), y)

    def out_of_place(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(model(x * 0.5 + 1), y) if updater.iteration > 4 else mse_loss(model(x), y)

    # From the update on in which the loss scale rises, every first attempt overflows.
    scale = ls.DynamicLossScale(factor=1.0, growth=2.0**127, backoff=2.0**-127, interval=4, maximum=2.0**127)
    for loss in (loss_fn, out_of_place):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
        updater = ls.ParallelUpdater(
            DataLoader(data(), SIZE),
            optimizer,
            model,
            devices=["cpu"] * devices,
            num_shards=4,
            loss_fn=loss,
            loss_scale=scale,
        )
        with finalized(updater):
            tries = [updater.update().tries for _ in range(9)]
        assert max(tries) > 1
        found.append(ls.digest(model))
    assert found[0] == found[1]


class TestLentBatches:
    """After the first updates, shards that have changed nothing get parts of the batches instead of copies."""

    @staticmethod
    def updater(loss_fn: Any, source: Any = None, devices: int = 2, **options: Any) -> Any:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=2e-3)
        places = ["cpu"] * devices
        batches = as_list() if source is None else source
        return finalized(
            ls.ParallelUpdater(batches, optimizer, model, devices=places, num_shards=4, loss_fn=loss_fn, **options)
        )

    def is_lent(self, loss_fn: Any, updates: int = 5, **options: Any) -> bool:
        """Return whether the last of some updates has computed with the memory of the batches."""
        batches, seen = as_list(), set[int]()

        def noting(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            seen.add(x.untyped_storage().data_ptr())
            return loss_fn(model, x, y)

        with self.updater(noting, batches, **options) as updater:
            for _ in range(updates):
                seen.clear()
                updater.update()
        return not seen.isdisjoint({x.untyped_storage().data_ptr() for x, _ in batches})

    def test_what_is_copied(self) -> None:
        plain = ls.supervised(mse_loss)
        assert self.is_lent(plain)
        assert self.is_lent(plain, devices=1)
        assert not self.is_lent(plain, updates=3)
        assert not self.is_lent(plain, split="strided")
        assert not self.is_lent(plain, audit_every=4)
        assert not self.is_lent(plain, loss_scale=ls.DynamicLossScale())
        assert not self.is_lent(in_place)
        assert not self.is_lent(lambda model, x, y: mse_loss(model(x.data.mul_(0.5)), y))

    @pytest.mark.parametrize("devices", [1, 2, 3])
    def test_a_change_that_begins_late(self, devices: int) -> None:
        digests, kept = [], []
        for loss in (in_place, lambda model, x, y: mse_loss(model(x * 0.5 + 1), y)):
            batches = as_list()

            def late(model: nn.Module, x: torch.Tensor, y: torch.Tensor, loss: Any = loss) -> torch.Tensor:
                return loss(model, x, y) if updater.iteration == 5 else mse_loss(model(x), y)

            with self.updater(late, batches, devices) as updater:
                for _ in range(6):
                    updater.update()
            digests.append(ls.digest(updater.get_all_models()["main"]))
            kept.append(batches[2][0])
        assert digests[0] == digests[1]
        # As after a loop of PyTorch.
        assert torch.equal(kept[0], kept[1] * 0.5 + 1)

    def test_an_update_that_failed_after_it_is_refused(self) -> None:
        failures = [True]

        def late(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if updater.iteration < 4:
                return mse_loss(model(x), y)
            loss = in_place(model, x, y)
            if failures:
                failures.clear()
                raise OSError("once")
            return loss

        with self.updater(late) as updater:
            for _ in range(4):
                updater.update()
            before = ls.digest(updater)
            with pytest.raises(ls.ReplicaError, match="once"):
                updater.update()
            with pytest.raises(ValueError, match="must not begin to change its batch in place after the first updates"):
                updater.update()
            assert ls.digest(updater) == before
            # Another batch may follow.
            updater.compute_gradients(as_list()[0])
            updater.apply_gradients()

    def test_an_update_that_failed_without_it_is_repeated(self) -> None:
        failures = [True]

        def failing(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if updater.iteration == 4 and failures:
                failures.clear()
                raise OSError("once")
            return mse_loss(model(x), y)

        with self.updater(failing) as updater:
            for _ in range(4):
                updater.update()
            with pytest.raises(ls.ReplicaError, match="once"):
                updater.update()
            for _ in range(2):
                updater.update()
        assert (
            ls.digest(updater.get_all_models()["main"])
            == trained(as_list(), 1, loss_fn=ls.supervised(mse_loss), updates=6)[0]
        )


def test_what_every_shard_gets_whole_must_not_be_changed() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return mse_loss(model(x * factor.mul_(0.5)), y)

    batches = [(x, y, torch.ones(1)) for x, y in as_list()]
    with pytest.raises(ValueError, match="a tensor at '2' that every shard gets whole"):
        trained(batches, 2, loss_fn=loss_fn, batch_dim={2: None}, audit_every=0)
    assert trained(batches, 1, loss_fn=loss_fn, batch_dim={2: None}, num_shards=1)[1] == 5


def noisy(samples: Any, device: torch.device) -> Any:
    """Stack samples, and add numbers of all generators that converters use."""
    x, y = ls.collate(list(samples), device)
    noise = torch.rand(1).item() + random.random() + np.random.rand()  # noqa: S311
    return x + noise, y


class TestConvertersThatDraw:
    @pytest.mark.parametrize("devices", [2, 3])
    def test_on_other_devices(self, devices: int) -> None:
        random.seed(devices)
        before = random.getstate()
        assert train_noisy(None, devices) == train_noisy(None)
        # What the program draws itself is as without the updates.
        random.setstate(before)
        options: dict[str, Any] = {"converter": noisy, "loss_fn": ls.supervised(mse_loss)}
        trained(ls.BatchIterator(data(), SIZE), devices, updates=0, **options)
        drawn = torch.get_rng_state()
        trained(ls.BatchIterator(data(), SIZE), devices, updates=2, **options)
        assert torch.equal(torch.get_rng_state(), drawn)
        assert random.getstate() == before

    def test_shards_and_updates_and_batches_have_their_own_numbers_each_time(self) -> None:
        conversion = Conversion(lambda samples, _: torch.rand(1).item(), 0, 0)  # noqa: ARG005
        shards = [[Shard(0, 0, range(4)), Shard(1, 0, range(4, 8))]]

        def drawn(start: int, first: int) -> list[float]:
            batch = ls.BatchIterator(list(range(64)), SIZE).peek()[0:SIZE]
            batch = type(batch)(batch.dataset, range(start, start + SIZE))
            found = conversion.shards([batch], shards, [torch.device("cpu")], first)
            return [value for _, value in found[0]]

        assert drawn(0, 0) == drawn(0, 0)
        assert len({*drawn(0, 0), *drawn(8, 0), *drawn(0, 2)}) == 6

    def test_on_two_ranks(self) -> None:
        assert run_on_ranks(train_noisy, 2) == [train_noisy(None)] * 2


def train_noisy(communicator: Any, devices: int = 1) -> tuple[str, int]:
    random.seed(getattr(communicator, "rank", 7))
    loss_fn, batches = ls.supervised(mse_loss), ls.BatchIterator(data(), SIZE)
    return trained(batches, devices, num_shards=3, converter=noisy, loss_fn=loss_fn, communicator=communicator)


class TestListsBesideTensors:
    """A list with as many entries as a batch has samples by coincidence is not taken for one of samples."""

    weights: tuple[float, ...] = (1.0, 2.0, 4.0)

    @staticmethod
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor, weights: Any) -> torch.Tensor:
        assert len(weights) == 3
        return mse_loss(model(x), y) * sum(weights)

    def batches(self, *sizes: int) -> list[Any]:
        return [(torch.ones(size, 4), torch.ones(size, 2), [*self.weights]) for size in sizes]

    def test_whole_in_a_short_last_batch(self) -> None:
        trained(self.batches(8, 8, 3), 2, loss_fn=self.loss_fn, updates=3)

    def test_one_that_was_cut_and_has_another_length_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"`batch` must hold one entry per sample at '2'.*pass batch_dim={'2': No"):
            trained(self.batches(3, 4), 2, loss_fn=lambda model, x, y, _: mse_loss(model(x), y), updates=2)

    def test_the_same_list_in_two_batches_is_refused(self) -> None:
        batches = [(torch.ones(3, 4), torch.ones(3, 2), self.weights) for _ in range(2)]
        with pytest.raises(ValueError, match="which is that of the batch before"):
            trained(batches, 2, loss_fn=lambda model, x, y, _: mse_loss(model(x), y), updates=2)

    def test_named_as_whole(self) -> None:
        trained(self.batches(3, 4, 3), 2, loss_fn=self.loss_fn, updates=3, batch_dim={2: None})

    def test_named_as_cut(self) -> None:
        def loss_fn(model: nn.Module, x: torch.Tensor, names: list[int]) -> torch.Tensor:
            assert names == x[:, 0].int().tolist()
            return model(x).mean()

        batches = [{"x": torch.arange(4.0)[:, None].repeat(1, 4), "names": [0, 1, 2, 3]}] * 2
        trained(batches, 2, loss_fn=loss_fn, batch_dim={"names": 0})
        short = [{"x": torch.ones(4, 4), "names": [0, 1]}]
        with pytest.raises(ValueError, match="must hold one entry per sample at 'names'"):
            trained(short, 2, loss_fn=loss_fn, batch_dim={"names": 0}, updates=1)

    def test_an_array_that_is_changed_in_place_stays_as_it_was(self) -> None:
        array = np.arange(4.0)

        def loss_fn(model: nn.Module, x: torch.Tensor, values: Any) -> torch.Tensor:
            values += 1
            return model(x).mean()

        trained([(torch.ones(4, 4), array)], 2, loss_fn=loss_fn, num_shards=2, updates=1)
        assert array.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("size", [2, 4, 5, 8])  # of 8 samples, a shard has 4
def test_a_list_with_as_many_tensors_as_samples_is_warned_of(kind: type, size: int) -> None:
    batch = (torch.randn(size, 3), kind([torch.randn(size, 2) for _ in range(4)]))
    model = nn.Linear(3, 2)
    updater = ls.ParallelUpdater(
        [batch],
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        num_shards=2,
        loss_fn=lambda net, inputs, targets: (net(inputs) - sum(targets)).square().mean(),
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        updater.update()
        updater.update()
    found = [each for each in said if "a list of 4 entries, whose tensors have 4 rows" in str(each.message)]
    assert len(found) == (kind is list and size == 4)


def test_a_pair_is_no_list_of_samples_unless_these_are_containers() -> None:
    def loss_fn(net: nn.Module, inputs: torch.Tensor, _: Any) -> torch.Tensor:
        return net(inputs).square().mean()

    model = nn.Linear(3, 2)
    for boxes in ([torch.ones(2, 4), torch.ones(2, 4)], [{"boxes": torch.ones(2, 4)}, {"boxes": torch.ones(2, 4)}]):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        updater = ls.ParallelUpdater([(torch.ones(2, 3), boxes)], optimizer, model, num_shards=2, loss_fn=loss_fn)
        with finalized(updater), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            updater.update()
        found = [each for each in said if "a list of 2 entries, whose tensors have 2 rows" in str(each.message)]
        assert len(found) == isinstance(boxes[0], dict)
