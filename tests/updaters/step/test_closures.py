"""Optimizers whose step computes gradients again: the plain loop's bits, any placement, all or nothing."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lockstep as ls
from tests.support.ranks import launch_on_ranks

GENERATOR = torch.Generator().manual_seed(1)
INPUTS, TARGETS = torch.randn(24, 5, generator=GENERATOR), torch.randint(3, (24,), generator=GENERATOR)
BATCHES = [(INPUTS[:12], TARGETS[:12]), (INPUTS[12:], TARGETS[12:])]
LINE_SEARCHES = [None, "strong_wolfe"]


def network(dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


def lbfgs(model: nn.Module, line_search: str | None = None) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=line_search)


def updater_of(
    model: nn.Module,
    optimizer: Any,
    *,
    devices: int = 1,
    num_shards: int = 1,
    loss_fn: Any = None,
    batches: Any = BATCHES,
    **options: Any,
) -> ls.ParallelUpdater:
    loss_fn = loss_fn or ls.supervised(cross_entropy)
    return ls.ParallelUpdater(
        batches,
        optimizer,
        model,
        devices=["cpu"] * devices,
        num_shards=num_shards,
        loss_fn=loss_fn,
        **options | {"audit_every": 0},
    )


@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.parametrize("line_search", LINE_SEARCHES)
def test_one_shard_has_the_bits_of_the_plain_loop(line_search: str | None) -> None:
    plain = network()
    expected = plain_loop(plain, lbfgs(plain, line_search))
    model = network()
    updater = updater_of(model, lbfgs(model, line_search))
    found = [updater.update().loss.item() for _ in range(4)]
    assert found == expected
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    # Every evaluation counts, as in the plain loop.
    assert model[1].num_batches_tracked > 4


@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.parametrize("line_search", LINE_SEARCHES)
def test_so_it_has_in_float64(line_search: str | None) -> None:
    # 11 samples: a loss of 53 bits times 11, divided by 11, is not always that loss.
    batch = (INPUTS[:11].double(), TARGETS[:11])
    plain, model = network().double(), network().double()
    optimizer = lbfgs(plain, line_search)
    plain_loop(plain, optimizer, [batch, batch])
    updater = updater_of(model, lbfgs(model, line_search), batches=[batch])
    for _ in range(4):
        updater.update()
    assert ls.digest(model, updater.get_all_optimizers()["main"]) == ls.digest(plain, optimizer)


def plain_loop(model: nn.Module, optimizer: torch.optim.LBFGS, batches: Any = BATCHES) -> list[float]:
    losses = []
    for number in range(4):
        inputs, targets = batches[number % 2]

        def closure(inputs: torch.Tensor = inputs, targets: torch.Tensor = targets) -> torch.Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            return loss.detach()

        losses.append(optimizer.step(closure).item())  # type: ignore[arg-type, attr-defined]
    return losses


def digest_after(devices: int, updates: int = 4) -> str:
    """Train with random numbers in the loss, which must be the same at every point of a line search."""
    model = network(dropout=0.3)
    optimizer = lbfgs(model, "strong_wolfe")
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    updater = updater_of(model, optimizer, devices=devices, num_shards=4, scheduler=scheduler)
    for _ in range(updates):
        updater.update()
    updater.finalize()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.1 ** (updates // 2))
    return ls.digest(updater.state_dict())


def test_any_devices_and_ranks_reach_the_same_bits() -> None:
    expected = digest_after(1)
    assert [digest_after(2), digest_after(3)] == [expected] * 2
    assert launch_on_ranks(digest_after, 2, 1) == [expected] * 2


@pytest.mark.parametrize("at", [1, 2])
def test_a_resumed_run_reaches_the_same_bits(at: int) -> None:
    models = [network(0.3) for _ in range(3)]
    whole, first, second = (updater_of(each, lbfgs(each), num_shards=2, devices=2) for each in models)
    for _ in range(4):
        whole.update()
    for _ in range(at):
        first.update()
    second.load_state_dict(first.state_dict())
    for _ in range(4 - at):
        second.update()
    assert ls.digest(second.state_dict()) == ls.digest(whole.state_dict())


@pytest.mark.parametrize("fails_at", [1, 2, 4])
def test_an_error_at_any_evaluation_changes_nothing(fails_at: int) -> None:
    def build(fails_at: int) -> ls.ParallelUpdater:
        calls = 0

        def loss_fn(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls == first_update_calls + fails_at:
                raise OSError("no such picture")
            return cross_entropy(model(inputs), targets)

        first_update_calls = 7  # LBFGS with 5 iterations evaluates at most 6 times
        model = network()
        updater = updater_of(model, lbfgs(model), loss_fn=loss_fn)
        updater.update()
        calls = first_update_calls
        return updater

    updater, undisturbed = build(fails_at), build(0)
    before = ls.digest(updater.state_dict())
    with pytest.raises(ls.ReplicaError, match="no such picture"):
        updater.update()
    assert ls.digest(updater.state_dict()) == before
    updater.update()
    undisturbed.update()
    assert ls.digest(updater.state_dict()) == ls.digest(undisturbed.state_dict())


@pytest.mark.parametrize("bad_at", [1, 3])
def test_a_gradient_that_is_not_finite_at_any_point_skips_the_update(bad_at: int) -> None:
    calls = 0

    def loss_fn(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = cross_entropy(model(inputs), targets)
        return loss * torch.nan if calls == bad_at else loss

    model = network()
    optimizer = lbfgs(model)
    updater = updater_of(model, optimizer, loss_fn=loss_fn)
    before = ls.digest(model, optimizer)
    with pytest.warns(ls.NonFiniteWarning, match=r"Update 1 was skipped: the gradient of '0\.weight'"):
        result = updater.update()
    assert not result.applied
    assert (result.nonfinite, float(result.observation()["skipped"])) == ("0.weight", 1.0)
    skipped = updater.last_skipped()
    assert skipped is not None
    assert (skipped.update, skipped.parameter) == (1, "0.weight")
    assert ls.digest(model, optimizer) == before
    assert (updater.iteration, updater.applied_updates) == (1, 0)
    assert updater.update().applied


def test_many_skipped_updates_are_an_error() -> None:
    calls = 0

    def loss_fn(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = cross_entropy(model(inputs), targets)
        return loss * torch.nan if calls % 2 == 0 else loss

    model = network()
    updater = updater_of(model, lbfgs(model), loss_fn=loss_fn, max_skipped=2)
    before = ls.digest(model)
    with pytest.warns(ls.NonFiniteWarning):
        updater.update()
    with pytest.raises(ls.NonFiniteError, match="2 updates in a row"):
        updater.update()
    assert (updater.iteration, ls.digest(model)) == (1, before)


def test_beside_another_optimizer_in_a_step_function() -> None:
    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        for name in ("first", "last"):
            updater.compute_gradients(batch, optimizer=name)
            updater.apply_gradients(name)

    def digest(devices: int) -> str:
        model = network()
        optimizers = {
            "first": torch.optim.Adam(model[0].parameters(), lr=0.01),
            "last": torch.optim.LBFGS(model[-1].parameters(), max_iter=3),
        }
        updater = updater_of(model, optimizers, devices=devices, num_shards=2, step_fn=step)
        first, before = updater.update(), model[0].weight.detach().clone()
        assert first.applied
        updater.update()
        assert not torch.equal(before, model[0].weight)
        return ls.digest(updater.state_dict())

    assert digest(1) == digest(2)


def test_what_is_refused_with_the_cure() -> None:
    model = network()
    others = {"first": torch.optim.SGD(model[0].parameters()), "last": torch.optim.LBFGS(model[-1].parameters())}
    refusals: list[tuple[str, Any, dict[str, Any]]] = [
        (r"`reduction` must be 'mean' for LBFGS, .* got 'sum'", lbfgs(model), {"reduction": "sum"}),
        (r"`step_fn` must be given for several optimizers one of which is LBFGS \('last'\)", others, {}),
        (r"`accumulate` must be 1", lbfgs(model), {"accumulate": 2}),
    ]
    for message, optimizer, options in refusals:
        with pytest.raises(ValueError, match=message):
            updater_of(model, optimizer, **options)
    half = network().to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"`precision` must be 'fp32', 'bf16' or 'fp16' for LBFGS"):
        updater_of(half, lbfgs(half), precision="bf16-true")


def test_its_step_outside_of_an_update_is_refused() -> None:
    model = network()
    updater = updater_of(model, lbfgs(model))
    updater.compute_gradients(BATCHES[0])
    with pytest.raises(ls.OrderError, match=r"must be called by a step function for LBFGS, .* Call `update` instead"):
        updater.apply_gradients()


class SharpnessAware(torch.optim.Optimizer):
    """Moves uphill by the gradient that is there, computes it again, and steps from where it was."""

    def __init__(self, parameters: Any, *, through_data: bool, clears: bool | None) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.through_data, self.clears = through_data, clears

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        before = [each.clone() for each in parameters]
        norm = torch.stack([each.grad.norm() for each in parameters]).norm() + 1e-12
        for each in parameters:
            (each.data if self.through_data else each).add_(each.grad, alpha=0.05 / norm.item())
        if self.clears is not None:
            self.zero_grad(set_to_none=self.clears)
        closure()
        for each, old in zip(parameters, before, strict=True):
            each.copy_(old - 0.1 * each.grad)


class Clearing(torch.optim.SGD):
    """Clears the gradients before it computes them, at the same weights."""

    def __init__(self, parameters: Any, *, set_to_none: bool) -> None:
        super().__init__(parameters, lr=0.1)
        self.set_to_none = set_to_none

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        self.zero_grad(set_to_none=self.set_to_none)
        return super().step(closure)


@pytest.mark.usefixtures("one_intra_op_thread")
@pytest.mark.parametrize(
    "optimizer",
    [
        *(
            partial(SharpnessAware, through_data=data, clears=clears)
            for data in (0, 1)
            for clears in (None, True, False)
        ),
        *(partial(Clearing, set_to_none=each) for each in (True, False)),
    ],
)
def test_a_step_that_moves_weights_or_clears_gradients_first_has_the_bits_of_the_plain_loop(optimizer: Any) -> None:
    plain, model = network(), network()
    stepped = optimizer(plain.parameters())
    for inputs, targets in [*BATCHES, *BATCHES]:

        def closure() -> torch.Tensor:
            stepped.zero_grad()
            with torch.enable_grad():
                loss = cross_entropy(plain(inputs), targets)  # noqa: B023 - called in this turn
            loss.backward()
            return loss

        # As it is used everywhere: the gradient is there when the step begins.
        if isinstance(stepped, SharpnessAware):
            closure()
        stepped.step(closure)
    updater = updater_of(model, optimizer(model.parameters()))
    for _ in range(4):
        updater.update()
    assert ls.digest(dict(model.named_parameters())) == ls.digest(dict(plain.named_parameters()))
    if isinstance(stepped, SharpnessAware):
        assert ls.digest(model) == ls.digest(plain)
    split = network()
    other = updater_of(split, optimizer(split.parameters()), devices=2, num_shards=2)
    for _ in range(4):
        other.update()
    two = network()
    same = updater_of(two, optimizer(two.parameters()), devices=1, num_shards=2)
    for _ in range(4):
        same.update()
    assert ls.digest(split) == ls.digest(two)


class Asserting(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "Sharpness-aware minimization requires closure, but it was not provided"
        return super().step(closure)


def test_a_step_that_requires_a_closure_and_does_not_say_so_is_explained() -> None:
    model = network()
    updater = updater_of(model, Asserting(model.parameters(), lr=0.1))
    before = ls.digest(dict(model.named_parameters()))
    with pytest.raises(ValueError, match="got Asserting, whose step was called without a closure and raised Assertion"):
        updater.update()
    assert ls.digest(dict(model.named_parameters())) == before


def test_an_error_of_this_library_stays_one() -> None:
    class Quoting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # noqa: ARG002 - the interface
            raise ls.LockstepError("Rank 1 raised in a closure.")

    model = network()
    with pytest.raises(ls.LockstepError, match="Rank 1 raised in a closure"):
        updater_of(model, Quoting(model.parameters(), lr=0.1)).update()
