"""Skipping on the device: nothing is read on the host, and nothing is other than if it were."""

from __future__ import annotations

import gc
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.optim.hooks import GradientClipping
from lockstep.precision import LossScale
from lockstep.updaters.step.engine import CHECKED_UPDATES
from tests.support.optimizers import adagrad_takes_flags
from tests.support.reads import Reads
from tests.support.runs import PLACEMENTS, Placement, finalized, state_digest
from tests.support.skipping import NUM_SHARDS, OnlyAfter, Spoiling, skipping, told
from tests.support.workloads import CONVNET, MLP, Workload

BAD = {2, 3, 5}
"""The updates whose gradients are not finite; the first is a good one, which makes the momenta."""
NUM_UPDATES = 8

FUSED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, fused=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1, fused=True),
}
TAKING_FLAGS = [
    pytest.param(name, marks=pytest.mark.skip(reason=f"torch {torch.__version__}'s fused Adagrad takes no flag"))
    if name == "adagrad" and not adagrad_takes_flags()
    else name
    for name in FUSED
]
SCALES: dict[str, LossScale | float | None] = {
    "none": None,
    "static": 64.0,
    "dynamic": ls.DynamicLossScale(2.0**10, interval=2),
    "no power of two": ls.DynamicLossScale(1000.0, growth=1.7, backoff=0.3, interval=2),
    "ramp": ls.RampLossScale(8.0, interval=2),
}


def spoiling(bad: set[int]) -> Spoiling:
    return Spoiling(lambda model, x, target: functional.cross_entropy(model(x).float(), target), bad)


def updater_of(
    optimizer: str = "adamw",
    scale: str = "dynamic",
    *,
    work: Workload = MLP,
    placement: Placement = PLACEMENTS[0],
    model: nn.Module | None = None,
    bad: set[int] = BAD,
    **options: Any,
) -> ls.ParallelUpdater:
    """Make an updater of one model; see `skipping`."""
    model = work.model() if model is None else model
    return skipping(
        ls.BatchIterator(work.data(), 9, last_batch="short"),  # in order: an order drawn is read on the host
        FUSED[optimizer](model),
        model,
        devices=["cpu"] * placement.num_devices,
        workloads=placement.workloads,
        **{"loss_fn": spoiling(bad), "loss_scale": SCALES[scale], **options},
    )


@pytest.mark.each_value
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("optimizer", TAKING_FLAGS)
def test_it_is_what_skipping_on_the_host_is(optimizer: str, scale: str) -> None:
    unread = updater_of(optimizer, scale)
    assert unread.why_it_waits is None
    ours, theirs = told(unread, NUM_UPDATES), told(updater_of(optimizer, scale, reads=True), NUM_UPDATES)
    assert ours == theirs
    assert ours["applied"] == [number not in BAD for number in range(NUM_UPDATES)]
    assert ours["counted"] == (NUM_UPDATES, NUM_UPDATES - len(BAD))
    assert {nonfinite for applied, _, _, nonfinite, _ in ours["results"] if not applied} == {"0.weight"}


@pytest.mark.each_value
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("optimizer", TAKING_FLAGS)
def test_nothing_is_read(optimizer: str, scale: str) -> None:
    with finalized(updater_of(optimizer, scale)) as updater:
        counts = []
        for _ in range(NUM_UPDATES):
            with Reads() as reads:
                updater.update()
            counts.append(reads.count)
        # The first update compares the parameters before and after its shards.
        assert counts[0] > 0
        assert counts[1:] == [0] * (NUM_UPDATES - 1)


def test_a_fused_adagrad_that_takes_no_flag_is_read_for() -> None:
    """As in torch 2.11; the bits are those of an Adagrad that takes one."""
    runs = []
    for takes in (False, adagrad_takes_flags()):
        with finalized(updater_of("adagrad")) as updater:
            vars(updater.get_optimizer("main"))["_step_supports_amp_scaling"] = takes
            why = updater.why_it_waits
            assert why == (None if takes else f"the fused Adagrad of torch {torch.__version__} takes no flag")
            runs.append(told(updater, NUM_UPDATES))
    assert runs[0] == runs[1]


LOOKS: dict[str, Callable[[ls.ParallelUpdater, ls.UpdateResult], object]] = {
    "applied": lambda _, result: result.applied,
    "nonfinite": lambda _, result: result.nonfinite,
    "loss_scale of the result": lambda _, result: result.loss_scale,
    "applied_updates": lambda updater, _: updater.applied_updates,
    "loss_scale": lambda updater, _: updater.loss_scale,
    "state_dict": lambda updater, _: updater.state_dict(),
}


def normed() -> nn.Module:
    """Make a model with running statistics and counters, whose forward itself reads nothing."""
    model = CONVNET.model()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.25  # a cumulative average, None, reads how many batches there were
    return model


@pytest.mark.parametrize("buffers", ["mean", "first"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_nothing_is_read_of_buffers(buffers: str, accumulate: int) -> None:
    with finalized(updater_of(work=CONVNET, model=normed(), buffers=buffers, accumulate=accumulate)) as updater:
        assert updater.why_it_waits is None
        updater.update()  # finds out how the model is cut
        with Reads() as reads:
            for _ in range(3):
                updater.update()
        assert reads.count == 0


def test_the_count_of_reads_of_buffers_is_not_empty() -> None:
    with finalized(updater_of(work=CONVNET, model=normed(), reads=True)) as updater:
        updater.update()
        with Reads() as reads:
            updater.update()
        assert reads.count > NUM_SHARDS  # on a CPU, where it costs nothing, every shard is looked at


@pytest.mark.parametrize("look", LOOKS)
def test_who_looks_reads_once(look: str) -> None:
    with finalized(updater_of()) as updater:
        result = updater.update()
        counts = []
        for _ in range(2):
            with Reads() as reads:
                LOOKS[look](updater, result)
            counts.append(reads.count)
        assert counts[0] > 0
        assert counts[1] == 0


def test_the_count_is_not_empty_others_read() -> None:
    for options in ({"reads": True}, {"on_overflow": "retry"}, {"on_overflow": "next"}):
        with finalized(updater_of(**{"bad": set(), **options})) as updater:
            for _ in range(2):
                with Reads() as reads:
                    updater.update()
            assert reads.count > 0, options


def every_thread_reads(updater: ls.ParallelUpdater) -> int:
    """Count the reads of one update in all threads, as the profiler sees them.

    Those inside torch's own kernel for the step on a CPU are its affair: it keeps counts of steps there.
    """
    everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everywhere
    ) as profile:
        updater.update()
    events = list(profile.events())
    # Else it did not see the other threads.
    assert [event.name for event in events].count("aten::cross_entropy_loss") == NUM_SHARDS
    reads = [event for event in events if event.name == "aten::_local_scalar_dense"]
    return len([event for event in reads if not any(name.startswith("aten::_fused") for name in around(event))])


def around(event: Any) -> Iterator[str]:
    """Name what a profiled event is part of."""
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event.name


def test_nothing_is_read_in_any_thread() -> None:
    for reads in (False, True):
        with finalized(updater_of(reads=reads, placement=Placement(2))) as updater:
            updater.update()
            assert (every_thread_reads(updater) > 0) == reads


@pytest.mark.each_value
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-true", "fp16-true"])
def test_placement_is_free(precision: str, side_by_side: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if side_by_side:
        monkeypatch.setattr("lockstep.replicas.passes.summing.MIN_PARALLEL_ELEMENTS", 1)
    dtypes = {"bf16-true": torch.bfloat16, "fp16-true": torch.float16}
    found = set()
    for placement in PLACEMENTS:
        model = MLP.model().to(dtypes.get(precision, torch.float32))
        held = next(model.parameters()).dtype
        spoil = spoiling(BAD)
        updater = updater_of(
            "momentum",
            model=model,
            placement=placement,
            precision=precision,
            loss_fn=lambda replica, x, target, held=held, spoil=spoil: spoil(replica, x.to(held), target),
        )
        with finalized(updater):
            for _ in range(NUM_UPDATES):
                updater.update()
            found.add((state_digest(updater), updater.applied_updates, updater.loss_scale))
    assert len(found) == 1
    ((_, applied, _),) = found
    assert applied == NUM_UPDATES - len(BAD)


def test_buffers_stay_where_the_update_is_left_out() -> None:
    found = []
    for reads in (False, True):
        with finalized(updater_of(work=CONVNET, reads=reads)) as updater:
            digests = []
            for _ in range(NUM_UPDATES):
                updater.update()
                digests.append(ls.digest(dict(updater.get_all_models()["main"].named_buffers())))
            found.append(digests)
    assert found[0] == found[1]
    changed = [before != after for before, after in itertools.pairwise(found[0])]
    assert changed == [number not in BAD for number in range(1, NUM_UPDATES)]


def test_a_save_and_a_load_in_the_middle_change_nothing() -> None:
    for middle in range(1, NUM_UPDATES):
        found = []
        for stop in (None, middle):
            updater = updater_of("momentum", "no power of two")
            for number in range(NUM_UPDATES):
                if number == stop:
                    state = updater.state_dict()
                    updater.finalize()
                    bad = {each - number for each in BAD}
                    updater = updater_of("momentum", "no power of two", bad=bad, placement=Placement(2))
                    updater.load_state_dict(state)
                updater.update()
            found.append((state_digest(updater), updater.applied_updates, updater.loss_scale))
            updater.finalize()
        assert found[0] == found[1]


def summed_up(nets: dict[str, nn.Module], x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(nets["main"](x) + nets["other"](x), target)


def test_several_optimizers_are_left_out_together() -> None:
    found = []
    for reads in (False, True):
        models = {name: MLP.model() for name in ("main", "other")}
        optimizers = {
            "main": FUSED["momentum"](models["main"]),
            "other": FUSED["adamw"](models["other"]),
        }
        updater = skipping(
            ls.BatchIterator(MLP.data(), 9),
            optimizers,
            models,
            reads=reads,
            devices=["cpu"] * 2,
            loss_fn=Spoiling(summed_up, BAD),
            loss_scale=ls.DynamicLossScale(2.0**10),
        )
        assert (updater.why_it_waits is None) == (not reads)
        with finalized(updater):
            applied = [updater.update().applied for _ in range(NUM_UPDATES)]
            found.append((applied, updater.applied_updates, ls.digest(*models.values())))
    assert found[0] == found[1]
    assert found[0][1] == NUM_UPDATES - len(BAD)


@pytest.mark.filterwarnings("ignore:The saved state lacks what Counting remembers")
def test_an_error_of_several_optimizers_takes_back_what_nobody_has_read() -> None:
    models = {name: MLP.model() for name in ("main", "other")}
    optimizers = {name: FUSED["adamw"](model) for name, model in models.items()}
    raising = {2}

    class Counting(type(optimizers["main"])):  # type: ignore[misc]  # made by a table
        use_auto_new_epoch, epoch = False, 0

        def new_epoch(self, auto: bool = False) -> None:
            assert auto
            if self.epoch + 1 in raising:
                raise RuntimeError("no epoch")
            self.epoch += 1

    optimizers["main"].__class__ = Counting

    updater = skipping(
        ls.BatchIterator(MLP.data(18), 9),
        optimizers,
        models,
        loss_fn=Spoiling(summed_up, {2}),
        loss_scale=ls.DynamicLossScale(2.0**10, interval=1),
    )
    with finalized(updater):
        assert [updater.update().applied for _ in range(3)] == [True, True, False]
        before = ls.digest(updater.state_dict())
        with pytest.raises(RuntimeError, match="no epoch"):
            updater.update()  # the second epoch ends
        assert updater.why_it_waits is None
        assert ls.digest(updater.state_dict()) == before
        raising.clear()
        assert updater.update().applied
        assert (updater.iteration, updater.applied_updates) == (4, 3)


def test_a_result_keeps_no_gradient_alive() -> None:
    with finalized(updater_of("sgd")) as updater:
        results = [updater.update() for _ in range(2)]
        parameters = list(updater.get_all_models()["main"].parameters())
        gradients = [weakref.ref(parameter.grad) for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        gc.collect()
        assert [gradient() for gradient in gradients] == [None] * len(parameters)
        assert all(result.applied for result in results)


def reason(**options: Any) -> str | None:
    with finalized(updater_of(**options)) as updater:
        return updater.why_it_waits


def test_others_fall_back_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    model = MLP.model()
    plain = torch.optim.AdamW(model.parameters())
    updater = skipping(ls.BatchIterator(MLP.data(), 9), plain, model, loss_fn=spoiling(set()))
    with finalized(updater), caplog.at_level(logging.INFO, logger="lockstep"):
        for _ in range(2):
            updater.update()
        said = [record.getMessage() for record in caplog.records]
        why = "AdamW takes no flag; torch's fused optimizers (fused=True) do"
        assert said == [f"Every update reads whether its gradient is finite: {why}."]
        assert updater.why_it_waits == why


def test_why_it_waits() -> None:
    assert reason() is None
    assert reason(on_overflow="retry") == ("on_overflow='retry' decides on the host whether there is another attempt")
    assert reason(step_fn=lambda *_: None, loss_fn=None) is None
    assert reason(reads=True) == "AdamW has a hook of its step that may do more than change gradients"


def test_what_is_read_though_the_verdict_is_not_is_named_and_nothing_else_is_read() -> None:
    def weighed(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> ls.Loss:
        return ls.Loss(functional.cross_entropy(model(x), target), weight=torch.tensor(float(len(x))))

    cases: dict[str, tuple[dict[str, Any], int]] = {
        "whether a shard takes part depends on a weight that is a tensor": (
            {"loss_fn": weighed},
            NUM_SHARDS,
        ),
        "OnlyAfter does not override after_on_device": ({"loss_scale": OnlyAfter(8.0)}, 2),
    }
    for why, (options, expected) in cases.items():
        with finalized(updater_of(**options)) as updater:
            updater.update()
            assert updater.why_it_waits == why
            with Reads() as reads:
                updater.update()
            assert reads.count == expected


def test_a_scheduler_counts_on_the_host_and_counts_right() -> None:
    model = MLP.model()
    optimizer = FUSED["adamw"](model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    updater = skipping(ls.BatchIterator(MLP.data(), 9), optimizer, model, loss_fn=spoiling(BAD), scheduler=scheduler)
    with finalized(updater):
        assert updater.why_it_waits == "a scheduler counts applied updates on the host"
        for _ in range(NUM_UPDATES):
            updater.update()
        assert optimizer.param_groups[0]["lr"] == 0.01 * 0.5 ** (NUM_UPDATES - len(BAD))
        assert updater.applied_updates == NUM_UPDATES - len(BAD)


def test_a_hook_that_only_changes_gradients_is_no_reason_to_wait() -> None:
    found = []
    for reads in (False, True):
        updater = updater_of("momentum", reads=reads)
        updater.get_optimizer("main").register_step_pre_hook(GradientClipping(0.1))
        assert (updater.why_it_waits is None) == (not reads)
        found.append(told(updater, NUM_UPDATES))
    assert found[0] == found[1]


def test_an_error_after_the_step_leaves_the_count_right() -> None:
    """An optimizer that counts epochs raises once the weights have moved: with one optimizer the update counts."""
    model = MLP.model()
    optimizer = FUSED["sgd"](model)

    class Counting(type(optimizer)):  # type: ignore[misc]  # made by a table
        use_auto_new_epoch = False

        def new_epoch(self, auto: bool = False) -> float:
            return 1 / (auto - 1)

    optimizer.__class__ = Counting
    updater = skipping(ls.BatchIterator(MLP.data(9), 9), optimizer, model, loss_fn=spoiling(set()))
    with finalized(updater):
        with pytest.raises(ZeroDivisionError):
            updater.update()
        assert (updater.iteration, updater.applied_updates) == (1, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("with_buffers", [False, True])
@pytest.mark.parametrize("optimizer", TAKING_FLAGS)
def test_nothing_waits_for_a_gpu(optimizer: str, with_buffers: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    work, model = (CONVNET, normed().cuda()) if with_buffers else (MLP, MLP.model().cuda())
    data = [tuple(part.cuda() for part in batch) for batch in [work.data(9)[:]] * NUM_UPDATES]
    updater = skipping(
        data,
        FUSED[optimizer](model),
        model,
        devices=["cuda:0"],
        loss_fn=spoiling(BAD),
        loss_scale=ls.DynamicLossScale(2.0**10),
    )
    with finalized(updater):
        for _ in range(CHECKED_UPDATES):  # which compute shards and tensors of batches again
            updater.update()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(NUM_UPDATES - CHECKED_UPDATES):
                updater.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert updater.applied_updates == NUM_UPDATES - len(BAD)
