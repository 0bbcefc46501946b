"""NNabla's updater does what its document says, with torch's optimizers and lockstep's communicators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.compat.nnabla import LAMB, SGDW, DynamicLossScalingUpdater
from tests.support.ranks import run_on_ranks


def data(num_batches: int = 1000, *, rank: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Give batches of a problem that a line solves."""
    generator = torch.Generator().manual_seed(rank)
    truth = torch.tensor([[1.0], [-2.0], [0.5]])
    for _ in range(num_batches):
        x = torch.randn(8, 3, generator=generator)
        yield x, x @ truth


class Training:
    """A model, its data and NNabla's updater around them."""

    def __init__(self, *, rank: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 1, bias=False)
        self.dtype = dtype
        self.stream = data(rank=rank)
        self.num_fed = 0
        solver = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.5)
        self.updater = DynamicLossScalingUpdater(solver, self.loss, self.feed, **options)

    def feed(self) -> None:
        self.num_fed += 1
        self.batch = next(self.stream)

    def loss(self) -> torch.Tensor:
        x, y = self.batch
        weight = self.model.weight.to(self.dtype)
        return nn.functional.mse_loss(x.to(self.dtype) @ weight.T, y.to(self.dtype))

    def weights_after(self, num_updates: int) -> torch.Tensor:
        for _ in range(num_updates):
            assert self.updater.update()
        return self.model.weight.detach()


def test_the_loop_of_the_document_trains_in_half_precision() -> None:
    training = Training(dtype=torch.float16, scale=2.0**15, N=10)
    scales = []
    for _ in range(100):
        training.updater.update()
        scales.append(training.updater.scale)
    assert torch.allclose(training.model.weight, torch.tensor([[1.0, -2.0, 0.5]]), atol=5e-2)
    # It went down at overflows and up after runs without, and a batch was lost at each overflow.
    assert len(set(scales)) > 2
    assert training.num_fed > 100


def test_the_scale_changes_no_bit() -> None:
    assert torch.equal(Training(scale=2.0**10).weights_after(5), Training(scale=1.0).weights_after(5))


def test_it_is_the_plain_loop() -> None:
    plain = Training()
    optimizer = plain.updater.solver
    for _ in range(5):
        plain.feed()
        optimizer.zero_grad()
        plain.loss().backward()
        optimizer.step()
    assert torch.equal(Training().weights_after(5), plain.model.weight)


def test_accumulation_sums() -> None:
    plain = Training()
    optimizer = plain.updater.solver
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(3):
            plain.feed()
            plain.loss().backward()
        optimizer.step()
    accumulating = Training(accum_grad=3)
    assert torch.equal(accumulating.weights_after(5), plain.model.weight)
    assert accumulating.num_fed == 15


def test_an_overflow_takes_new_data_and_lowers_the_scale() -> None:
    training = Training(scale=8.0)
    fed = training.feed

    def poison() -> None:
        fed()
        if training.num_fed <= 2:
            training.batch = (training.batch[0] / 0.0, training.batch[1])

    training.updater.data_feeder = poison
    assert training.updater.update()
    assert (training.num_fed, training.updater.scale) == (3, 2.0)


def test_it_gives_up_after_101_tries_and_stops_at_the_floor() -> None:
    training = Training()
    training.updater.loss = lambda: training.model.weight.sum() * float("inf")
    before = training.model.weight.clone()
    assert not training.updater.update()
    assert training.num_fed == 101
    assert training.updater.scale == 2.0**-14
    assert torch.equal(training.model.weight, before)


def original_scales(scale: float, finite: str, interval: int) -> list[float]:
    """Follow NNabla's own rule, which has no bounds, over tries that were finite ("1") or not."""
    counter, scales = 0, []
    for letter in finite:
        if letter == "0":
            scale, counter = scale / 2, 0
            continue
        if counter > interval:
            scale, counter = scale * 2, 0
        counter += 1
        scales.append(scale)
    return scales


@pytest.mark.parametrize("begin", [2.0**25, 2.0**40, 2.0**-20, 2.0**-40, 2.0**24, 2.0**-10])
@pytest.mark.parametrize("when", ["constructed", "set", "loaded"])
def test_a_scale_outside_of_the_default_bounds_moves_as_the_original_does(begin: float, when: str) -> None:
    # A pair of overflows first where the scale is large, so that it passes the bound in both directions.
    finite = "001111111111" if begin > 1 else "111111001111"
    training = Training(scale=begin if when == "constructed" else 8.0, N=1)
    if when == "set":
        training.updater.scale = begin
    elif when == "loaded":
        training.updater.load_state_dict({"scale": begin, "counter": 0})
    tries, fed = iter(finite), training.feed

    def feed() -> None:
        fed()
        if next(tries) == "0":
            training.batch = (training.batch[0] / 0.0, training.batch[1])

    training.updater.data_feeder = feed
    scales = []
    for _ in range(finite.count("1")):
        assert training.updater.update()
        scales.append(training.updater.scale)
    expected = original_scales(begin, finite, interval=1)
    within = 2.0**-14 <= begin <= 2.0**24
    assert scales == [min(max(scale, 2.0**-14), 2.0**24) if within else scale for scale in expected]


def test_bounds_that_are_given_hold() -> None:
    training = Training()
    training.updater.maximum, training.updater.scale = 2.0**20, 2.0**25
    with pytest.raises(ValueError, match=r"must lie in `minimum`\.\.`maximum`"):
        training.updater.update()


def test_all_arguments_are_writable_attributes() -> None:
    training, before = Training(), Training()
    other = Training(weight_decay=0.25, accum_grad=2)
    training.updater.weight_decay, training.updater.accum_grad = 0.25, 2
    assert torch.equal(training.weights_after(2), other.weights_after(2))
    assert not torch.equal(training.weights_after(1), before.weights_after(3))
    training.updater.solver = torch.optim.SGD(training.model.parameters(), lr=0.0)
    weights = training.model.weight.clone()
    assert torch.equal(training.weights_after(1), weights)


def test_growth_follows_the_attributes() -> None:
    training = Training(N=100)
    training.weights_after(5)
    training.updater.N = 1
    training.updater.scaling_factor = 4.0
    training.weights_after(1)
    assert training.updater.scale == 32.0
    training.updater.scale = 1.0
    training.weights_after(2)
    assert training.updater.scale == 4.0


@pytest.mark.parametrize(("interval", "whole"), [(1.5, 1), (2.0, 2), (0.9, 0), (-0.5, -1)])
def test_a_fraction_of_the_interval_counts_for_nothing(interval: float, whole: int) -> None:
    trainings = [Training(N=each) for each in (interval, whole)]
    for _ in range(8):
        for training in trainings:
            training.weights_after(1)
        fractional, plain = [training.updater.state_dict() for training in trainings]
        assert fractional == plain


def test_an_overflow_sets_the_counter_to_zero_with_any_interval() -> None:
    weight = nn.Parameter(torch.ones(1))
    factors = iter([float("inf")] * 101 + [1.0] * 6)
    solver = torch.optim.SGD([weight], lr=0.0)
    updater = DynamicLossScalingUpdater(solver, lambda: (next(factors) * weight).sum(), scale=2.0**104, N=-1)  # noqa: PLW0108
    assert not updater.update()
    assert updater.state_dict() == {"scale": 8.0, "counter": 0}
    updater.N = 1
    scales = []
    for _ in range(6):
        updater.update()
        scales.append(updater.scale)
    assert scales == [8.0, 8.0, 16.0, 16.0, 32.0, 32.0]


def test_an_interval_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="`interval` must be finite"):
        Training(N=float("inf"))


def test_decay_acts_on_true_gradients() -> None:
    weights = []
    for scale in (1.0, 1024.0):
        training = Training(scale=scale, weight_decay=0.25)
        weights.append(training.weights_after(3).clone())
    plain = Training()
    plain.updater.solver = torch.optim.SGD(plain.model.parameters(), 0.05, 0.5, weight_decay=0.25)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], plain.weights_after(3))
    assert not torch.equal(weights[0], Training().weights_after(3))


def test_a_solver_that_decays_by_itself_takes_the_rate_for_the_update() -> None:
    weight = nn.Parameter(torch.ones(1))
    solver = SGDW([weight], lr=0.5, weight_decay=0.5)
    updater = DynamicLossScalingUpdater(solver, (weight * 0).sum, weight_decay=0.25)
    updater.update()
    assert weight.item() == 0.75
    assert solver.state[weight]["velocity"].item() == 0.0
    assert solver.param_groups[0]["weight_decay"] == 0.5
    updater.weight_decay = None
    updater.loss = (weight * 0).sum
    updater.update()
    assert weight.item() == 0.375


def test_lamb_decays_inside_its_step_by_the_rate_of_the_update() -> None:
    weight = nn.Parameter(torch.tensor([4.0]))
    solver = LAMB([weight], lr=0.5, threshold=1.0, weight_decay=0.5)
    updater = DynamicLossScalingUpdater(solver, (weight * 0).sum, weight_decay=0.125)
    updater.update()
    # Without a gradient a step is λ·w, and below the threshold it is η·λ·w.
    assert weight.item() == 3.75
    assert solver.state[weight]["mean"].item() == 0.0
    assert solver.param_groups[0]["weight_decay"] == 0.5


def test_the_decay_reaches_float32_masters() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    optimizer = ls.MomentumSGD([weight], lr=2.0**-13, momentum=0.0)
    optimizer.use_fp32_update()
    updater = DynamicLossScalingUpdater(optimizer, (weight * 0).sum, weight_decay=1.0)
    assert updater.update()
    assert optimizer.masters.of(weight).item() == 1 - 2.0**-13


def test_a_graph_may_be_kept() -> None:
    weight = nn.Parameter(torch.ones(1))
    loss = (weight * torch.ones(1)).exp().sum()
    solver = torch.optim.SGD([weight], lr=0.0)
    keeping = DynamicLossScalingUpdater(solver, lambda: loss, clear_buffer=False)
    assert keeping.update()
    assert keeping.update()
    keeping.clear_buffer = True
    assert keeping.update()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        keeping.update()


def test_the_end_of_the_data_goes_through() -> None:
    training = Training()
    training.stream = data(1)
    assert training.updater.update()
    with pytest.raises(StopIteration):
        training.updater.update()


def test_a_saved_scale_goes_on() -> None:
    whole, first, second = Training(N=3), Training(N=3), Training(N=3)
    scales = []
    for _ in range(12):
        whole.updater.update()
        scales.append(whole.updater.scale)
    for _ in range(5):
        first.updater.update()
    second.updater.load_state_dict(first.updater.state_dict())
    resumed = []
    for _ in range(7):
        second.updater.update()
        resumed.append(second.updater.scale)
    assert resumed == scales[5:]
    assert len(set(resumed)) > 1
    with pytest.raises(ls.StateError, match="counter"):
        second.updater.load_state_dict({"scale": 1.0})


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.0}, {"scaling_factor": 1.0}, {"scale": float("nan")}, {"scale": 2.0**128}, {"scale": -1.0}],
)
def test_numbers_out_of_range_are_refused_at_construction(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        Training(**options)


def _train_on_rank(communicator: ls.ProcessCommunicator, bad_rank: int) -> tuple[Any, float, int]:
    training = Training(rank=communicator.rank, comm=communicator, scale=4.0)
    training.updater.grads = list(training.model.parameters())
    training.weights_after(2)
    if communicator.rank == bad_rank:
        good = training.updater.loss

        def bad_once() -> torch.Tensor:
            training.updater.loss = good
            return good() * float("inf")

        training.updater.loss = bad_once
    weights = training.weights_after(2)
    return weights.tolist(), training.updater.scale, training.num_fed


@pytest.mark.parametrize("bad_rank", [-1, 1])
def test_gradients_are_summed_over_the_ranks_of_a_lockstep_communicator(bad_rank: int) -> None:
    results = run_on_ranks(_train_on_rank, 2, bad_rank)
    assert results[0] == results[1]
    weights, scale, num_fed = results[0]
    assert (scale, num_fed) == ((4.0, 4) if bad_rank < 0 else (2.0, 5))
    alone, other = Training(), Training(rank=1)
    optimizer = alone.updater.solver
    for number in range(num_fed):
        optimizer.zero_grad()
        alone.feed()
        other.feed()
        alone.loss().backward()
        alone.batch = other.batch
        alone.loss().backward()
        if not (number == 2 and bad_rank >= 0):
            optimizer.step()
    assert weights == alone.model.weight.tolist()


def _train_by_given_gradients(communicator: ls.Communicator) -> list[float]:
    """Exchange the gradients that there were after a first backward."""
    training = Training(rank=communicator.rank, comm=communicator)
    training.feed()
    training.loss().backward()
    training.updater.grads = [each.grad for each in training.model.parameters()]
    weights: list[float] = training.weights_after(3).flatten().tolist()
    return weights


def test_gradients_that_were_given_stay_those_of_the_parameters() -> None:
    first, second = run_on_ranks(_train_by_given_gradients, 2)
    assert first == second


def test_a_gradient_that_there_is_not_yet_is_refused() -> None:
    training = Training(comm=ls.LocalCommunicator(), grads=[None])
    with pytest.raises(TypeError, match="`grads` must hold parameters or gradients, got None"):
        training.updater.update()


def test_gradients_themselves_may_be_exchanged() -> None:
    seen = []

    class Comm:
        def all_reduce(self, data: Any, division: bool = True, inplace: bool = True) -> None:
            seen.append((list(data), division, inplace))

    extra = torch.ones(2)
    unused = nn.Parameter(torch.ones(3))
    training = Training(comm=Comm(), grads=[extra, unused])
    training.weights_after(1)
    ((tensors, division, inplace),) = seen
    assert tensors[0] is extra
    assert torch.equal(tensors[1], torch.zeros(3))
    assert (division, inplace) == (False, False)
