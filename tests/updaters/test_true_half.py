"""Models held in half precision: float32 masters inside the update, wherever it runs."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.errors import NonFiniteError
from lockstep.precision import LossScaler, MasterWeights
from tests.support.half import DTYPES, TOO_HIGH, half, loss_of
from tests.support.runs import DAILY, ONE, OPTIMIZERS, Placement, finalized, updater_for
from tests.support.small_updater import updater_of
from tests.support.workloads import MLP, TRANSFORMER, Workload


def run(work: Workload, precision: str, placement: Placement, *, updates: int = 8, **options: Any) -> tuple[str, int]:
    """Train, and name weights, masters and all other state; and count the tries that overflowed."""
    options = {"num_shards": 5, "loss_fn": loss_of, "loss_scale": TOO_HIGH[precision], **options}
    updater = updater_for(work, placement, model=half(work, precision), precision=precision, **options)
    with finalized(updater):
        tries = [updater.update() for _ in range(updates)]
        digest = digest_of(updater)
    assert all(each.applied for each in tries)
    return digest, sum(each.tries - 1 for each in tries)


def digest_of(updater: ls.ParallelUpdater) -> str:
    state = updater.state_dict()
    return ls.digest({"models": state["models"], "optimizers": state["optimizers"]})


@pytest.mark.each_value
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("work", [MLP, TRANSFORMER], ids=repr)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@DAILY
def test_placement_is_free_with_forced_overflows(
    placements: list[Placement], work: Workload, precision: str, optimizer: str
) -> None:
    found = {placement: run(work, precision, placement, optimizer=optimizer) for placement in placements}
    assert len(set(found.values())) == 1, found
    assert all(overflows > 0 for _, overflows in found.values())


@pytest.mark.parametrize("precision", DTYPES)
def test_the_law_is_not_empty_the_number_of_shards_changes_the_result(precision: str) -> None:
    assert run(MLP, precision, ONE) != run(MLP, precision, ONE, num_shards=4)


@pytest.mark.parametrize("precision", DTYPES)
def test_retrying_is_to_have_begun_at_the_lower_scale(precision: str) -> None:
    high = TOO_HIGH[precision]
    with finalized(
        updater_for(
            MLP,
            model=half(MLP, precision),
            precision=precision,
            loss_fn=loss_of,
            loss_scale=high,
            num_shards=3,
        )
    ) as updater:
        lower = high.restored({**high.state_dict(), "factor": updater.update().loss_scale})
        assert lower.factor < high.factor
    digests = {run(MLP, precision, ONE, updates=1, num_shards=3, loss_scale=scale)[0] for scale in (high, lower)}
    assert len(digests) == 1


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.usefixtures("one_intra_op_thread")
def test_it_is_the_loop_with_masters(precision: str, optimizer: str) -> None:
    updater = updater_for(
        MLP,
        model=half(MLP, precision),
        precision=precision,
        loss_fn=loss_of,
        loss_scale=256.0,
        batch_size=8,
        num_samples=8,
        optimizer=optimizer,
    )
    model = half(MLP, precision)
    masters = MasterWeights(OPTIMIZERS[optimizer](model))
    scaler = LossScaler(256.0)
    with finalized(updater):
        for _ in range(4):
            batch = updater.get_iterator().peek()
            x, target = ls.collate(batch, torch.device("cpu"))
            assert updater.update().applied
            masters.zero_grad()
            scaler.scale(loss_of(model, x, target)).backward()
            scaler.step(masters)
            scaler.update()
        assert ls.digest(updater.master_weights()) == ls.digest(masters.named(model))
        assert ls.digest(updater.get_all_models()["main"]) == ls.digest(model)


@pytest.mark.each_value
@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_save_and_a_load_elsewhere_change_no_bit(precision: str, optimizer: str) -> None:
    options = {"precision": precision, "num_shards": 4, "loss_fn": loss_of, "optimizer": optimizer}
    options["loss_scale"] = TOO_HIGH[precision]
    first = updater_for(MLP, Placement(1), model=half(MLP, precision), **options)
    second = updater_for(MLP, Placement(3), model=half(MLP, precision), **options)
    with finalized(first), finalized(second):
        for _ in range(3):
            first.update()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        assert digest_of(first) == digest_of(second)
        for _ in range(3):
            first.update()
            second.update()
        assert digest_of(first) == digest_of(second)


@pytest.mark.parametrize("side_by_side", [False, True])
def test_masters_of_an_optimizer_itself_are_moved_too(side_by_side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if side_by_side:
        monkeypatch.setattr("lockstep.replicas.passes.summing.MIN_PARALLEL_ELEMENTS", 1)
    model = half(MLP, "bf16-true")
    optimizer = ls.CorrectedMomentumSGD(model.parameters(), lr=2.0**-20)
    optimizer.use_fp32_update()
    weights = list(model.parameters())
    before = [optimizer.masters.of(weight).clone() for weight in weights]
    with finalized(
        ls.ParallelUpdater(ls.BatchIterator(MLP.data(8), 4), optimizer, model, devices=["cpu"] * 2, loss_fn=loss_of)
    ) as updater:
        updater.update()
    moved = [not torch.equal(optimizer.masters.of(weight), old) for weight, old in zip(weights, before, strict=True)]
    assert all(moved)
    assert {optimizer.state[weight]["velocity"].dtype for weight in weights} == {torch.float32}


def test_several_optimizers_go_back_together_with_their_masters() -> None:
    nets = {name: half(MLP, "bf16-true") for name in ("a", "b")}
    optimizers = {name: torch.optim.SGD(net.parameters(), lr=2.0**-12) for name, net in nets.items()}

    updater = ls.ParallelUpdater(
        {"main": ls.BatchIterator(MLP.data(8), 4)},
        {"main": optimizers["a"], "other": optimizers["b"]},
        model={"main": nets["a"], "other": nets["b"]},
        devices=["cpu"],
        precision="bf16-true",
        loss_fn=lambda models, x, target: loss_of(models["main"], x, target) + loss_of(models["other"], x, target),
    )
    with finalized(updater):
        updater.update()
        before = digest_of(updater)

        def refuse(*_: object) -> None:
            raise RuntimeError("no")

        handle = optimizers["b"].register_step_pre_hook(refuse)
        with pytest.raises(RuntimeError, match="no"):
            updater.update()
        assert digest_of(updater) == before
        handle.remove()
        updater.update()
        assert digest_of(updater) != before


@pytest.mark.parametrize("precision", DTYPES)
def test_a_model_in_another_format_is_refused(precision: str) -> None:
    message = f"`model` must hold parameters in {DTYPES[precision]} with precision='{precision}', got none"
    with pytest.raises(ValueError, match=message):
        updater_for(MLP, precision=precision)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(1))
        self.last = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first + self.last * x


@pytest.mark.parametrize("devices", [1, 3])
def test_the_shards_of_a_bad_gradient_are_named(devices: int) -> None:
    data = torch.ones(8, 1)
    data[5] = math.inf
    model = Weighted()
    with updater_of(model, data, devices=devices, batch_size=8, num_shards=4, on_exhausted="raise") as updater:
        before = copy.deepcopy(updater.state_dict())
        for _ in range(2):
            with pytest.raises(NonFiniteError, match="'last'"):
                updater.update()
            (found,) = updater.find_nonfinite()
            assert (found.shard, found.batch, found.samples) == (2, 0, range(4, 6))
            assert (found.parameter, found.loss) == ("last", math.inf)
        assert ls.digest(updater.state_dict()["models"]) == ls.digest(before["models"])


def test_looking_for_bad_shards_leaves_a_computed_gradient_alone() -> None:
    model = Weighted()
    with updater_of(model, torch.ones(4, 1)) as updater:
        updater.compute_gradients(torch.full((4, 1), 3.0))
        assert updater.find_nonfinite() == []
        assert updater.apply_gradients().applied
        assert model.last.item() == 1 - 0.125 * 3.0


class Foreign(torch.optim.SGD):
    """An optimizer of another library, which may round its steps in a way of its own."""


def build(precision: str, optimizer: Any, model: nn.Module) -> None:
    ls.ParallelUpdater([torch.zeros(2, 3)], optimizer, model, devices=["cpu"], num_shards=1, precision=precision)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_half_weights_without_masters_are_warned_of(dtype: torch.dtype, precision: str) -> None:
    model = nn.Linear(3, 2).to(dtype)
    name = "bf16-true" if dtype == torch.bfloat16 else "fp16-true"
    with pytest.warns(
        UserWarning, match=f"{dtype}, where small steps .* precision={precision!r}. Pass precision='{name}'"
    ):
        build(precision, torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_half_weights_are_not_warned_of_where_something_else_holds_them_or_nothing_moves_them() -> None:
    model = nn.Linear(3, 2).to(torch.bfloat16)
    build("bf16-true", torch.optim.SGD(model.parameters(), lr=0.1), model)
    build("bf16", Foreign(model.parameters(), lr=0.1), model)
    own = ls.MomentumSGD(model.parameters(), lr=0.1)
    own.use_fp32_update()
    build("bf16", own, model)
    adapted = nn.Sequential(nn.Linear(3, 2).to(torch.bfloat16).requires_grad_(False), nn.Linear(2, 2))
    build("bf16", torch.optim.SGD(adapted.parameters(), lr=0.1), adapted)
