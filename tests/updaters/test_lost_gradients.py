"""Gradients that an update would lose, or add by mistake, are refused; each cure gives the numbers of a plain loop."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import lockstep as ls
from tests.support.runs import finalized
from tests.support.small_updater import mean_of_output, updater_of

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(12, 5, generator=GENERATOR)
Y = torch.randn(12, 3, generator=GENERATOR)


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


@contextmanager
def training(
    model: nn.Module, loss_fn: Any, *, num_devices: int = 2, num_shards: int = 4, **options: Any
) -> Iterator[ls.ParallelUpdater]:
    updater = ls.ParallelUpdater(
        ls.BatchIterator(torch.utils.data.TensorDataset(X, Y), 12),
        options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * num_devices,
        num_shards=num_shards,
        loss_fn=loss_fn,
        **options,
    )
    with finalized(updater):
        yield updater


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


def trained(loss_fn: Any, **options: Any) -> torch.Tensor:
    model = network()
    with training(model, loss_fn, **options) as updater:
        updater.update()
    return gradients(model)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)  # float32, added up in another order


# Backward inside of a forward -------------------------------------------------------------------------


def adversarial(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    mse_loss(model(x), y).backward()
    return mse_loss(model(x.detach() + 0.1 * x.grad.sign()), y)


def by_grad(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(mse_loss(model(x), y), x)
    return mse_loss(model(x.detach() + 0.1 * gradient.sign()), y)


def cleared(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = adversarial(model, x, y)
    model.zero_grad()
    return loss


def in_parts(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mse_loss(model(x), y).backward()
    return model(x).square().mean()


def without_part(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> ls.Loss:
    mse_loss(model(x), y).backward()
    return ls.Loss(model(x).mean(), weight=0)


@pytest.mark.parametrize("loss_fn", [adversarial, in_parts, without_part])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_backward_in_a_loss_function_is_refused_and_nothing_moves(loss_fn: Any, num_shards: int) -> None:
    model = network()
    with training(model, loss_fn, num_shards=num_shards) as updater:
        before = ls.digest(updater.state_dict())
        for _ in range(2):
            with pytest.raises(ValueError, match=r"must not call `backward`.*'0.weight'.*torch.autograd.grad"):
                updater.update()
        assert ls.digest(updater.state_dict()) == before
        assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("loss_fn", [by_grad, cleared])
@pytest.mark.parametrize("num_shards", [1, 3, 4])
def test_the_gradient_of_the_input_gives_the_numbers_of_a_plain_loop(loss_fn: Any, num_shards: int) -> None:
    plain = network()
    # The sign does not depend on the scale of the loss.
    by_grad(plain, X, Y).backward()
    assert_close(trained(loss_fn, num_shards=num_shards), gradients(plain))


class BackwardInForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.body(x).square().sum().backward()
        output: torch.Tensor = self.body(x)
        return output


def test_backward_in_the_forward_of_a_group_or_a_module_is_refused() -> None:
    group = ls.ReplicaGroup(BackwardInForward(), devices=["cpu"] * 2)
    with pytest.raises(ValueError, match="must not call `backward`"):
        group.forward(X)
    group.close()
    module = ls.DataParallel(BackwardInForward(), devices=["cpu"] * 2)
    with pytest.raises(ValueError, match="must not call `backward`"):
        module(X)


# Gradients that are there before -----------------------------------------------------------------------


DTYPES = {"fp32": torch.float32, "bf16-true": torch.bfloat16}


def mean_in_float32(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return mse_loss(model(x.to(next(model.parameters()).dtype)).float(), y)


def penalty(model: nn.Module) -> torch.Tensor:
    return sum((each.square().sum() for each in model.parameters()), torch.zeros(()))


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_a_gradient_before_an_update_is_refused(precision: str) -> None:
    model = network().to(DTYPES[precision])
    with training(model, mean_in_float32, precision=precision) as updater:
        for number in range(3):
            penalty(model).backward()
            before = ls.digest(updater.state_dict())
            with pytest.raises(ls.OrderError, match=r"'0.weight'.*would be lost.*zero_grad"):
                updater.update()
            assert ls.digest(updater.state_dict()) == before
            # Set to zero or to None, it is given up.
            model.zero_grad(set_to_none=number % 2 == 0)
            assert updater.update().applied


def test_a_gradient_that_is_added_to_that_of_an_update_is_refused() -> None:
    model = network()
    with training(model, ls.supervised(mse_loss)) as updater:
        updater.update()
        penalty(model).backward()
        with pytest.raises(ls.OrderError, match="no optimizer has used"):
            updater.update()


def test_clipping_after_an_update_is_refused_and_before_the_step_is_not() -> None:
    model = network()
    with training(model, ls.supervised(mse_loss)) as updater:
        for _ in range(2):
            updater.compute_gradients((X, Y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            updater.apply_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), 0.001)
        with pytest.raises(ls.OrderError):
            updater.update()


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_a_gradient_without_a_step_is_not_replaced(precision: str) -> None:
    model = network().to(DTYPES[precision])
    with training(model, mean_in_float32, precision=precision) as updater:
        updater.compute_gradients((X[:6], Y[:6]))
        before = ls.digest(updater.state_dict())
        # Both can be read, but a step would be by the second one only.
        updater.compute_gradients((X[6:], Y[6:]))
        for _ in range(2):
            with pytest.raises(ls.OrderError, match="call `apply_gradients` after each"):
                updater.apply_gradients()
        assert ls.digest(updater.state_dict()) == before
        if precision == "fp32":
            model.zero_grad()
            updater.compute_gradients((X[6:], Y[6:]))
            assert updater.apply_gradients().applied
        else:
            updater.load_state_dict(updater.state_dict())
        for _ in range(2):
            updater.compute_gradients((X[6:], Y[6:]))
            assert updater.apply_gradients().applied


@pytest.mark.parametrize("precision", ["fp32", "bf16-true"])
def test_a_computed_gradient_is_not_replaced_by_an_update(precision: str) -> None:
    model = network().to(DTYPES[precision])
    with training(model, mean_in_float32, precision=precision) as updater:
        updater.compute_gradients((X[:6], Y[:6]))
        with pytest.raises(ls.OrderError, match="apply_gradients"):
            updater.update()
        assert updater.apply_gradients().applied
        assert updater.update().applied


def test_in_a_step_function_too_and_it_is_undone() -> None:
    def twice(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.compute_gradients(batch)
        if broken:
            updater.compute_gradients(batch)
        updater.apply_gradients()

    model, broken = network(), True
    with training(model, ls.supervised(mse_loss), step_fn=twice) as updater:
        before = ls.digest(updater.state_dict())
        with pytest.raises(ls.OrderError, match="apply_gradients"):
            updater.update()
        assert ls.digest(updater.state_dict()) == before
        broken = False
        assert updater.update().applied


def several_updaters(model: nn.Module) -> None:
    for _ in range(2):
        with training(model, ls.supervised(mse_loss)) as updater:
            updater.update()


def after_an_error(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def spoil(*_: object) -> None:
        for each in model.parameters():
            each.grad.mul_(0.5)
        if fails:
            raise RuntimeError("a hook")

    optimizer.register_step_pre_hook(spoil)
    with training(model, ls.supervised(mse_loss), optimizer=optimizer) as updater:
        fails = True
        with pytest.raises(RuntimeError, match="a hook"):
            updater.update()
        fails = False
        for _ in range(2):
            updater.update()


def moved_and_back(model: nn.Module) -> None:
    with training(model, ls.supervised(mse_loss)) as updater:
        for _ in range(2):
            updater.update()
            model.double().float()


def loaded(model: nn.Module) -> None:
    with training(model, ls.supervised(mse_loss)) as updater:
        state = updater.state_dict()
        for _ in range(2):
            updater.compute_gradients((X, Y))
            updater.load_state_dict(state)
        updater.update()


def overflowing(model: nn.Module) -> None:
    def loss_fn(replica: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = mse_loss(replica(x), y)
        loss.register_hook(lambda gradient: torch.where(gradient > 3, torch.inf, gradient))
        return loss

    with training(model, loss_fn, loss_scale=ls.DynamicLossScale(64.0), on_overflow="skip") as updater:
        assert not updater.update().applied
        for _ in range(6):
            updater.update()


def with_closure(model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    with training(model, ls.supervised(mse_loss), optimizer=optimizer) as updater:
        for _ in range(2):
            updater.update()


def stepped_by_hand(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with training(model, ls.supervised(mse_loss), optimizer=optimizer) as updater:
        for _ in range(2):
            updater.update()
            optimizer.zero_grad()
            penalty(model).backward()
            optimizer.step()


USES: list[Callable[[nn.Module], None]] = [
    several_updaters,
    after_an_error,
    moved_and_back,
    loaded,
    overflowing,
    with_closure,
    stepped_by_hand,
]


@pytest.mark.parametrize("use", USES)
def test_gradients_of_earlier_updates_are_in_nobodys_way(use: Callable[[nn.Module], None]) -> None:
    use(network())


# Weights and constants ---------------------------------------------------------------------------------


def learned_weight(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> ls.Loss:
    output = model(x)
    weights = output.sigmoid().mean(1)
    return ls.Loss((weights * (output - y).square().mean(1)).sum() / weights.sum(), weight=weights.sum())


def test_a_weight_that_requires_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`weight` of a Loss must not require a gradient.*BatchLoss"):
        trained(learned_weight)


def test_the_cure_gives_the_gradient_of_the_weighted_mean() -> None:
    def forward(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = model(x)
        weights = output.sigmoid().mean(1)
        return weights * (output - y).square().mean(1), weights

    plain = network()
    learned_weight(plain, X, Y).value.backward()
    loss_fn = ls.BatchLoss(forward, lambda outputs: outputs[0].sum() / outputs[1].sum())
    assert_close(trained(loss_fn), gradients(plain))


def only_large(model: nn.Module, x: torch.Tensor, y: torch.Tensor, *, constant: Any) -> Any:
    """The mean over the samples whose first target is above one; X[:3] has none."""
    kept = y[:, 0] > 1
    if not kept.any():
        return constant
    return ls.Loss(mse_loss(model(x)[kept], y[kept]), weight=int(kept.sum()))


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0)])
def test_a_shard_without_any_term_may_return_a_constant(weight: float | torch.Tensor) -> None:
    assert not all((part[:, 0] > 1).any() for part in Y.split(2))
    plain, kept = network(), Y[:, 0] > 1
    mse_loss(plain(X)[kept], Y[kept]).backward()

    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return only_large(model, x, y, constant=ls.Loss(torch.zeros(()), weight=weight))

    assert_close(trained(loss_fn, num_shards=6), gradients(plain))


def test_a_constant_without_a_weight_is_refused_with_the_cure() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        return only_large(model, x, y, constant=torch.zeros(()))

    with pytest.raises(ValueError, match=r"For a shard without any term return lockstep.Loss\(value, weight=0\)"):
        trained(loss_fn, num_shards=6)


def test_no_weight_that_was_a_tensor_is_forgotten() -> None:
    """One thread reads the flag, another sets it, and the first one must not clear it again."""
    done = threading.Event()

    class Slow(float):
        """A number whose class is only told when the other shard has reached its backward."""

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            assert done.wait(60)
            return float

    def loss_fn(model: nn.Module, x: torch.Tensor) -> ls.Loss:
        value = mean_of_output(model, x)
        if x[0, 0] == X[0, 0]:
            return ls.Loss(value, weight=Slow(6.0))
        value.register_hook(lambda _: done.set())
        return ls.Loss(value, weight=torch.tensor(6.0))

    model = nn.Linear(5, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    options: dict[str, Any] = {"devices": 2, "num_shards": 2, "batch_size": 12, "on_overflow": "skip"}
    # With an audit, devices compute the first update one after another.
    with updater_of(model, X, optimizer=optimizer, loss_fn=loss_fn, audit_every=0, **options) as updater:
        assert updater.why_it_waits is None
        updater.update()
        assert "weight that is a tensor" in str(updater.why_it_waits)


# Counts of the whole batch -----------------------------------------------------------------------------


class Dividing(nn.Module):
    """Divides by the number of tokens of the whole batch if it is given, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(2)
            self.body = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None) -> dict[str, torch.Tensor]:
        total = nn.functional.cross_entropy(self.body(x), labels, reduction="sum")
        return {"loss": total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)}


LABELS = (torch.arange(12) % 4).where(torch.arange(12) % 4 < 3, torch.tensor(-100))


@pytest.mark.parametrize("number", [9, torch.tensor(9), None])
def test_the_number_of_items_in_the_batch_does_not_divide_a_mean_over_tokens(number: Any) -> None:
    batch = {"x": X, "labels": LABELS, **({} if number is None else {"num_items_in_batch": number})}
    model, plain = Dividing(), Dividing()
    updater = ls.ParallelUpdater(
        ls.IterableBatches([batch]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * 2,
        num_shards=4,
        loss_fn=ls.token_mean(shifted=False),
        batch_dim={"x": 0, "labels": 0, "num_items_in_batch": None} if number is not None else 0,
    )
    with finalized(updater):
        updater.update()
    plain(X, LABELS)["loss"].backward()
    assert_close(gradients(model), gradients(plain))


@pytest.mark.parametrize(("name", "warns"), [("num_items_in_batch", True), ("temperature", False)])
def test_a_count_in_a_batch_that_divides_a_loss_is_noticed(name: str, warns: bool) -> None:
    batch = {"x": X, "labels": LABELS % 3, name: 9}
    updater = ls.ParallelUpdater(
        ls.IterableBatches([batch]),
        torch.optim.SGD((model := Dividing()).parameters(), lr=0.1),
        model,
        devices=["cpu"] * 2,
        num_shards=4,
        loss_fn=lambda replica, x, labels, temperature=1, **counts: (
            replica(x, labels, *counts.values())["loss"] / temperature
        ),
    )
    with finalized(updater), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        updater.update()
    assert ["must return the mean over the samples" in str(each.message) for each in caught] == [True] * warns


def test_a_number_in_a_batch_is_refused_with_the_cure() -> None:
    batch = {"x": X, "labels": LABELS, "num_items_in_batch": torch.tensor(9)}
    model = Dividing()
    updater = ls.ParallelUpdater(
        ls.IterableBatches([batch]),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"] * 2,
        num_shards=4,
        loss_fn=lambda replica, **given: replica(**given)["loss"],
    )
    with finalized(updater), pytest.raises(ValueError, match=r"Leave out a number .*token_mean\(\)"):
        updater.update()
