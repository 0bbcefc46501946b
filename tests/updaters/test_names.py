"""Several of everything by name, and what does not belong together refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau
from torch.utils.data import TensorDataset

import lockstep as ls
from tests.support.backward import in_backward
from tests.support.gan import GanStep, gan, networks, run, snapshot
from tests.support.runs import Placement, cross_entropy, finalized, updater_for
from tests.support.workloads import MLP


def batches(num_samples: int = 6, width: int = 3) -> ls.BatchIterator:
    return ls.BatchIterator(TensorDataset(torch.ones(num_samples, width)), 4)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.125)


class Pair:
    """Two small networks with an optimizer each, and whatever else a case changes."""

    def __init__(self) -> None:
        self.nets = {"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)}
        self.optimizers = {name: sgd(net) for name, net in self.nets.items()}

    def build(self, **changed: Any) -> ls.ParallelUpdater:
        options: dict[str, Any] = {
            "iterator": batches(),
            "optimizer": self.optimizers,
            "model": self.nets,
            "devices": ["cpu", "cpu"],
            "loss_fn": self.loss,
            **changed,
        }
        return ls.ParallelUpdater(**options)

    @staticmethod
    def loss(nets: dict[str, nn.Module], x: torch.Tensor) -> torch.Tensor:
        return (nets["a"](x) * nets["b"](x)).mean()


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "no model": (lambda _: {"model": None}, TypeError, "`model` must be a torch.nn.Module, got a NoneType."),
    "no loss": (
        lambda _: {"loss_fn": None},
        ValueError,
        "`loss_fn` must be given for several networks, got None.",
    ),
    "nothing": (lambda _: {"model": {}}, ValueError, "`model` must hold at least one object, got an empty mapping."),
    "a number for a name": (
        lambda pair: {"model": {1: pair.nets["a"], "b": pair.nets["b"]}},
        ValueError,
        "The names of `model` must be non-empty strings without dots, got 1.",
    ),
    "a path for a name": (
        lambda pair: {"model": {"a.b": pair.nets["a"], "b": pair.nets["b"]}},
        ValueError,
        "The names of `model` must be non-empty strings without dots, got 'a.b'.",
    ),
    "one network twice": (
        lambda pair: {"model": {"a": pair.nets["a"], "b": pair.nets["a"]}},
        ValueError,
        "`model` must hold different objects, got the same one under 'a' and 'b'.",
    ),
    "a function for a network": (
        lambda pair: {"model": {"a": pair.nets["a"], "b": len}},
        TypeError,
        "`model['b']` must be a torch.nn.Module, got a builtin_function_or_method.",
    ),
    "no main iterator": (
        lambda _: {"iterator": {"train": batches()}},
        ValueError,
        "`iterator` must contain the name 'main', got ['train'].",
    ),
    "a shared parameter": (
        lambda pair: {"optimizer": {**pair.optimizers, "c": sgd(pair.nets["b"])}},
        ValueError,
        "`optimizer` must hold each parameter in one optimizer only, got 'b.weight' in 'b' and 'c'.",
    ),
    "a stranger's parameter": (
        lambda pair: {"optimizer": {**pair.optimizers, "c": sgd(nn.Linear(2, 1))}},
        ValueError,
        "`optimizer['c']` must hold parameters of `model` only, got one of shape (1, 2) in group 0",
    ),
    "devices by name": (
        lambda _: {"devices": {"main": "cpu", "b": "cpu"}},
        TypeError,
        "`devices` must be a list with one entry per device, got a mapping. Devices by name, and replicas of one model",
    ),
    "workloads by name": (
        lambda _: {"workloads": {"main": 1.0, "b": 2.0}},
        TypeError,
        "`workloads` must be a list with one entry per device, got a mapping.",
    ),
    "a stranger's scheduler": (
        lambda _: {"scheduler": LambdaLR(sgd(nn.Linear(1, 1)), lambda _: 1.0)},
        ValueError,
        (
            "`scheduler` must hold schedulers of the updater's optimizers, but 'main' is not one: its "
            "optimizer is another object."
        ),
    ),
    "a scheduler that waits for a value": (
        lambda pair: {"scheduler": [ReduceLROnPlateau(pair.optimizers["a"])]},
        TypeError,
        "`scheduler` must hold schedulers that step without a measured value, got '0'",
    ),
    "an unknown split": (
        lambda _: {"split": "random"},
        ValueError,
        "`split` must be 'contiguous' or 'strided', got 'random'.",
    ),
    "an unknown reduction": (
        lambda _: {"reduction": "max"},
        ValueError,
        "`reduction` must be 'mean' or 'sum', got 'max'.",
    ),
    "measured work loads without shards": (
        lambda _: {"workloads": "auto"},
        ValueError,
        '`workloads` must be numbers where `num_shards` is None, got "auto".',
    ),
    "work loads of text": (
        lambda _: {"workloads": "fast", "num_shards": 4},
        ValueError,
        "`workloads` must be 'auto', got 'fast'.",
    ),
    "unequal work loads for dealt samples": (
        lambda _: {"workloads": [1.0, 2.0], "split": "strided"},
        ValueError,
        "`workloads` must be equal where samples are assigned round robin to one shard per device, got [1.0",
    ),
    "accumulation in steps": (
        lambda _: {"step_fn": GanStep(), "accumulate": 2},
        ValueError,
        "`accumulate` must be 1 with a step function or LBFGS, got 2.",
    ),
    "another batch in steps": (
        lambda _: {"step_fn": GanStep(), "on_overflow": "next"},
        ValueError,
        "`on_overflow` must be 'retry' or 'skip' with a step function or LBFGS, got 'next'.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_belong_together_is_refused(case: str) -> None:
    changed, kind, message = REFUSED[case]
    pair = Pair()
    with pytest.raises(kind) as caught:
        pair.build(**changed(pair))
    assert str(caught.value).startswith(message)


def test_single_objects_are_named_main() -> None:
    with finalized(updater_for(MLP)) as updater:
        assert updater.get_iterator() is updater.get_iterator("main")
        assert updater.get_all_optimizers() == {"main": updater.get_optimizer("main")}
        assert list(updater.get_all_models()) == ["main"]
        for get in (updater.get_iterator, updater.get_optimizer):
            with pytest.raises(KeyError, match=r"`name` must be one of \['main'\], got 'second'"):
                get("second")


def test_everything_is_found_and_saved_by_name() -> None:
    updater = gan()
    assert list(updater.get_all_models()) == ["gen", "dis"]
    assert list(updater.get_all_optimizers()) == ["gen", "dis"]
    state = updater.state_dict()
    assert list(state["models"]) == list(state["optimizers"]) == list(state["schedulers"]) == ["gen", "dis"]
    assert list(state["iterators"]) == ["main", "further"]
    for name, model in updater.get_all_models().items():
        assert ls.digest(state["models"][name]) == ls.digest(model)


def test_a_mapping_of_one_model_named_main_is_that_model() -> None:
    digests = []
    for named in (False, True):
        model = MLP.model()
        optimizer = sgd(model)
        updater = ls.ParallelUpdater(
            {"main": ls.BatchIterator(MLP.data(), 9)} if named else ls.BatchIterator(MLP.data(), 9),
            {"main": optimizer} if named else optimizer,
            {"main": model} if named else model,
            devices=["cpu"],
            loss_fn=cross_entropy,
        )
        with finalized(updater):
            digests.append(ls.digest(model))
            updater.update()
            digests.append(ls.digest(model))
    assert digests[:2] == digests[2:]
    assert digests[0] != digests[1]


def test_one_loss_steps_all_optimizers_as_one_would() -> None:
    """Optimizers that work parameter by parameter give the same bits for any division among them."""

    def both(nets: dict[str, nn.Module], x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(nn.Sequential(nets["body"], nets["head"]), x, target)

    model = MLP.model()
    nets = {"body": model[:4], "head": model[4:]}
    optimizers = {
        name: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3) for name, net in nets.items()
    }
    several = ls.ParallelUpdater(
        ls.BatchIterator(MLP.data(), 9, shuffle=True, last_batch="short", seed=3),
        optimizers,
        nets,
        devices=["cpu"] * 2,
        num_shards=5,
        loss_fn=both,
    )
    with finalized(several), finalized(updater_for(MLP, num_shards=5)) as one:
        for _ in range(12):
            result = several.update()
            one.update()
        assert list(result.observation()) == ["loss", "skipped"]
        assert ls.digest(model) == ls.digest(one.get_all_models()["main"])


@pytest.mark.parametrize("timing", ["pre", "post"])
def test_several_optimizers_step_all_or_none(timing: str) -> None:
    pair = Pair()
    updater = pair.build()
    hook = lambda *_: 1 / 0  # noqa: E731 - registered in two ways
    with finalized(updater):
        updater.update()
        before = snapshot(updater)
        second = pair.optimizers["b"]
        handle = second.register_step_pre_hook(hook) if timing == "pre" else second.register_step_post_hook(hook)
        with pytest.raises(ZeroDivisionError):
            updater.update()
        handle.remove()
        assert snapshot(updater) == before
        updater.update()
        assert updater.iteration == 2


def test_a_loss_function_gets_what_was_given() -> None:
    given = []

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        given.append(model)
        return (model["a"] if isinstance(model, dict) else model)(x).mean()

    net = nn.Linear(3, 1)
    for model in (net, {"a": net}):
        updater = ls.StandardUpdater(batches(), sgd(net), model, loss_fn=loss_fn, audit_every=0)
        with finalized(updater):
            updater.update()
    assert [type(model) for model in given] == [nn.Linear, dict]
    assert given[1]["a"] is not net


def test_a_subclass_may_say_what_an_update_does() -> None:
    class Gan(ls.ParallelUpdater):
        def update_core(self, batch: Any) -> None:
            GanStep()(self, batch)

    told = gan()
    nets = networks()
    optimizers = {
        "gen": torch.optim.Adam(nets["gen"].parameters(), lr=0.01),
        "dis": ls.CorrectedMomentumSGD(nets["dis"].parameters(), lr=0.05, momentum=0.9),
    }
    updater = Gan(
        {name: told.get_iterator(name) for name in ("main", "further")},
        optimizers,
        nets,
        devices=["cpu", "cpu"],
        num_shards=5,
        scheduler=[LambdaLR(each, lambda count: 1 / (1 + 0.1 * count)) for each in optimizers.values()],
    )
    run(updater, 5)
    other = gan()
    run(other, 5)
    for name, model in other.get_all_models().items():
        assert ls.digest(model) == ls.digest(nets[name])


def test_the_result_of_a_step_has_a_part_for_each_optimizer() -> None:
    with finalized(gan()) as updater:
        result = updater.update()
    assert result.applied
    assert result.tries == 1
    assert list(result.parts) == ["dis", "gen"]
    assert all(part.applied for part in result.parts.values())
    assert result.parts["dis"].weight == 12 + 13
    assert result.parts["gen"].weight == 12
    observed = result.observation()
    assert list(observed) == ["dis/loss", "dis/skipped", "dis/right", "gen/loss", "gen/skipped"]
    assert float(observed["gen/loss"]) == float(result.parts["gen"].loss)


def test_an_update_of_one_of_several_optimizers_keeps_its_name() -> None:
    def loss_fn(nets: Any, x: torch.Tensor) -> torch.Tensor:
        return nets["critic"](nets["actor"](x)).mean()

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        for name in ("critic", "actor") if updater.iteration == 1 else ("critic",):
            updater.compute_gradients(batch, optimizer=name)
            updater.apply_gradients(name)

    nets = {"actor": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
    batches = [torch.ones(4, 2)]
    with finalized(
        ls.ParallelUpdater(batches, optimizers, nets, devices=["cpu"], num_shards=2, loss_fn=loss_fn, step_fn=step)
    ) as updater:
        found = [set(updater.update().observation()) for _ in range(2)]
    assert "critic/loss" in found[0]
    assert "loss" not in found[0]
    assert {"critic/loss", "actor/loss"} <= found[1]


def test_gradients_are_for_one_optimizer_only() -> None:
    with finalized(gan(num_shards=2)) as updater:
        models = updater.get_all_models()
        batch = updater.get_iterator().peek()
        updater.compute_gradients(batch, loss_fn=GanStep().judge_loss, optimizer="dis")
        assert all(parameter.grad is not None for parameter in models["dis"].parameters())
        assert all(parameter.grad is None for parameter in models["gen"].parameters())
        judged = [parameter.grad for parameter in models["dis"].parameters()]
        updater.compute_gradients(batch, loss_fn=GanStep().generator_loss, optimizer="gen")
        kept = zip(judged, models["dis"].parameters(), strict=True)
        assert all(gradient is parameter.grad for gradient, parameter in kept)
        with pytest.raises(ls.OrderError, match="for the same optimizer"):
            updater.apply_gradients()
        assert updater.apply_gradients("gen").applied
        assert updater.apply_gradients("dis").applied
        assert updater.iteration == 2
        with pytest.raises(KeyError, match=r"`optimizer` must be one of \['dis', 'gen'\], got 'main'"):
            updater.compute_gradients(batch, optimizer="main")
        with pytest.raises(ValueError, match="`loss_fn` must be given here or to the updater, got None"):
            updater.compute_gradients(batch, optimizer="gen")


def test_other_networks_ask_for_no_gradient_in_the_meantime() -> None:
    asking: list[tuple[bool, bool]] = []

    def loss_fn(nets: dict[str, nn.Module], real: torch.Tensor) -> Any:
        asks = [any(each.requires_grad for each in nets[name].parameters()) for name in ("gen", "dis")]
        asking.append((asks[0], asks[1]))
        return GanStep().judge_loss(nets, real)

    with finalized(gan(placement=Placement(2), num_shards=2, audit_every=0)) as updater:
        batch = updater.get_iterator().peek()
        for name in ("dis", "gen", None):
            updater.compute_gradients(batch, loss_fn=loss_fn, optimizer=name)
    assert asking == [(False, True)] * 2 + [(True, False)] * 2 + [(True, True)] * 2


def test_calls_that_belong_elsewhere_are_refused() -> None:
    def nested(updater: ls.ParallelUpdater, _: Any) -> None:
        updater.update()

    def loading(updater: ls.ParallelUpdater, _: Any) -> None:
        updater.load_state_dict(updater.state_dict())

    for step, name in ((nested, "update"), (loading, "load_state_dict")):
        with (
            finalized(gan(step)) as updater,
            pytest.raises(ls.OrderError, match=f"`{name}` must not be called by"),
        ):
            updater.update()
    with pytest.raises(ls.OrderError, match="`next_batch` must be called by a step function"):
        updater.next_batch()


def test_an_iterator_that_ends_within_a_step_ends_the_run_before_it() -> None:
    def step(updater: ls.ParallelUpdater, _: Any) -> None:
        updater.compute_gradients(updater.next_batch("short"))
        updater.apply_gradients()

    model = nn.Linear(3, 1)
    iterators = {
        "main": batches(),
        "short": ls.BatchIterator(TensorDataset(torch.ones(5, 3)), 2, repeat=False),
    }
    updater = ls.StandardUpdater(iterators, sgd(model), model, loss_fn=lambda model, x: model(x).mean(), step_fn=step)
    with finalized(updater):
        for _ in range(3):
            updater.update()
        before = snapshot(updater)
        with pytest.raises(StopIteration):
            updater.update()
        assert snapshot(updater) == before


def test_an_overflow_in_a_step_is_tried_again() -> None:
    def bounded(grad: torch.Tensor) -> torch.Tensor:
        return grad * float("inf") if grad.abs() > 4 else grad

    def build(factor: float) -> ls.ParallelUpdater:
        step = GanStep()
        usual = step.generator_loss
        step.generator_loss = lambda nets, real: in_backward(usual(nets, real), bounded)
        return gan(step, Placement(2), loss_scale=ls.DynamicLossScale(factor=factor))

    with finalized(build(64.0)) as updater:
        result = updater.update()
        assert result.parts["gen"].tries > 1
        assert result.parts["gen"].nonfinite == "gen.0.weight"
        assert updater.loss_scale.factor == result.parts["gen"].loss_scale
        run(updater, 4)
        lower = build(updater.loss_scale.factor)
        run(lower, 4)
        found, wanted = (
            ls.digest(*each.get_all_models().values(), *each.get_all_optimizers().values()) for each in (updater, lower)
        )
        assert found == wanted


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    updater = gan()
    run(updater, 2)
    before = snapshot(updater)
    state = gan().state_dict()
    state["optimizers"]["dis"]["param_groups"][0]["params"] = [0]
    with pytest.raises(ls.StateError):
        updater.load_state_dict(state)
    assert snapshot(updater) == before
    for part in ("models", "optimizers", "iterators", "schedulers"):
        missing = {**state, part: {}}
        with pytest.raises(ls.StateError, match=f"the {part} of a ParallelUpdater must hold"):
            updater.load_state_dict(missing)
    assert snapshot(updater) == before
