"""A loss that compares all samples of a batch, on any shards, devices and ranks."""

from __future__ import annotations

import copy
import gc
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep import Communicator
from tests.support.ranks import run_on_ranks
from tests.support.runs import Placement, finalized, state_digest, updater_for
from tests.support.workloads import CONVNET, MLP, TRANSFORMER, Workload


def encode(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """Return the outputs of a shard, with the classes that the loss compares."""
    return {"outputs": model(inputs), "classes": (targets, "kept")}


def contrast(gathered: dict[str, Any]) -> ls.Loss:
    """Compare every sample with every other one: samples of one class are to be near each other."""
    outputs, (classes, _) = gathered["outputs"], gathered["classes"]
    similarities = functional.normalize(outputs, dim=1) @ functional.normalize(outputs, dim=1).T
    same = (classes[:, None] == classes[None]).to(outputs.dtype)
    value = functional.binary_cross_entropy_with_logits(similarities * 3, same)
    return ls.Loss(value, metrics={"pairs": (same.sum(), same.numel())})


LOSS = ls.BatchLoss(encode, contrast)


def trained(num_devices: int, work: Workload = TRANSFORMER, updates: int = 7, **options: Any) -> list[str]:
    options = {"num_shards": 3, **options}
    with finalized(updater_for(work, Placement(num_devices), loss_fn=LOSS, **options)) as updater:
        losses = [float(updater.update().loss) for _ in range(updates)]
        return [state_digest(updater), *map(repr, losses)]


CASES: dict[str, dict[str, Any]] = {
    "dropout": {},
    "buffers": {"work": CONVNET},
    "strided": {"split": "strided"},
    "bf16": {"precision": "bf16", "work": MLP},
    "clipped": {"clip_grad_norm": 0.05, "optimizer": "adamw"},
    "overflowing": {"loss_scale": ls.DynamicLossScale(2.0**24), "precision": "fp16", "work": MLP},
}


@pytest.mark.parametrize("case", CASES)
def test_the_devices_do_not_matter(case: str) -> None:
    found = {tuple(trained(devices, **CASES[case])) for devices in (1, 3)}
    assert len(found) == 1


def test_the_shards_do_matter() -> None:
    assert len({trained(1, num_shards=shards)[0] for shards in (1, 2, 3)}) == 3


def on_ranks(communicator: Communicator, cases: list[str]) -> dict[str, list[str]]:
    return {name: trained(2, communicator=communicator, **CASES[name]) for name in cases}


@pytest.mark.parametrize(
    ("size", "cases"),
    [(3, ["buffers", "overflowing"]), *(pytest.param(each, [*CASES], marks=pytest.mark.slow) for each in (2, 3))],
)
def test_the_ranks_do_not_matter(size: int, cases: list[str]) -> None:
    expected = {name: trained(1, **CASES[name]) for name in cases}
    assert run_on_ranks(on_ranks, size, cases) == [expected] * size


def gradients_of_one_device(model: nn.Module, batch: Any) -> tuple[float, list[torch.Tensor]]:
    loss = contrast(encode(model, *batch)).value
    return float(loss.detach()), list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("split", ["contiguous", "strided"])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_the_gradient_is_that_of_the_whole_batch(num_shards: int, split: Any) -> None:
    model = MLP.model().double()
    inputs, targets = MLP.data(9).tensors
    batch = inputs.double(), targets
    value, expected = gradients_of_one_device(copy.deepcopy(model), batch)
    with finalized(updater_for(MLP, Placement(2), model=model, num_shards=num_shards, split=split)) as updater:
        result = updater.compute_gradients(batch, loss_fn=LOSS)
        assert float(result.loss) == pytest.approx(value, rel=1e-12)
        for parameter, wanted in zip(model.parameters(), expected, strict=True):
            assert torch.allclose(parameter.grad, wanted, rtol=1e-11, atol=1e-14)  # sums are in another order
        # A mean of the losses of shards would be another number.
        if num_shards > 1:
            parts = [contrast(encode(model, *(each[s : s + 3] for each in batch))).value.detach() for s in (0, 3, 6)]
            assert abs(float(sum(parts)) / 3 - value) > 1e-3


@pytest.mark.usefixtures("one_intra_op_thread")
def test_one_shard_has_the_bits_of_a_plain_loop() -> None:
    model, plain = MLP.model(), MLP.model()
    batch = MLP.data(9).tensors
    value, expected = gradients_of_one_device(plain, batch)
    with finalized(updater_for(MLP, model=model, num_shards=1)) as updater:
        assert float(updater.compute_gradients(batch, loss_fn=LOSS).loss) == value
        assert all(torch.equal(own.grad, other) for own, other in zip(model.parameters(), expected, strict=True))


def test_metrics_are_those_of_the_batch_and_reports_those_of_shards() -> None:
    def reporting(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        ls.report({"norm": inputs.norm()})
        return encode(model, inputs, targets)

    with finalized(updater_for(MLP, num_shards=3, loss_fn=ls.BatchLoss(reporting, contrast))) as updater:
        result = updater.update()
        assert (result.applied, result.weight, sorted(result.metrics)) == (True, 9, ["norm", "pairs"])
        assert result.metrics["pairs"].weight == 81
        assert result.metrics["norm"].weight == 9  # once, although forward runs twice


def test_what_the_criterion_reports_counts_as_often_as_there_are_samples() -> None:
    def reporting(gathered: dict[str, Any]) -> ls.Loss:
        ls.report({"norm": gathered["outputs"].norm(), "loss": 0.0})
        return contrast(gathered)

    with finalized(updater_for(MLP, num_shards=3, loss_fn=ls.BatchLoss(encode, reporting))) as updater:
        means = updater.update().observation()
    assert (means["loss"].weight, means["norm"].weight, means["pairs"].weight) == (9, 9, 81)


def test_the_loss_of_a_short_batch_counts_less(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    batches = [(torch.randn(size, 4), torch.zeros(size, dtype=torch.int64)) for size in (8, 8, 2)]
    updater = ls.ParallelUpdater(
        batches, torch.optim.SGD(model.parameters(), lr=0.1), model, devices=["cpu"], num_shards=2, loss_fn=LOSS
    )
    losses: list[float] = []
    trainer = ls.Trainer(updater, until=(1, "epoch"), out=tmp_path)
    trainer.extend(lambda each: losses.append(float(each.observation["main/loss"])), name="note", trigger=(1, "update"))
    trainer.extend(log := ls.extensions.LogReport())
    trainer.run()
    assert log.log[0]["main/loss"] == pytest.approx((8 * losses[0] + 8 * losses[1] + 2 * losses[2]) / 18)


def test_it_works_in_step_functions_with_several_networks() -> None:
    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        updater.compute_gradients(
            batch, loss_fn=ls.BatchLoss(lambda nets, x, y: encode(nets["one"], x, y), contrast), optimizer="one"
        )
        updater.apply_gradients("one")

    def run(num_devices: int) -> str:
        nets = {"one": MLP.model(), "two": MLP.model()}
        optimizers = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in nets.items()}
        batches = ls.BatchIterator(MLP.data(), 9, shuffle=True, seed=0)
        updater = ls.ParallelUpdater(
            batches, optimizers, nets, devices=["cpu"] * num_devices, num_shards=3, step_fn=step
        )
        with finalized(updater):
            for _ in range(3):
                updater.update()
            assert ls.digest(nets["two"]) == ls.digest(MLP.model())
            return ls.digest(nets["one"])

    assert run(1) == run(2)


def test_a_resumed_run_has_the_same_bits() -> None:
    options = {"num_shards": 3, "loss_fn": LOSS}
    with finalized(updater_for(TRANSFORMER, **options)) as updater:
        for _ in range(3):
            updater.update()
        state = updater.state_dict()
    with finalized(updater_for(TRANSFORMER, Placement(2), **options)) as updater:
        updater.load_state_dict(state)
        for _ in range(4):
            updater.update()
        assert state_digest(updater) == trained(1)[0]


@pytest.mark.parametrize(
    ("forward", "criterion", "error", "message"),
    [
        (
            lambda model, x, _: model(x).mean(),
            torch.sum,
            ls.ReplicaError,
            r"must have the samples of its shard \(3\) .* got shape \(\)",
        ),
        (lambda model, x, _: model(x)[:1], torch.sum, ls.ReplicaError, r"must have the samples of its shard \(3\)"),
        (lambda *_: "nothing", torch.sum, ls.ReplicaError, "`forward` of a BatchLoss must return tensors, got a str"),
        (lambda model, x, _: model(x), lambda e: e, ValueError, r"must return a loss of one element, got shape"),
        (
            lambda model, x, _: model(x),
            lambda e: e.sum().detach(),
            ValueError,
            "must return a loss that requires a gradient",
        ),
        (
            lambda model, x, _: model(x),
            lambda e: ls.Loss(e.sum(), 3),
            ValueError,
            "must return a Loss without a weight, got 3",
        ),
        (
            lambda model, x, _: model(x).detach(),
            torch.sum,
            ls.ReplicaError,
            "depend on an output that requires a gradient",
        ),
        (
            lambda model, x, _: model(x) if len(x) > 2 else [model(x)],
            torch.sum,
            ValueError,
            "the same structure for all shards",
        ),
        (
            lambda model, x, _: (model(x), len(x)),
            lambda e: e[0].sum(),
            ValueError,
            r"`output\[1\]` .* 9 samples, got 3",
        ),
        (
            lambda model, x, _: (model(x), float(x.sum())),
            lambda e: e[0].sum(),
            ValueError,
            "the same structure for all shards",
        ),
        (
            lambda model, x, _: (model(x), [f"{float(each.sum())}" for each in x]),
            lambda e: e[0].sum(),
            ValueError,
            "the same structure for all shards, and a tensor for what differs between samples",
        ),
    ],
)
def test_what_is_wrong_is_refused_and_changes_nothing(forward: Any, criterion: Any, error: type, message: str) -> None:
    shards = 4 if "structure" in message else 3
    with finalized(updater_for(MLP, num_shards=shards, loss_fn=ls.BatchLoss(forward, criterion))) as updater:
        before = state_digest(updater)
        with pytest.raises(error, match=message):
            updater.update()
        assert (updater.iteration, state_digest(updater)) == (0, before)


class Leaving:
    """A loss whose forward leaves what its criterion reads in an attribute or a list."""

    teacher: nn.Module | None = None

    def __init__(self, where: str) -> None:
        self.where, self.scale, self.kept = where, None, []

    def forward(self, model: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        # What is created once, and changes no more, is in order.
        self.teacher = self.teacher or copy.deepcopy(model)
        if self.where == "scale":
            self.scale = 1 + target.double().mean()
        else:
            self.kept.append(target)
        return model(x)

    def criterion(self, outputs: torch.Tensor) -> torch.Tensor:
        assert self.teacher is not None
        scale = self.scale if self.where == "scale" else torch.cat(self.kept).double().mean()
        self.kept.clear()
        return outputs.square().mean() * scale


@pytest.mark.parametrize(("where", "name"), [("scale", "scale"), ("kept", r"kept\[0\]")])
def test_what_forward_leaves_for_the_criterion_is_named(where: str, name: str) -> None:
    loss = Leaving(where)
    with (
        finalized(updater_for(MLP, num_shards=3, loss_fn=ls.BatchLoss(loss.forward, loss.criterion))) as updater,
        pytest.warns(ls.DeterminismWarning, match=f"changes what its criterion refers to: `Leaving.{name}`"),
    ):
        updater.update()


def test_a_shard_has_no_such_loss() -> None:
    with pytest.raises(TypeError, match="`criterion` must be callable, got a NoneType"):
        ls.BatchLoss(encode, None)  # type: ignore[arg-type]
    with pytest.raises(ls.OrderError, match="A BatchLoss must be computed by an update"):
        LOSS(None)
    with pytest.raises(ValueError, match="`accumulate` must be 1 with"):
        updater_for(MLP, num_shards=2, loss_fn=LOSS, accumulate=2)


def test_what_forward_detaches_has_no_graph_in_the_criterion() -> None:
    kept: list[torch.Tensor] = []

    def forward(model: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        return model(inputs), model(inputs).detach(), targets

    def criterion(outputs: Any) -> torch.Tensor:
        queries, keys, _ = outputs
        kept[:] = [torch.cat([keys, *kept])[:16]]
        return (queries @ kept[0].T).logsumexp(1).mean()

    with finalized(updater_for(MLP, num_shards=2, loss_fn=ls.BatchLoss(forward, criterion))) as updater:
        for _ in range(3):
            assert updater.update().applied
            # A queue with a graph would keep the outputs of all batches in memory.
            assert not kept[0].requires_grad


@contextmanager
def collections() -> Iterator[list[int]]:
    """Record the generations that are collected, without those that Python collects by itself."""
    generations: list[int] = []

    def record(phase: str, info: dict[str, int]) -> None:
        generations.extend([info["generation"]] * (phase == "stop"))

    gc.disable()
    gc.callbacks.append(record)
    try:
        yield generations
    finally:
        gc.callbacks.remove(record)
        gc.enable()


def with_a_cycle(gathered: dict[str, Any]) -> ls.Loss:
    """Add a leaf that ends by a collection only, because its hook refers to it."""
    other = torch.zeros(3, requires_grad=True)
    other.register_hook(lambda grad: grad + other.detach())
    return ls.Loss(contrast(gathered).value + other.sum())


def with_a_frozen_module() -> Any:
    module = nn.Linear(3, 3).eval()
    return lambda gathered: ls.Loss(contrast(gathered).value + 0 * module(torch.ones(3)).sum())


@pytest.mark.parametrize(
    ("criterion", "expected"), [(contrast, []), (with_a_frozen_module(), []), (with_a_cycle, [0] * 2)]
)
def test_an_update_does_not_look_through_all_objects_of_the_program(criterion: Any, expected: list[int]) -> None:
    loss_fn = ls.BatchLoss(encode, criterion)
    with finalized(updater_for(MLP, Placement(2), num_shards=3, loss_fn=loss_fn)) as updater:
        updater.update()
        with collections() as found:
            assert all(updater.update().applied for _ in range(2))
    assert found == expected


@pytest.mark.filterwarnings("ignore:The optimizer, a hook, the step function or a BatchLoss drew")
def test_a_decision_in_forward_that_falls_alike_is_warned_of() -> None:
    def forward(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
        return encode(model, inputs if random.random() < 2 else -inputs, targets)  # noqa: S311 - no secret

    updater = updater_for(MLP, Placement(1), num_shards=4, loss_fn=ls.BatchLoss(forward, contrast))
    with finalized(updater), pytest.warns(ls.RandomStreamWarning, match="draws from Python's `random`"):
        updater.update()


@pytest.mark.parametrize("kind", ["torch", "numpy", "python"])
@pytest.mark.parametrize("direct", [True, False])
def test_a_generator_in_the_criterion_is_warned_of(kind: str, *, direct: bool) -> None:
    python = random.Random(5)  # noqa: S311 - no secrets
    made: Any = {"torch": torch.Generator(), "numpy": np.random.default_rng(5), "python": python}[kind]

    def permutation(size: int) -> torch.Tensor:
        if kind == "torch":
            return torch.randperm(size, generator=made)
        return torch.tensor(made.permutation(size) if kind == "numpy" else made.sample(range(size), size))

    def triplets(outputs: torch.Tensor) -> torch.Tensor:
        return functional.triplet_margin_loss(outputs, 2 * outputs, outputs[permutation(len(outputs))] + 1)

    def triplets_of(outputs: torch.Tensor, generator: object = made) -> torch.Tensor:
        assert generator is made
        return triplets(outputs)

    model = nn.Linear(4, 3)
    loss_fn = ls.BatchLoss(lambda model, x: model(x), triplets_of if direct else triplets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with finalized(ls.ParallelUpdater([torch.randn(8, 4)], optimizer, model, loss_fn=loss_fn, num_shards=2)) as updater:
        name = "a `torch.Generator` of your own" if kind == "torch" else "a generator of Python or NumPy of your own"
        with pytest.warns(ls.RandomStreamWarning, match=name):
            updater.update()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            updater.update()


def test_a_criterion_may_change_outputs_in_place() -> None:
    def trained_by(criterion: Any) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_fn = ls.BatchLoss(lambda model, x: model(x), criterion)
        with finalized(ls.ParallelUpdater([torch.ones(8, 4)], optimizer, model, loss_fn=loss_fn, num_shards=2)) as made:
            made.update()
        return model.weight.detach().clone()

    assert torch.equal(
        trained_by(lambda out: out.sub_(1.0).square().mean()), trained_by(lambda out: (out - 1).square().mean())
    )
