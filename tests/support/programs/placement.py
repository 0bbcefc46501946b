"""Runs that every placement on processes and devices must bring to the same end."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep import Communicator, tree
from lockstep.communicators import Contribution
from lockstep.communicators.sums import small
from lockstep.replicas.passes import shard_streams
from lockstep.streams import stream_seed
from lockstep.tree import PartialSum
from lockstep.updaters.compute.shares import share_of
from lockstep.updaters.ranks import rank_reduction
from lockstep.updaters.ranks.coordinator import RankCoordinator
from lockstep.updaters.ranks.rank_reduction import RankReduction, RankReport
from lockstep.updaters.step import engine
from tests.support import gan as several
from tests.support.half import TOO_HIGH, in_half, loss_of
from tests.support.runs import ONE, Placement, cross_entropy, finalized, state_digest, updater_for
from tests.support.workloads import CONVNET, MLP, TRANSFORMER, WIDE, Workload

NUM_UPDATES = 4
"""An epoch with its short last batch of five samples, and one more."""


class Rounded(nn.Module):
    """Rounds its inputs to the format that a model is held in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.bfloat16())


Run = Callable[[int], str]
"""Trains on so many devices of every process, and names all that came out by its bits."""


def uneven(num_devices: int) -> Placement:
    """Devices that are not equally fast, and no rank's are as fast as another's."""
    return Placement(num_devices, tuple(range(1, num_devices + 1)))


def trained(
    num_devices: int,
    *,
    work: Workload = MLP,
    updates: int = NUM_UPDATES,
    place: Callable[[int], Placement] = Placement,
    **options: Any,
) -> str:
    """Train; name weights, buffers, optimizer state, and everything the updates measured."""
    with finalized(updater_for(work, place(num_devices), **{"num_shards": 5, **options})) as updater:
        measured = []
        for _ in range(updates):
            result = updater.update()
            means = result.observation()
            measured.append(
                {
                    "means": {name: [float(mean.total), float(mean.weight)] for name, mean in means.items()},
                    "result": [result.applied, result.tries, result.loss_scale, result.nonfinite],
                }
            )
        return ls.digest([state_digest(updater)], updater.state_dict(), measured)


def measured_loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> ls.Loss:
    """Weigh by something else than samples, and measure in several formats."""
    output = model(x)
    right = (output.argmax(1) == target).sum()
    ls.report({"spread": output.detach().std(), "size": float(len(x))}, model)
    weight = float(target.sum()) + 0.5
    third = output.detach()[:, 0].sum() / 3
    return ls.Loss(
        nn.functional.cross_entropy(output, target),
        weight=weight,
        metrics={"accuracy": (right, len(x)), "third": (third, torch.tensor(weight))},
    )


def spiky_loss(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Overflow in backward wherever the loss scale is above 2^17 and a shard holds class 2."""
    loss = cross_entropy(model, x, target)
    return loss * 2.0**-110 * 2.0**110 if (target == 2).any() else loss


def seldom_reached(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Reach the second half of the model in some shards only, and leave shards of little weight out."""
    hidden = model[:3](x)
    if float(target.sum()) > 2:
        return nn.functional.cross_entropy(model[3:](hidden), target)
    return hidden.square().mean()


def weightless(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> ls.Loss:
    """Let shards without class 2 take no part."""
    return ls.Loss(cross_entropy(model, x, target), weight=int((target == 2).sum()))


def gan(num_devices: int) -> str:
    """Train two networks in turn, by a step function."""
    return several.run(several.gan(placement=Placement(num_devices)), NUM_UPDATES)


def halves(num_devices: int) -> str:
    """Do both halves of an update by hand, on a batch of one's own."""
    generator = torch.Generator().manual_seed(8)
    with finalized(updater_for(MLP, Placement(num_devices), num_shards=5)) as updater:
        for _ in range(3):
            updater.compute_gradients(
                (torch.randn(7, 6, generator=generator), torch.randint(3, (7,), generator=generator))
            )
            updater.apply_gradients()
        return state_digest(updater)


def nonfinite_shards(num_devices: int) -> str:
    """Look for the shards whose gradients are not finite."""
    options = {"num_shards": 5, "loss_fn": spiky_loss, "loss_scale": 2.0**22}
    with finalized(updater_for(MLP, Placement(num_devices), **options)) as updater:
        found = updater.find_nonfinite()
        assert found
        return ls.digest([repr(shard) for shard in found])


def drawn_workloads(generator: random.Random, workloads: Sequence[Sequence[float]]) -> list[list[float]]:
    """Draw other workloads for the devices of all ranks."""
    return [[generator.choice([1.0, 2.0, 5.0]) for _ in devices] for devices in workloads]


class Restless(RankReduction):
    """Finds other speeds after every attempt."""

    _random = random.Random(0)  # noqa: S311 - no secret

    def _update_assignment(self, reports: Sequence[RankReport]) -> bool:
        super()._update_assignment(reports)
        # Equal on all ranks, which make equally many attempts.
        self.workloads = tuple(map(tuple, drawn_workloads(self._random, self.workloads)))
        return False


def moved(num_devices: int, **options: Any) -> str:
    """Compute every update's shards on other ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_reduction, "RankReduction", Restless)
        patch.setattr(Restless, "_random", random.Random(0))  # noqa: S311 - no secret
        return trained(num_devices, updates=3 * NUM_UPDATES, num_shards=8, **options)


HALF = Workload("half convnet", lambda: Rounded(CONVNET.build().bfloat16()), (1, 8, 8))
MODELS = {"mlp": MLP, "convnet": CONVNET, "transformer": TRANSFORMER}
RUNS: dict[str, Run] = {
    **{
        f"{name}, {precision}": partial(trained, work=work, precision=precision, optimizer=optimizer)
        for (name, work), optimizer in zip(MODELS.items(), ["sgd", "adamw", "corrected"], strict=True)
        for precision in ("fp32", "bf16")
    },
    "six shards, clipped": partial(trained, work=CONVNET, num_shards=6, clip=0.3, optimizer="adamw"),
    "one shard": partial(trained, work=CONVNET, num_shards=1),
    "strided": partial(trained, work=CONVNET, split="strided"),
    "accumulated": partial(trained, work=CONVNET, num_shards=3, accumulate=2),
    "accumulated by epoch": partial(trained, work=TRANSFORMER, num_shards=3, accumulate={0: 3, 1: 1, 2: 2}),
    "first buffers": partial(trained, work=CONVNET, buffers="first"),
    "uneven devices": partial(trained, work=TRANSFORMER, place=uneven, num_shards=6),
    "moved about": partial(moved, work=CONVNET, optimizer="adamw"),
    "moved about, strided": partial(moved, work=TRANSFORMER, split="strided", precision="bf16"),
    "above the limit of one thread": partial(trained, work=WIDE, updates=2),
    "sum": partial(trained, reduction="sum"),
    "bf16-true": partial(trained, work=HALF, precision="bf16-true", optimizer="corrected"),
    **{
        f"{precision}, overflowing, {rule}": partial(
            trained,
            work=in_half(MLP, precision),
            precision=precision,
            optimizer="fused",
            loss_fn=loss_of,
            loss_scale=TOO_HIGH[precision],
            on_overflow=rule,
        )
        for precision in TOO_HIGH
        for rule in ("retry", "skip")
    },
    "measured": partial(trained, loss_fn=measured_loss),
    "seldom reached": partial(trained, loss_fn=seldom_reached),
    "weightless": partial(trained, loss_fn=weightless, num_shards=6),
    "retried": partial(trained, loss_fn=spiky_loss, loss_scale=ls.DynamicLossScale(2.0**22)),
    "passed over": partial(trained, loss_fn=spiky_loss, loss_scale=ls.DynamicLossScale(2.0**20), on_overflow="next"),
    "skipped": partial(trained, loss_fn=spiky_loss, loss_scale=ls.DynamicLossScale(2.0**22), on_overflow="skip"),
    "two networks": gan,
    "by halves": halves,
    "not finite": nonfinite_shards,
}


def all_runs(communicator: Communicator, names: list[str], devices: list[int]) -> dict[tuple[str, int], str]:
    """Do runs on one of several ranks."""
    found = {}
    for num_devices in devices:
        for name in names:
            found[name, num_devices] = RUNS[name](num_devices)
    assert communicator.size > 1
    return found


def in_one_process(names: list[str]) -> dict[str, str]:
    """Do them on one device of this process."""
    return {name: RUNS[name](ONE.num_devices) for name in names}


# Ways to break the law, each applied to whole processes for a while ------------------------------------


def fold_over_ranks(patch: pytest.MonkeyPatch) -> None:
    """Add partial sums one after the other, in the order of ranks."""

    def fold(partials: list[PartialSum]) -> list[torch.Tensor | None]:
        for other in partials[1:]:
            tree.add_into(partials[0].tensors, other.tensors)
        return partials[0].tensors

    patch.setattr(small, "total", fold)


def merge_within_ranks_first(patch: pytest.MonkeyPatch) -> None:
    """Add up all that a rank has before its sums meet those of others."""
    patch.setattr(engine, "share_of", lambda *args: replace(share_of(*args), start=0, stop=2**20))


def streams_of_ranks(patch: pytest.MonkeyPatch) -> None:
    """Seed random numbers by the rank, too."""
    rank = ls.find_communicator().rank
    patch.setattr(shard_streams, "stream_seed", lambda seed, position: stream_seed(seed, position + 1000 * rank))


def buffers_of_rank_0(patch: pytest.MonkeyPatch) -> None:
    """Take what the shards of the first rank made of the buffers for what all made."""
    total = rank_reduction.sum_buffers

    def first(communicator: Communicator, own: Any, reports: Any, slots: Any, audit: Any) -> Any:
        nobody = replace(reports[0], buffers=Contribution(), changed_weights=[0.0] * len(slots))
        only = [reports[0], *[nobody] * (len(reports) - 1)]
        if communicator.rank > 0:
            own.partials.clear()
        return total(communicator, own, only, slots, audit)

    patch.setattr(rank_reduction, "sum_buffers", first)


def mean_of_means(patch: pytest.MonkeyPatch) -> None:
    """Count every rank as much as the others, however many samples it had."""
    exchange_reports = RankCoordinator.exchange_reports

    def levelled(self: Any, *args: Any, **options: Any) -> Any:
        reports = exchange_reports(self, *args, **options)
        for report in reports or []:
            for shard in report["shards"]:
                shard[1] = 1.0
        return reports

    patch.setattr(RankCoordinator, "exchange_reports", levelled)


MUTANTS = {
    "a fold over ranks": (fold_over_ranks, 4, "mlp"),
    "sums of ranks": (merge_within_ranks_first, 2, "mlp"),
    "streams of ranks": (streams_of_ranks, 2, "transformer"),
    "buffers of rank 0": (buffers_of_rank_0, 2, "convnet"),
    "a mean of means": (mean_of_means, 2, "mlp"),
}
"""What to break, on how many ranks, and a model it shows in.

Five shards on two ranks are cut within a node of the tree, so that sums of ranks are no nodes; on four ranks
they are added up in another order than one after the other.
"""


def mutated(names: list[str]) -> dict[str, str]:
    """Train with each of some mutants."""
    found = {}
    for name in names:
        mutant, _, model = MUTANTS[name]
        with pytest.MonkeyPatch.context() as patch:
            mutant(patch)
            found[name] = RUNS[f"{model}, fp32"](1)
    return found
