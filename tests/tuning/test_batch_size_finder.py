"""A search for a batch size that leaves no trace in the run, with memory that is planted to end and that ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep import BatchSizeFinderResult, Communicator
from tests.support import zygote
from tests.support.ranks import run_on_ranks
from tests.support.runs import Placement, cross_entropy, finalized, state_digest, updater_for
from tests.support.workloads import MLP, TRANSFORMER


def fitting(most: int, *, plain: bool = False) -> Callable[..., Any]:
    """Return a loss function for which memory suffices up to a number of samples per shard."""

    def loss_fn(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(inputs) > most:
            # `plain` as the CPU's allocator does it.
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory") if plain else torch.OutOfMemoryError
        return nn.functional.cross_entropy(model(inputs), target)

    return loss_fn


def searched(most: int, num_devices: int = 2, options: dict[str, Any] | None = None, **search: Any) -> Any:
    with finalized(
        updater_for(MLP, Placement(num_devices), num_samples=200, num_shards=4, loss_fn=fitting(most), **options or {})
    ) as updater:
        return ls.find_batch_size(updater, **{"max_batch_size": 150, **search})


def sizes(result: BatchSizeFinderResult) -> list[tuple[int, int, bool]]:
    return [(trial.batch_size, trial.shard_size, trial.fits) for trial in result.trials]


DOUBLED = [(8, 2, True), (16, 4, True), (32, 8, True), (64, 16, True)]


def test_the_size_doubles_until_memory_does_not_suffice() -> None:
    result = searched(20)
    assert sizes(result) == [*DOUBLED, (128, 32, False)]
    assert (result.largest, result.suggestion, result.limited_by) == (64, 64, "memory")


@pytest.mark.parametrize("most", [17, *(pytest.param(each, marks=pytest.mark.slow) for each in (16, 20, 23, 31))])
def test_bisection_finds_the_largest_multiple_of_the_shards(most: int) -> None:
    result = searched(most, mode="binsearch", margin=0.0)
    assert result.largest == result.suggestion == 4 * most
    assert result.limited_by == "memory"
    careful = searched(most, mode="binsearch", margin=0.25)
    assert careful.largest == 4 * most
    assert careful.suggestion == 3 * most // 4 * 4


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["power", "binsearch"])
@pytest.mark.parametrize(
    ("limits", "last", "limited_by"),
    [
        ({"max_batch_size": 60}, 60, "max_batch_size"),
        ({"max_batch_size": 64}, 64, "max_batch_size"),
        ({"max_batch_size": 1000}, 200, "dataset"),
        ({"max_batch_size": 3}, 3, "max_batch_size"),
        ({"max_batch_size": 50, "min_batch_size": 25}, 50, "max_batch_size"),
    ],
)
def test_other_limits(mode: str, limits: dict[str, int], last: int, limited_by: str) -> None:
    result = searched(1000, mode=mode, **limits)
    assert all(trial.fits for trial in result.trials)
    assert (result.trials[-1].batch_size, result.suggestion, result.limited_by) == (last, last, limited_by)


def test_what_a_trial_measures() -> None:
    result = searched(20)
    for trial in result.trials:
        if trial.fits:
            assert trial.samples_per_second == pytest.approx(trial.batch_size / trial.seconds)
            # On CPUs the resident memory of this process, which has imported torch.
            assert trial.memory is None or trial.memory > 50 * 2**20
        else:
            assert (trial.seconds, trial.samples_per_second, trial.memory) == (None, None, None)
    lines = str(result).splitlines()
    assert lines[0].split() == ["batch", "size", "per", "shard", "s/update", "samples/s", "memory"]
    assert lines[-2].split() == ["128", "32", "out", "of", "memory"]
    assert lines[-1] == "suggestion: 64, limited by memory"


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_batch_of_a_trial_is_full(accumulate: int) -> None:
    seen: list[int] = []

    def loss_fn(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen.append(len(inputs))
        return nn.functional.cross_entropy(model(inputs), target)

    # 23 samples with a short last batch of 5, of which one update is done.
    with finalized(updater_for(MLP, num_shards=1, loss_fn=loss_fn, accumulate=accumulate, audit_every=0)) as updater:
        updater.update()
        seen.clear()
        ls.find_batch_size(updater, min_batch_size=4, max_batch_size=16, num_updates=4)
    assert seen == [4] * 4 * accumulate + [8] * 4 * accumulate + [16] * 4 * accumulate


@pytest.mark.each_value
@pytest.mark.parametrize("begun", [0, 2])
@pytest.mark.parametrize("most", [3, 1000])
@pytest.mark.parametrize(
    "data", [{"last_batch": "drop"}, {"repeat": False}, {"num_workers": 1}, {"last_batch": "wrap", "shuffle": True}]
)
def test_the_run_is_as_it_was(data: dict[str, Any], most: int, begun: int) -> None:
    def run(*, search: bool) -> list[Any]:
        model = TRANSFORMER.model()
        batches = ls.BatchIterator(TRANSFORMER.data(23), 6, seed=3, **data)
        sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        updater = ls.ParallelUpdater(
            batches, sgd, model, devices=["cpu"] * 2, num_shards=3, loss_fn=fitting(most), seed=1
        )
        with finalized(updater):
            for _ in range(begun):
                updater.update()
            if search:
                before = ls.digest(updater.state_dict()), updater.recipe_fields()
                result = ls.find_batch_size(updater, max_batch_size=12)
                assert [trial.fits for trial in result.trials] == [True, most > 3]
                assert (ls.digest(updater.state_dict()), updater.recipe_fields()) == before
            seen = []
            for _ in range(2):
                updater.update()
                seen.append(batches.state_dict())
            settings = batches.batch_size, batches.last_batch, batches.repeat
            return [state_digest(updater), seen, settings, torch.rand(1).item()]

    with torch.random.fork_rng():
        torch.manual_seed(3)
        expected = run(search=False)
        torch.manual_seed(3)
        assert run(search=True) == expected


def _search_on_ranks(communicator: Communicator, where: str) -> tuple[Any, str, str]:
    """Search where memory ends on rank 1 alone, in a shard or in the step; return the result, and digests."""

    def failing(size: int) -> bool:
        return communicator.rank == 1 and size > 40

    def loss_fn(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if where == "shard" and failing(4 * len(inputs)):
            raise torch.OutOfMemoryError
        return nn.functional.cross_entropy(model(inputs), target)

    def run(*, search: bool) -> tuple[Any, str]:
        with finalized(
            updater_for(MLP, num_samples=200, num_shards=4, loss_fn=loss_fn, communicator=communicator)
        ) as updater:

            def step(*_: Any) -> None:
                if where == "step" and failing(updater.get_iterator("main").batch_size):
                    raise torch.OutOfMemoryError

            updater.get_optimizer("main").register_step_pre_hook(step)
            updater.update()
            found = ls.find_batch_size(updater, mode="binsearch", max_batch_size=100) if search else None
            for _ in range(3):
                updater.update()
            return found, state_digest(updater)

    _, expected = run(search=False)
    return *run(search=True), expected


@pytest.mark.parametrize("where", ["shard", pytest.param("step", marks=pytest.mark.slow)])
def test_memory_has_to_suffice_on_all_ranks(where: str) -> None:
    (first, *digests), (second, *others) = run_on_ranks(_search_on_ranks, 2, where)
    assert sizes(first)[:4] == [(8, 2, True), (16, 4, True), (32, 8, True), (64, 16, False)]
    assert (first.largest, first.suggestion, first.limited_by) == (40, 36, "memory")
    # Times and memory are the largest of all ranks.
    assert second == first
    assert len({*digests, *others}) == 1


def _failing_rank(communicator: Communicator, where: str) -> tuple[str, str]:
    def fail(at: str) -> None:
        if where == at and communicator.rank == 1:
            raise KeyError("planted")

    def loss_fn(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        fail("shard")
        return nn.functional.cross_entropy(model(inputs), target)

    with finalized(updater_for(MLP, num_shards=4, loss_fn=loss_fn, communicator=communicator)) as updater:
        updater.get_optimizer("main").register_step_pre_hook(lambda *_: fail("step"))
        with pytest.raises((KeyError, ls.ReplicaError, ls.PeerError)) as caught:
            ls.find_batch_size(updater, max_batch_size=16)
        communicator.barrier()
        return caught.type.__name__, str(caught.value)


@pytest.mark.parametrize("where", ["shard", "step"])
def test_another_error_of_a_rank_is_raised_on_all(where: str) -> None:
    (first, message), (second, _) = run_on_ranks(_failing_rank, 2, where)
    assert (first, second) == ("PeerError", "ReplicaError" if where == "shard" else "KeyError")
    assert message.startswith("Rank 1 raised")
    assert "planted" in message


ALLOCATION = """
import resource, sys
import torch
import lockstep as ls
from torch import nn
from torch.utils.data import TensorDataset

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        # A MiB per sample.
        return self.linear(x).repeat(1, 65536).view(len(x), -1, 4).mean(dim=1)

model = Wide()
data = TensorDataset(torch.randn(4096, 4), torch.randn(4096, 4))
updater = ls.ParallelUpdater(
    ls.BatchIterator(data, 8), torch.optim.SGD(model.parameters(), lr=0.1), model,
    devices=["cpu"], num_shards=1, loss_fn=ls.supervised(nn.functional.mse_loss),
)
updater.update()
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**28, in_use + 2**28))
result = ls.find_batch_size(updater, max_batch_size=4096, num_updates=2)
print(result.limited_by, result.largest)
updater.update()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the size of a process from /proc")
def test_an_allocation_that_fails_ends_the_search() -> None:
    done = zygote.run([sys.executable, "-c", ALLOCATION])
    assert done.returncode == 0, done.stderr
    limited_by, largest = done.stdout.split()
    # Forward and backward hold between one and five copies of a shard within the quarter GiB.
    assert limited_by == "memory"
    assert 16 <= int(largest) <= 256


def test_errors_of_an_allocator_end_the_search() -> None:
    with finalized(updater_for(MLP, num_shards=1, loss_fn=fitting(8, plain=True))) as updater:
        assert ls.find_batch_size(updater, max_batch_size=20).largest == 8


@pytest.mark.parametrize(
    ("search", "error", "message"),
    [
        ({"mode": "linear"}, ValueError, "`mode` must be 'power' or 'binsearch', got 'linear'"),
        ({"max_batch_size": None}, ValueError, "`max_batch_size` must be given on CPUs, got None. A system"),
        ({"max_batch_size": 0}, ValueError, "`max_batch_size` must be at least 1, got 0"),
        ({"min_batch_size": 0}, ValueError, "`min_batch_size` must be at least 1, got 0"),
        ({"min_batch_size": 151}, ValueError, r"`min_batch_size` must be at most `max_batch_size` \(150\), got 151"),
        ({"min_batch_size": 201, "max_batch_size": 300}, ValueError, r"the number of samples in the dataset \(200\)"),
        ({"num_updates": 1}, ValueError, "`num_updates` must be at least 2, got 1"),
        ({"margin": 1.0}, ValueError, r"`margin` must be at least 0 and less than 1, got 1.0"),
        ({"iterator": "other"}, KeyError, "other"),
        ({"min_batch_size": 100}, MemoryError, r"must fit into memory, got 100. Pass a smaller one, or more shards \("),
    ],
)
def test_what_is_wrong_is_refused(search: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        searched(20, **search)


def test_updaters_whose_batch_size_cannot_change_are_refused() -> None:
    with pytest.raises(TypeError, match="`updater` must be a ParallelUpdater, got a Linear"):
        ls.find_batch_size(nn.Linear(1, 1))  # type: ignore[arg-type]
    model = MLP.model()
    loader = torch.utils.data.DataLoader(MLP.data(), 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        finalized(ls.ParallelUpdater(loader, sgd, model, devices=1, loss_fn=cross_entropy)) as updater,
        pytest.raises(TypeError, match=r"must be a BatchIterator, .* got a IterableBatches. For the search, pass"),
    ):
        ls.find_batch_size(updater, max_batch_size=8)
    carried = ls.Carried(torch.zeros(1, 9, 2))
    with (
        finalized(updater_for(MLP, num_shards=1, carried=carried)) as updater,
        pytest.raises(ValueError, match=r"must not carry values from batch to batch, .* leave `carried` out"),
    ):
        ls.find_batch_size(updater, max_batch_size=8)


def test_an_error_of_another_kind_is_raised_and_the_run_restored() -> None:
    def loss_fn(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if len(inputs) > 8:
            raise ValueError("planted")
        return nn.functional.cross_entropy(model(inputs), target)

    with finalized(updater_for(MLP, num_shards=1, loss_fn=loss_fn)) as updater:
        before = ls.digest(updater.state_dict()), updater.get_iterator("main").batch_size
        with pytest.raises(ls.ReplicaError, match="planted"):
            ls.find_batch_size(updater, max_batch_size=20)
        assert (ls.digest(updater.state_dict()), updater.get_iterator("main").batch_size) == before
