"""The rule of buffers: every shard starts from the same ones, and what becomes of them is combined."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.replicas.buffers.buffer_refs import BufferRule
from tests.support.ranks import run_on_ranks
from tests.support.runs import finalized
from tests.support.small_updater import Changing, mean_of_output, updater_of


def shards_of(x: torch.Tensor, num_shards: int) -> tuple[torch.Tensor, ...]:
    return torch.tensor_split(x, num_shards)


def one_update(
    model: nn.Module, x: torch.Tensor, *, num_shards: int, devices: int = 2, buffers: BufferRule = "mean"
) -> nn.Module:
    with updater_of(model, devices=devices, num_shards=num_shards, buffers=buffers) as updater:
        updater.compute_gradients(x)
        updater.apply_gradients()
    return model


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_running_statistics_become_the_mean_over_shards(devices: int) -> None:
    x = torch.randn(12, 4, dtype=torch.float64)
    model = one_update(nn.BatchNorm1d(4).double(), x, num_shards=3, devices=devices)
    means, variances = [], []
    for part in shards_of(x, 3):
        alone = nn.BatchNorm1d(4).double()
        alone(part)
        means.append(alone.running_mean)
        variances.append(alone.running_var)
    # Same numbers, added and divided in another order.
    torch.testing.assert_close(model.running_mean, sum(means) / 3, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(model.running_var, sum(variances) / 3, rtol=1e-14, atol=1e-14)
    assert model.num_batches_tracked == 1


@pytest.mark.usefixtures("one_intra_op_thread")
def test_a_single_shard_leaves_the_bits_of_a_plain_forward() -> None:
    x = torch.randn(9, 4)
    alone = nn.BatchNorm1d(4)
    alone(x)
    model = one_update(nn.BatchNorm1d(4), x, num_shards=1)
    assert torch.equal(model.running_mean, alone.running_mean)
    assert torch.equal(model.running_var, alone.running_var)


@pytest.mark.usefixtures("one_intra_op_thread")
def test_by_the_rule_first_the_first_shard_alone_counts() -> None:
    x = torch.randn(9, 4)
    alone = nn.BatchNorm1d(4)
    alone(x[:3])
    model = one_update(nn.BatchNorm1d(4), x, num_shards=3, buffers="first")
    assert torch.equal(model.running_mean, alone.running_mean)


@pytest.mark.parametrize("how", ["in place", "rebound", "past the version counter"])
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_however_a_forward_writes_a_buffer_every_shard_starts_from_the_same(how: str, devices: int) -> None:
    x = torch.tensor([[1.0], [2.0], [4.0], [9.0]])
    model = one_update(Changing(how), x, num_shards=4, devices=devices)
    # Each shard adds its input to 10.0 and counts from 5: were it to see another's, it would be more.
    assert model.total.item() == 10.0 + (1.0 + 2.0 + 4.0 + 9.0) / 4
    assert model.count.item() == 6


@pytest.mark.parametrize("devices", [1, 2])
def test_a_shard_that_leaves_a_buffer_alone_counts_with_the_old_value(devices: int) -> None:
    x = torch.tensor([[1.0], [-2.0], [-4.0], [9.0]])
    model = one_update(Changing("in place", only_positive=True), x, num_shards=4, devices=devices)
    assert model.total.item() == 10.0 + (1.0 + 0.0 + 0.0 + 9.0) / 4


def test_an_untouched_buffer_keeps_its_bits() -> None:
    model = Changing("in place")
    model.register_buffer("table", torch.tensor([0.1, 0.7, float("nan"), -0.0]))
    before = model.table.clone()
    one_update(model, torch.arange(7.0)[:, None], num_shards=3)
    assert torch.equal(model.table.view(torch.int32), before.view(torch.int32))


class Walking(nn.Module):
    """Adds its inputs to buffers of all formats, in some shards to none, and to one buffer in none."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.pattern = pattern
        draw = torch.Generator().manual_seed(1)
        for dtype in FORMATS:
            start = torch.randn(3, generator=draw, dtype=torch.float64).mul(8).to(dtype)
            self.register_buffer(str(dtype).replace(".", "_"), start)
        self.register_buffer("scalar", torch.tensor(0.1))
        self.register_buffer("table", torch.tensor([0.1, float("nan"), -0.0, float("-inf")]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pattern[int(x[0, 0])] == "1":
            for buffer in self.buffers():
                if buffer is not self.table:
                    buffer.copy_((buffer + (1.0 + x.sum()) / 7).to(buffer.dtype))
        return (self.weight * x).mean()


FORMATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
FORMATS += (torch.int64, torch.uint8, torch.bool)


RULES: dict[str, Any] = {
    "mean": {"*int*": "first", "*bool": "first"},
    "first": "first",
    "sum": {"*bool": "first", "*": "sum"},
    "min": {"*complex*": "mean", "*": "min"},
    "max": {"*complex*": "mean", "*": "max"},
}


@pytest.mark.each_value
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("pattern", ["11111", "00000", "10000", "00001", "01011", "00110"])
def test_on_a_device_that_nobody_at_start_become_the_same(pattern: str, rule: str) -> None:
    x = torch.arange(5.0).repeat_interleave(torch.tensor([3, 3, 3, 2, 2]))[:, None]
    found = set()
    for fused in (False, True):
        for devices in (1, 3):
            model = Walking(pattern)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=fused)
            with updater_of(
                model,
                x,
                optimizer=optimizer,
                devices=devices,
                num_shards=5,
                batch_size=13,
                buffers=RULES[rule],
                on_overflow="skip",
            ) as updater:
                assert (updater.why_it_waits is None) == fused
                updater.update()
            found.add(ls.digest(dict(model.named_buffers())))
    assert len(found) == 1
    start = Walking(pattern)
    changed = [not same_bits(model.get_buffer(name), buffer) for name, buffer in start.named_buffers()]
    assert any(changed) == ("1" in pattern)
    assert same_bits(model.table, start.table)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return ls.digest({"": left}) == ls.digest({"": right})


def test_a_buffer_whose_sign_alone_changes_has_changed() -> None:
    class Flipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.register_buffer("zero", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.zero.neg_()
            return (self.weight * x).mean()

    model = one_update(Flipping(), torch.ones(4, 1), num_shards=2)
    assert model.zero.signbit().all()


@pytest.mark.parametrize("unread", [False, True])
def test_a_tensor_of_another_format_becomes_one_of_the_buffers(unread: bool) -> None:
    class Widening(Changing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = (self.weight * x).mean()
            self.total = self.total.double() + x.sum().double()
            self.count = self.count.float() + 1.0
            return loss

    x = torch.tensor([[1.0], [2.0], [4.0], [9.0]])
    model = Widening("rebound")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    on_overflow = "skip" if unread else "retry"
    with updater_of(model, x, optimizer=optimizer, num_shards=4, on_overflow=on_overflow) as updater:
        assert (updater.why_it_waits is None) == unread
        updater.update()
    assert (model.total.dtype, model.total.item()) == (torch.float32, 14.0)
    assert (model.count.dtype, model.count.item()) == (torch.int64, 6)


@pytest.mark.parametrize(
    "odd",
    [torch.ones(1).expand(3), torch.ones(3).to(torch.float8_e4m3fn), torch._neg_view(-torch.ones(3))],
    ids=["expanded", "float8", "negated"],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_a_buffer_that_cannot_be_packed_is_looked_at_and_named(odd: torch.Tensor, devices: int) -> None:
    model = Changing("in place")
    model.register_buffer("odd", odd)
    x = torch.tensor([[1.0], [2.0], [4.0], [9.0]])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    with updater_of(model, x, optimizer=optimizer, devices=devices, num_shards=4, on_overflow="skip") as updater:
        assert updater.update().applied
        assert updater.why_it_waits == "the buffer 'odd' is not a plain dense tensor"
    assert (model.total.item(), model.count.item()) == (14.0, 6)
    assert torch.equal(model.odd.float(), torch.ones(3))


class Caching(nn.Module):
    """Fills a buffer that was None, as caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("cache", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.cache is None:
            self.cache = x.detach().clone()
        return (self.weight * x * self.cache.mean()).mean()


@pytest.mark.filterwarnings("ignore:.*'cache' is None, and shards assign different values")
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_buffer_that_is_none_is_none_for_every_shard(devices: int) -> None:
    x = torch.arange(1.0, 7.0).reshape(6, 1)
    model = one_update(Caching(), x, num_shards=6, devices=devices)
    assert model.cache is None
    # The share of each shard, 1/6, is rounded to float32.
    assert model.weight.grad.item() == pytest.approx((x**2).mean().item(), rel=2**-23)


class Growing(nn.Module):
    """Puts a tensor of another shape into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x])
        return (self.weight * x).mean()


def test_a_buffer_that_changes_its_shape_is_refused_before_anything_has_moved() -> None:
    model = Growing()
    with updater_of(model, devices=2, num_shards=2) as updater:
        with pytest.raises(ValueError, match=r"keep the shapes of its buffers, got \(2, 1\) for 'seen'"):
            updater.compute_gradients(torch.ones(4, 1))
        assert model.weight.item() == 1.0
        assert model.seen.shape == (0, 1)


class Twice(nn.Module):
    """Holds one buffer under two names and rebinds the second."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("first", torch.ones(1))
        self.register_buffer("second", self.first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.weight * x * self.second).mean()
        self.second = self.second + 1.0
        return loss


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_every_name_of_a_shared_buffer_is_put_back(devices: int) -> None:
    model = one_update(Twice(), torch.ones(3, 1), num_shards=3, devices=devices)
    assert model.weight.grad.item() == 1.0


def test_a_forward_may_ask_for_the_gradient_of_a_buffer() -> None:
    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.register_buffer("zero", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.layer(x).square().mean() + self.zero.requires_grad_()
            return loss

    torch.manual_seed(0)
    model, x = Zero(), torch.randn(8, 3)
    expected = torch.autograd.grad(model.layer(x).square().mean(), list(model.parameters()))
    updater = ls.ParallelUpdater([x, x], torch.optim.SGD(model.parameters(), lr=0.0), model, num_shards=4)
    for _ in range(2):
        updater.update()
        assert all(torch.allclose(each.grad, grad) for each, grad in zip(model.parameters(), expected, strict=True))
    updater.finalize()
    assert not model.zero.requires_grad


# Buffers that count or collect ------------------------------------------------------------------------


class Collecting(nn.Module):
    """Counts samples and classes, and keeps extremes, as observers, histograms and codebooks do."""

    def __init__(self, *only: str) -> None:
        super().__init__()
        self.only = only
        self.layer = nn.Linear(2, 1)
        self.register_buffer("histogram", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("count", torch.tensor(1e-4))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("lowest", torch.full((2,), float("inf")))
        self.register_buffer("highest", torch.full((2,), float("-inf")))
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = {
            "histogram": self.histogram + torch.bincount(x[:, 0].abs().long().clamp(max=4), minlength=5),
            "count": self.count + len(x),
            "seen": self.seen + len(x),
            "lowest": torch.minimum(self.lowest, x.amin(0)),
            "highest": torch.maximum(self.highest, x.amax(0)),
            "sums": self.sums + x.double().sum(0),
            "steps": self.steps + 1,
        }
        for name in self.only or new:
            setattr(self, name, new[name])
        return self.layer(x).square().mean()


COLLECTED = {"histogram": "sum", "count": "sum", "seen": "sum", "low*": "min", "highest": "max", "sums": "sum"}
BATCH = torch.randn(3, 13, 2, generator=torch.Generator().manual_seed(3)) * 3


def collected(model: nn.Module, devices: int, num_shards: int = 4, **options: Any) -> dict[str, torch.Tensor]:
    data = BATCH.reshape(-1, 2)
    options = {"buffers": COLLECTED, **options}
    with updater_of(model, data, devices=devices, num_shards=num_shards, batch_size=13, **options) as updater:
        for _ in range(3 // options.get("accumulate", 1)):
            updater.update()
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def collected_plainly() -> dict[str, torch.Tensor]:
    model = Collecting()
    for batch in BATCH:
        model(batch)
    return dict(model.named_buffers())


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"num_shards": 1}, {"split": "strided"}])
def test_by_their_rules_buffers_count_and_collect_as_in_a_plain_loop(options: dict[str, Any]) -> None:
    found = [collected(Collecting(), devices, **options) for devices in (1, 2, 3)]
    assert len(set(map(ls.digest, found))) == 1
    expected = collected_plainly()
    if "accumulate" in options:
        expected["steps"] = torch.tensor(1)
    # Sums of floating-point numbers are in another order.
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=0)
    exact = [name for name in expected if name not in ("count", "sums")]
    assert all(torch.equal(found[0][name], expected[name]) for name in exact)


def collected_on_ranks(communicator: ls.Communicator) -> str:
    return ls.digest(collected(Collecting(), 1, communicator=communicator))


def test_on_ranks_they_are_the_same() -> None:
    expected = ls.digest(collected(Collecting(), 1))
    for size in (2, 3):
        assert run_on_ranks(collected_on_ranks, size) == [expected] * size


def test_a_group_and_a_data_parallel_follow_them_too() -> None:
    expected = Collecting()
    expected(BATCH[0])
    group_model, module_model = Collecting(), Collecting()
    with ls.ReplicaGroup(group_model, devices=["cpu"] * 2, num_shards=3, buffers=COLLECTED) as group:
        group.forward(BATCH[0])
    ls.DataParallel(module_model, devices=["cpu"] * 2, num_shards=3, buffers=COLLECTED)(BATCH[0])
    for model in (group_model, module_model):
        torch.testing.assert_close(dict(model.named_buffers()), dict(expected.named_buffers()))


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ["histogram", "count", "seen"])
def test_what_the_mean_does_not_fit_is_refused_before_anything_changes(name: str, devices: int) -> None:
    model = Collecting(name)
    before = ls.digest(model)
    with pytest.raises(ValueError, match=f'values of {name!r} are combined.*{{{name!r}: "sum"}}'):
        collected(model, devices, buffers="mean")
    assert ls.digest(model) == before


def test_so_it_is_where_nobody_reads_the_device() -> None:
    for name in ("histogram", "count"):
        model = Collecting(name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
        with pytest.raises(ValueError, match=f"values of {name!r} are combined"):
            collected(model, 2, buffers="mean", optimizer=optimizer, on_overflow="skip")


def refused_on_ranks(communicator: ls.Communicator) -> list[str]:
    found = []
    for name in ("histogram", "count"):
        torch.manual_seed(0)
        model = Collecting(name)
        before = ls.digest(model)
        with pytest.raises((ValueError, ls.PeerError), match="are combined") as error:
            collected(model, 1, num_shards=communicator.size, buffers="mean", communicator=communicator)
        assert ls.digest(model) == before
        found.append(type(error.value).__name__)
    return found


def test_ranks_with_one_shard_each_are_told_too() -> None:
    assert [names[0] for names in run_on_ranks(refused_on_ranks, 2)] == ["ValueError"] * 2


class Noting(nn.Linear):
    """Counts its samples, or keeps their largest number, in a floating-point buffer."""

    noted: torch.Tensor

    def __init__(self, *, counts: bool) -> None:
        super().__init__(2, 1)
        self.counts = counts
        self.register_buffer("noted", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noted = self.noted + len(x) if self.counts else torch.maximum(self.noted, x.max())
        return super().forward(x)


@pytest.mark.parametrize("devices", [["cpu"], ["cpu"] * 3])
@pytest.mark.parametrize("kind", [ls.DataParallel, ls.ReplicaGroup])
def test_modules_and_groups_say_that_a_rule_is_missing_in_the_first_training_forward(
    kind: Any, devices: list[str]
) -> None:
    x = torch.arange(16.0).view(8, 2)
    for model in (Noting(counts=True), Noting(counts=False)):
        part = kind(model, devices, num_shards=4)
        for _ in range(2):
            if model.counts:
                with pytest.raises(ValueError, match=r"'noted' .* every shard adds its number of samples to it"):
                    part.forward(x)
        if not model.counts:
            with pytest.warns(ls.DeterminismWarning, match="different values in the buffer 'noted'"):
                part.forward(x)
            part.forward(x)
    ruled = kind(Noting(counts=False), devices, num_shards=4, buffers={"noted": "mean"})
    ruled.forward(x)


def test_a_group_refuses_it_as_well() -> None:
    model = Collecting("histogram")
    with ls.ReplicaGroup(model, devices=["cpu"] * 2) as group, pytest.raises(ValueError, match="'histogram'"):
        group.forward(BATCH[0])


WRONG: dict[str, tuple[Any, str]] = {
    "an unknown rule": ("median", "must be one of 'mean', 'first', 'sum', 'min', 'max', or a dict"),
    "an unknown rule by name": ({"count": "add"}, "must be one of"),
    "a name that is none": ({"counts": "sum"}, "must name buffers of the model .*got 'counts'"),
    "a sum of booleans": ({"flag": "sum"}, "must not be 'sum' for 'flag', which is torch.bool"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_rule_that_cannot_be_followed_is_refused(case: str) -> None:
    rules, message = WRONG[case]
    model = Collecting("steps")
    model.register_buffer("flag", torch.tensor(False))
    with pytest.raises(ValueError, match=message):
        collected(model, 1, buffers=rules)


def test_the_name_counts_before_patterns_and_the_first_pattern_before_others() -> None:
    model = Collecting("seen")
    # Shards of 4, 3, 3 and 3 samples, in three updates.
    rules: dict[str, int] = {"max": 12, "min": 9, "sum": 39}
    for rule, expected in rules.items():
        given = {"s*": "max" if rule == "min" else rule, "see*": "first", "seen": rule}
        assert collected(Collecting("seen"), 2, buffers=given)["seen"] == expected
    assert collected(model, 2, buffers={"s*": "max", "see*": "min"})["seen"] == 12


def test_the_rules_are_part_of_the_recipe(tmp_path: Path) -> None:
    def trainer(rules: Any) -> ls.Trainer:
        torch.manual_seed(0)
        model = Collecting("seen")
        updater = ls.ParallelUpdater(
            ls.BatchIterator(TensorDataset(BATCH[0]), 13),
            torch.optim.SGD(model.parameters(), lr=0.125),
            model,
            devices=["cpu"],
            num_shards=2,
            loss_fn=mean_of_output,
            buffers=rules,
        )
        made = ls.Trainer(updater, until=(2, "iteration"), out=tmp_path)
        made.extend(ls.extensions.Snapshot(), trigger=(1, "iteration"))
        return made

    trainer({"seen": "sum"}).run()
    trainer({"seen": "sum"}).run(resume="auto")
    with pytest.raises(ls.StateError, match=r"buffers is .*'max'.* here and .*'sum'"):
        trainer({"seen": "max"}).run(resume="auto")


class Centred(nn.Module):
    """Has a buffer that is None until the first forward."""

    centre: torch.Tensor | None

    def __init__(self, *, remembers: bool) -> None:
        super().__init__()
        self.layer, self.remembers = nn.Linear(4, 1), remembers
        self.register_buffer("centre", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.centre is None:
            self.centre = x.mean(0) if self.remembers else torch.linspace(0.0, 1.0, 4)
        out: torch.Tensor = self.layer(x - self.centre)
        return out


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("devices", [1, 2])
def test_values_that_shards_assign_to_a_buffer_that_is_none(num_shards: int, devices: int) -> None:
    for remembers in (True, False):
        model = Centred(remembers=remembers)
        with updater_of(model, devices=devices, num_shards=num_shards) as updater, warnings.catch_warnings():
            warnings.simplefilter("error", ls.errors.DeterminismWarning)
            if remembers:
                warnings.simplefilter("always")
            with warnings.catch_warnings(record=True) as said:
                for seed in range(3):
                    updater.compute_gradients(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed)))
                    updater.apply_gradients()
        found = [each for each in said if "'centre' is None, and shards assign different values" in str(each.message)]
        # Once for each device.
        assert bool(found) == remembers
        assert len(found) <= devices


class Overlapping(nn.Linear):
    """Has a buffer and a view of a part of it."""

    table: torch.Tensor
    part: torch.Tensor

    def __init__(self, *, changes: bool) -> None:
        super().__init__(6, 4)
        self.changes = changes
        self.register_buffer("table", torch.ones(8))
        self.register_buffer("part", self.table[:4])
        self.register_buffer("rest", self.table[4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.changes:
            self.part.mul_(0.9)
        return super().forward(x) * self.table[:4]


@pytest.mark.parametrize("changes", [False, True])
def test_buffers_that_share_memory_are_refused_if_they_change(changes: bool) -> None:
    model = Overlapping(changes=changes)
    updater = ls.ParallelUpdater(
        [(torch.ones(4, 6), torch.ones(4, 4))],
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        num_shards=1,
        loss_fn=ls.supervised(nn.functional.mse_loss),
    )
    with finalized(updater):
        if changes:
            with pytest.raises(ValueError, match=r"share memory and that a forward changes, got '(table|part)' and"):
                updater.update()
        else:
            assert updater.update().applied
