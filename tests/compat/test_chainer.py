"""Chainer's names do what Chainer's documents say, on CPU devices."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.compat import chainer
from tests.support.ranks import run_on_ranks

TWO = {"main": "cpu", "second": "@numpy"}


class Classifier(nn.Module):
    """A model that returns its own loss, as Chainer's do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(x), t)

    def half_loss(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self(x, t) / 2


def dataset(n: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(n, 4, generator=generator), torch.randint(3, (n,), generator=generator))


def batches(batch_size: int = 8) -> ls.BatchIterator:
    return ls.BatchIterator(dataset(), batch_size)


@pytest.fixture
def updaters() -> Iterator[Any]:
    """Make updaters, and end their threads."""
    made: list[chainer.ParallelUpdater] = []

    def make(*args: Any, **options: Any) -> chainer.ParallelUpdater:
        made.append(chainer.ParallelUpdater(*args, **options))
        return made[-1]

    yield make
    for updater in made:
        updater.finalize()


def trained(make: Any, num_updates: int = 5, **options: Any) -> nn.Module:
    model = Classifier()
    optimizer = chainer.CorrectedMomentumSGD(lr=0.1).setup(model)
    updater = make(batches(), optimizer, **{"devices": TWO, **options})
    for _ in range(num_updates):
        updater.update()
    return model


def plain_sum_of_parts(num_updates: int = 5, factor: float = 1.0) -> nn.Module:
    """Write Chainer's update out: parts dealt round robin, their mean losses' gradients added up."""
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    iterator = batches()
    for _ in range(num_updates):
        x, t = ls.collate(next(iterator))
        optimizer.zero_grad()
        for part in range(2):
            (factor * model(x[part::2].contiguous(), t[part::2].contiguous())).backward()
        optimizer.step()
    return model


def equal(ours: nn.Module, theirs: nn.Module) -> bool:
    return ls.digest(ours) == ls.digest(theirs)


def close(ours: nn.Module, theirs: nn.Module) -> bool:
    """The order of two additions may differ, and the sum is taken of gradients times powers of two."""
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


class TestParallelUpdater:
    @pytest.mark.usefixtures("one_intra_op_thread")
    def test_it_sums_the_gradients_of_parts_dealt_round_robin(self, updaters: Any) -> None:
        ours = trained(updaters)
        assert close(ours, plain_sum_of_parts())
        assert not close(ours, plain_sum_of_parts(factor=0.5))

    def test_a_dict_of_one_iterator_and_optimizer_is_the_same(self, updaters: Any) -> None:
        model = Classifier()
        optimizer = chainer.CorrectedMomentumSGD(lr=0.1).setup(model)
        updater = updaters({"main": batches()}, {"main": optimizer}, devices=TWO)
        for _ in range(5):
            updater.update()
        assert equal(model, trained(updaters))
        assert updater.get_optimizer("main") is optimizer
        assert updater.get_all_optimizers() == {"main": optimizer}
        assert updater.get_iterator("main").epoch == 1

    def test_models_are_replicas(self, updaters: Any) -> None:
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replicas = {"main": model, "second": copy.deepcopy(model)}
        updater = updaters(batches(), optimizer, models=replicas, devices=TWO)
        for _ in range(5):
            updater.update()
        assert equal(model, trained(updaters))

    def test_a_loss_function_gets_the_replica(self, updaters: Any) -> None:
        seen = []

        def loss_func(replica: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            seen.append(replica)
            return replica(x, t)

        ours = trained(updaters, loss_func=loss_func)
        assert equal(ours, trained(updaters))
        assert len({id(replica) for replica in seen}) == 2
        assert all(replica is not ours for replica in seen)

    def test_a_method_of_the_model_is_called_on_its_replica(self, updaters: Any) -> None:
        model = Classifier()
        optimizer = chainer.CorrectedMomentumSGD(lr=0.1).setup(model)
        updater = updaters(batches(), optimizer, devices=TWO, loss_func=model.half_loss)
        for _ in range(5):
            updater.update()
        halved = trained(updaters, loss_func=lambda replica, x, t: replica(x, t) / 2)
        assert equal(model, halved)
        assert not equal(model, trained(updaters))

    def test_the_converter_gets_the_samples_of_each_device(self, updaters: Any) -> None:
        seen = []

        def converter(samples: Any, device: torch.device) -> Any:
            seen.append((tuple(samples.indices), device.type))
            return chainer.concat_examples(samples, device)

        trained(updaters, 1, converter=converter)
        assert sorted(seen) == [((0, 2, 4, 6), "cpu"), ((1, 3, 5, 7), "cpu")]

    def test_a_power_of_two_as_loss_scale_changes_no_bit(self, updaters: Any) -> None:
        assert equal(trained(updaters, loss_scale=128.0), trained(updaters))

    def test_the_scale_set_on_the_optimizer_is_followed(self, updaters: Any) -> None:
        model = Classifier()
        optimizer = chainer.CorrectedMomentumSGD(lr=0.1).setup(model)
        optimizer.loss_scaling()
        updater = updaters(batches(), optimizer, devices=TWO)
        for _ in range(3):
            updater.update()
        assert updater.loss_scale.factor == 8.0
        assert equal(model, trained(updaters, 3))

    def test_of_several_scales_that_of_the_main_optimizer_is_followed(self, updaters: Any) -> None:
        networks = {"main": Classifier(), "second": Classifier()}
        parameters = [*networks["main"].parameters()]
        named = {"main": ls.MomentumSGD(parameters[:1], lr=0.1), "other": ls.MomentumSGD(parameters[1:], lr=0.1)}
        for optimizer, factor in zip(named.values(), (16.0, 4.0), strict=True):
            optimizer.loss_scaling(scale=factor)
        updater = updaters(batches(), named, models=networks, devices=TWO)
        assert updater.loss_scale.factor == 16.0

    def test_an_overflow_skips_its_batch(self, updaters: Any) -> None:
        model, calls = Classifier(), list[int]()
        optimizer = chainer.CorrectedMomentumSGD(lr=0.1).setup(model)
        optimizer.loss_scaling()

        def loss_func(net: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return net(x, t) * float("inf")

        updater = updaters(batches(), optimizer, devices=TWO, loss_func=loss_func)
        before = ls.digest(model)
        result = updater.update()
        assert (bool(result.applied), result.tries, calls, updater.iteration) == (False, 1, [4, 4], 1)
        assert ls.digest(model) == before

    @pytest.mark.parametrize("auto", [True, False])
    def test_auto_new_epoch(self, updaters: Any, auto: bool) -> None:
        model = Classifier()
        optimizer = chainer.CorrectedMomentumSGD().setup(model)
        updater = updaters(batches(), optimizer, devices=TWO, auto_new_epoch=auto)
        for _ in range(3):
            updater.update()
        assert updater.epoch == 1
        assert optimizer.epoch == int(auto)
        assert optimizer.use_auto_new_epoch is auto

    def test_a_saved_state_goes_on(self, updaters: Any) -> None:
        state: dict[str, Any] = {}
        model = Classifier()
        updater = updaters(batches(), chainer.CorrectedMomentumSGD(lr=0.1).setup(model), devices=TWO)
        for _ in range(2):
            updater.update()
        updater.serialize(state.setdefault)
        assert list(state) == ["updater"]
        resumed = Classifier()
        updater = updaters(batches(), chainer.CorrectedMomentumSGD(lr=0.1).setup(resumed), devices=TWO)
        updater.serialize(state.setdefault)
        for _ in range(3):
            updater.update()
        assert equal(resumed, trained(updaters))

    def test_a_trainer_runs_it(self, updaters: Any, tmp_path: Path) -> None:
        """The wiring of Chainer's page: iterator, optimizer, updater, trainer."""
        model = Classifier()
        optimizer = chainer.MomentumSGD(lr=0.05).setup(model)
        updater = updaters(batches(), optimizer, devices=TWO, loss_scale=16.0)
        connected = []
        updater.connect_trainer = connected.append
        trainer = ls.Trainer(updater, (2, "epoch"), out=tmp_path)
        trainer.extend(ls.extensions.LogReport(trigger=(1, "epoch")))
        assert connected == [trainer]
        before = ls.digest(model)
        trainer.run()
        assert (updater.iteration, updater.epoch, optimizer.t, optimizer.epoch) == (6, 2, 6, 2)
        assert ls.digest(model) != before
        assert (tmp_path / "log.jsonl").exists()

    def test_a_finalized_updater_has_let_go_of_its_iterators(self, updaters: Any) -> None:
        class Counting(ls.BatchIterator):
            finalized = 0

            def finalize(self) -> None:
                self.finalized += 1
                super().finalize()

        first, second = Counting(dataset(), 4), Counting(dataset(), 4)
        optimizer = chainer.MomentumSGD().setup(Classifier())
        updater = updaters({"main": first, "second": second}, optimizer, devices=TWO)
        updater.update()
        updater.finalize()
        assert (first.finalized, second.finalized) == (1, 1)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({}, ValueError, "`devices` must be given"),
            ({"devices": {"a": "cpu"}}, KeyError, "main"),
            ({"devices": TWO, "models": {"main": Classifier()}}, ValueError, "must have the names of"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, options: dict[str, Any], error: type[Exception], message: str) -> None:
        optimizer = chainer.MomentumSGD().setup(Classifier())
        with pytest.raises(error, match=message):
            chainer.ParallelUpdater(batches(), optimizer, **options)

    def test_an_optimizer_without_a_target_is_refused(self) -> None:
        for optimizer in (chainer.MomentumSGD(), torch.optim.SGD(Classifier().parameters())):
            with pytest.raises(ValueError, match="`models` must be given"):
                chainer.ParallelUpdater(batches(), optimizer, devices=TWO)


class TestCorrectedMomentumSGD:
    def test_setup_begins_anew_and_keeps_what_was_set(self) -> None:
        optimizer = chainer.CorrectedMomentumSGD(lr=0.5, momentum=0.5)
        optimizer.set_loss_scale(4.0)
        optimizer.lr = 0.25
        first, second = Classifier(), nn.Linear(2, 1)
        assert optimizer.setup(first) is optimizer
        optimizer.add_hook(ls.optim.hooks.WeightDecay(0.5))
        optimizer.update(first, *dataset()[:4])
        optimizer.new_epoch()
        assert (optimizer.t, optimizer.epoch, len(optimizer.state)) == (1, 1, 4)
        optimizer.setup(second)
        assert (optimizer.t, optimizer.epoch, len(optimizer.state)) == (0, 0, 0)
        assert optimizer.target is second
        assert (optimizer.lr, optimizer.momentum, optimizer.loss_scale.factor) == (0.25, 0.5, 4.0)
        optimizer.add_hook(ls.optim.hooks.WeightDecay(0.5))  # the name is free again

    def test_before_setup_calls_that_need_a_model_are_refused(self) -> None:
        optimizer = chainer.CorrectedMomentumSGD()
        calls = [optimizer.update, optimizer.check_nan_in_grads, lambda: optimizer.add_hook(print)]
        for call in calls:
            with pytest.raises(ls.OrderError, match="`setup` must be called"):
                call()
        with pytest.raises(TypeError, match="`link` must be a torch"):
            optimizer.setup(1)

    def test_a_parameter_without_gradient_moves_by_momentum(self) -> None:
        model = nn.Linear(1, 1, bias=False)
        optimizer = chainer.CorrectedMomentumSGD(lr=1.0, momentum=0.5).setup(model)
        model.weight.data.fill_(0.0)
        model.weight.grad = torch.ones(1, 1)
        optimizer.update()
        model.weight.grad = None
        optimizer.update()
        assert model.weight.item() == -1.5
        assert model.weight.grad is not None

    def test_missing_gradients_become_zeros(self) -> None:
        model = Classifier()
        optimizer = chainer.CorrectedMomentumSGD().setup(model)
        optimizer.reallocate_cleared_grads()
        assert all(not parameter.grad.any() for parameter in model.parameters())

    def test_a_hook_may_ask_for_each_parameter_in_chainers_words(self) -> None:
        class Each:
            name, timing, call_for_each_param = "Each", "post", True

            def __init__(self) -> None:
                self.calls: list[Any] = []

            def __call__(self, rule: Any, parameter: torch.Tensor) -> None:
                self.calls.append((rule.t, parameter))

        model, each, once = Classifier(), Each(), []
        optimizer = chainer.CorrectedMomentumSGD().setup(model)
        optimizer.add_hook(each)
        optimizer.add_hook(lambda hooked: once.append(hooked.t), name="once")
        optimizer.update(model, *dataset()[:4])
        assert [t for t, _ in each.calls] == [1] * 4
        assert [parameter for _, parameter in each.calls] == list(model.parameters())
        assert once == [0]
        optimizer.remove_hook("Each")
        optimizer.call_hooks()
        assert (len(each.calls), once) == (4, [0, 1])
        optimizer.call_hook(each)
        optimizer.call_hook(once.append)
        assert (len(each.calls), once[2:]) == (8, [optimizer])

    def test_hooks_of_one_timing_are_called(self) -> None:
        optimizer, calls = chainer.CorrectedMomentumSGD().setup(nn.Linear(2, 1)), []
        for timing in ("post", "pre"):
            optimizer.add_hook(lambda _, timing=timing: calls.append(timing), name=timing, timing=timing)
        optimizer.call_hooks()
        optimizer.call_hooks("post")
        assert calls == ["pre", "post"]

    def test_the_loss_function_gets_what_update_gets(self) -> None:
        model = nn.Linear(2, 1)
        optimizer = chainer.CorrectedMomentumSGD().setup(model)
        seen: list[Any] = []

        def loss(*args: Any, **kwds: Any) -> torch.Tensor:
            seen.append((args, kwds))
            return model.weight.sum()

        assert optimizer.update(loss, 1, 2, scale=3) is not None
        assert seen == [((1, 2), {"scale": 3})]

    def test_gradients_that_are_not_finite_are_named(self) -> None:
        model = Classifier()
        optimizer = chainer.CorrectedMomentumSGD().setup(model)
        optimizer.loss_scaling(interval=10)
        with warnings.catch_warnings():
            optimizer.check_nan_in_grads()
        assert optimizer.is_safe_to_update()
        model.layers[2].bias.grad = torch.full((3,), float("nan"))
        with pytest.warns(UserWarning, match=r"'layers\.2\.bias' is not finite"):
            optimizer.check_nan_in_grads()
        assert not optimizer.is_safe_to_update()
        before = ls.digest(model)
        optimizer.update()
        assert (ls.digest(model), optimizer.t) == (before, 0)
        assert optimizer.loss_scale.factor == 1.0
        model.layers[2].bias.grad.zero_()
        optimizer.update_loss_scale()
        assert optimizer.loss_scale.factor == 2.0**0.1

    def test_an_update_rule_moves_one_parameter(self) -> None:
        model, other = Classifier(), Classifier()
        optimizer = chainer.CorrectedMomentumSGD(lr=0.5).setup(model)
        whole = chainer.CorrectedMomentumSGD(lr=0.5).setup(other)
        rules = {parameter: optimizer.create_update_rule() for parameter in model.parameters()}
        for _ in range(3):
            for parameter, twin in zip(rules, other.parameters(), strict=True):
                parameter.grad, twin.grad = parameter.detach() ** 2, twin.detach() ** 2
                rules[parameter].update(parameter)
            whole.update()
        assert equal(model, other)
        assert {rule.t for rule in rules.values()} == {3}
        last = rules[parameter]
        last.enabled = False
        last.update(parameter)
        assert (last.t, ls.digest(model)) == (3, ls.digest(other))

    def test_an_update_rule_counts_the_updates_of_its_parameter(self) -> None:
        model, seen = nn.Linear(1, 1), []
        optimizer = chainer.MomentumSGD(lr=0.5).setup(model)
        rule = model.weight.update_rule
        rule.add_hook(lambda rule, _: seen.append(("pre", rule.t)), name="before")
        rule.add_hook(lambda rule, _: seen.append(("post", rule.t)), name="after", timing="post")

        def update() -> tuple[int, int]:
            optimizer.update(lambda x: model(x).mean(), torch.ones(2, 1))
            return rule.t, model.bias.update_rule.t

        assert (rule.t, update()) == (0, (1, 1))
        rule.enabled = False
        assert update() == (1, 2)
        rule.enabled = True
        assert update() == (2, 3)
        assert seen == [("pre", 1), ("post", 1), ("pre", 2), ("post", 2)]
        # An update that is skipped because of an overflow is not counted.
        optimizer.set_loss_scale(1.0)
        optimizer.update(lambda x: model(x).mean() * float("inf"), torch.ones(2, 1))
        assert (rule.t, model.bias.update_rule.t) == (2, 3)

        def fail(*_: object) -> None:
            raise OSError

        rule.add_hook(fail, name="fail")
        with pytest.raises(OSError):  # noqa: PT011 - raised above
            update()
        assert rule.t == 2

    def test_an_update_rule_continues_to_count_after_a_resume(self) -> None:
        counts = []
        state: dict[str, Any] = {}
        for _ in range(2):
            model = nn.Linear(1, 1)
            optimizer = chainer.MomentumSGD(lr=0.5).setup(model)
            model.bias.update_rule.enabled = False
            if state:
                optimizer.serialize(state.setdefault)
            for _ in range(3):
                optimizer.update(lambda x, model=model: model(x).mean(), torch.ones(2, 1))
            counts.append((model.weight.update_rule.t, model.bias.update_rule.t))
            optimizer.serialize(state.setdefault)
        assert counts == [(3, 0), (6, 0)]

    def test_options_of_a_parameter_are_saved_copied_and_refused(self) -> None:
        model = Classifier()
        optimizer = chainer.MomentumSGD(lr=0.5).setup(model)
        first, *_, last = model.parameters()
        last.update_rule.hyperparam.lr = 0.25
        assert (first.update_rule.hyperparam.lr, last.update_rule.hyperparam.lr) == (0.5, 0.25)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.update()
        twin = Classifier()
        copy_of = chainer.MomentumSGD(lr=0.5).setup(twin)
        with pytest.raises(ls.StateError, match="groups"):
            copy_of.load_state_dict(optimizer.state_dict())
        [*twin.parameters()][-1].update_rule.hyperparam.lr = 0.125
        copy_of.load_state_dict(optimizer.state_dict())
        assert [group["lr"] for group in copy_of.param_groups] == [0.5, 0.25]
        optimizer, model = copy.deepcopy((optimizer, model))
        optimizer.lr = 0.0625
        assert [group["lr"] for group in optimizer.param_groups] == [0.0625, 0.25]
        assert [len(group["params"]) for group in optimizer.setup(model).param_groups] == [4]
        with pytest.raises(AttributeError, match=r"The options are .*, got 'alpha'"):
            last.update_rule.hyperparam.alpha = 1.0
        with pytest.raises(AttributeError, match=r"The options are .*, got 'alpha'"):
            _ = last.update_rule.hyperparam.alpha
        with pytest.raises(ValueError, match="`lr` must be finite and at least 0, got -1"):
            last.update_rule.hyperparam.lr = -1.0
        with pytest.raises(ls.OrderError, match=r"`parameter.update_rule` must be used"):
            optimizer.create_update_rule().hyperparam.lr = 1.0

    def test_master_weights_come_after_the_options_of_parameters(self) -> None:
        model = nn.Linear(2, 1, dtype=torch.float16)
        optimizer = chainer.MomentumSGD(lr=0.5).setup(model)
        optimizer.use_fp32_update()
        with pytest.raises(ls.OrderError, match="`use_fp32_update` must be called after"):
            model.bias.update_rule.hyperparam.lr = 0.25
        model = nn.Linear(2, 1, dtype=torch.float16)
        optimizer = chainer.MomentumSGD(lr=2.0**-12).setup(model)
        model.bias.update_rule.hyperparam.lr = 0.25
        optimizer.use_fp32_update()
        before = model.bias.item()
        model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
        optimizer.update()
        assert model.bias.item() == torch.tensor(before - 0.25).half().item()

    def test_cleared_gradients_are_all_there_is(self) -> None:
        with pytest.warns(DeprecationWarning, match="changes nothing"):
            chainer.CorrectedMomentumSGD().use_cleargrads()

    @pytest.mark.parametrize("late", [False, True])
    def test_half_precision_moves_float32_masters(self, late: bool) -> None:
        model = nn.Linear(1, 1, bias=False, dtype=torch.float16)
        model.weight.data.fill_(1.0)
        optimizer = chainer.CorrectedMomentumSGD(lr=2.0**-12, momentum=0.0)
        if not late:
            optimizer.use_fp32_update()
        optimizer.setup(model)
        if late:
            optimizer.use_fp32_update()
        for _ in range(4):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.update()
        assert optimizer.masters.of(model.weight).item() == 1 - 4 * 2.0**-12
        assert model.weight.item() == 1 - 2.0**-10

    def test_an_epoch_belongs_to_the_updater_that_said_so(self) -> None:
        optimizer = chainer.CorrectedMomentumSGD().setup(Classifier())
        assert optimizer.use_auto_new_epoch is False
        with pytest.raises(ls.OrderError):
            optimizer.new_epoch(auto=True)
        optimizer.use_auto_new_epoch = True
        optimizer.new_epoch(auto=True)
        assert optimizer.epoch == 1
        with pytest.raises(ls.OrderError):
            optimizer.new_epoch()

    def test_a_saved_state_goes_on(self) -> None:
        def run(optimizer: chainer.CorrectedMomentumSGD, num_updates: int) -> None:
            for _ in range(num_updates):
                optimizer.update(optimizer.target, *dataset()[:4])

        whole, first, second = Classifier(), Classifier(), Classifier()
        run(chainer.CorrectedMomentumSGD(lr=0.5).setup(whole), 5)
        state: dict[str, Any] = {}
        before = chainer.CorrectedMomentumSGD(lr=0.5).setup(first)
        run(before, 2)
        before.serialize(state.setdefault)
        assert list(state) == ["optimizer"]
        second.load_state_dict(first.state_dict())
        after = chainer.CorrectedMomentumSGD().setup(second)
        after.serialize(state.setdefault)
        run(after, 3)
        assert (after.t, after.lr) == (5, 0.5)
        assert equal(second, whole)

    def test_optimizers_are_compared_as_objects(self) -> None:
        one, other = chainer.CorrectedMomentumSGD(), chainer.CorrectedMomentumSGD()
        assert one == one  # noqa: PLR0124 - that is what is tested
        assert one != other
        for compare in (operator.lt, operator.le, operator.gt, operator.ge):
            with pytest.raises(TypeError):
                compare(one, other)

    def test_a_copy_has_the_target(self) -> None:
        optimizer = chainer.CorrectedMomentumSGD().setup(Classifier())
        assert copy.copy(optimizer).target is optimizer.target
        assert isinstance(copy.deepcopy(optimizer).target, Classifier)


def test_samples_are_stacked_and_padded() -> None:
    padded = chainer.concat_examples([(torch.ones(2), 1), (torch.ones(1), 2)], None, (0.0, 0))
    assert torch.equal(padded[0], torch.tensor([[1.0, 1.0], [1.0, 0.0]]))
    assert torch.equal(padded[1], torch.tensor([1, 2]))


def test_the_derivation_step_by_step() -> None:
    """With v = η·u, equation 10 with the correction for a new η is equation 9, at every step."""
    generator = torch.Generator().manual_seed(2)
    rates = [0.1, 0.1, 0.8, 0.8, 0.05, 0.4, 0.4, 0.01]
    grads = torch.randn(len(rates), 5, generator=generator, dtype=torch.float64)
    free, plain = (nn.ParameterList([torch.ones(5, dtype=torch.float64)]) for _ in range(2))
    optimizer = chainer.CorrectedMomentumSGD(momentum=0.9).setup(free)
    uncorrected = chainer.MomentumSGD(momentum=0.9).setup(plain)
    weight, v = torch.ones(5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    before = rates[0]
    for rate, grad in zip(rates, grads, strict=True):
        v = 0.9 * (rate / before) * v + rate * grad
        weight -= v
        before = optimizer.lr = uncorrected.lr = rate
        free[0].grad, plain[0].grad = grad.clone(), grad.clone()
        optimizer.update()
        uncorrected.update()
        u = optimizer.state[free[0]]["velocity"]
        # Rounding of float64 only.
        assert torch.allclose(rate * u, v, rtol=1e-12)
        assert torch.allclose(free[0], weight, rtol=1e-12)
    assert not torch.allclose(plain[0], weight, rtol=1e-3)


def _train_on_rank(communicator: ls.ProcessCommunicator) -> tuple[int, str]:
    model = Classifier()
    optimizer = chainer.CorrectedMomentumSGD(lr=0.1).setup(model)
    updater = chainer.ParallelUpdater(batches(), optimizer, devices={"main": "cpu"})
    for _ in range(3):
        updater.update()
    updater.finalize()
    return communicator.rank, ls.digest(model)


def test_over_processes_it_gives_the_bits_of_as_many_devices(updaters: Any) -> None:
    digest = ls.digest(trained(updaters, 3))
    assert run_on_ranks(_train_on_rank, 2) == [(0, digest), (1, digest)]
