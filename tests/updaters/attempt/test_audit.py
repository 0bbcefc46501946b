"""Audits: one shard is computed twice, and what differs is raised, repeated or warned of."""

from __future__ import annotations

import itertools
import logging
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.digest import checksum
from lockstep.plan import Shard
from lockstep.updaters.attempt.audit import Auditor

NUM_SHARDS = 4


class Faulty(torch.autograd.Function):
    """Returns its input, and damages the gradient while `Fault.strikes` says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fault: Fault) -> torch.Tensor:
        ctx.fault = fault
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return ctx.fault.damage(grad), None


class Fault:
    """A fault of one device, which flips a bit or zeroes elements of a gradient in some of its backwards.

    Attributes:
        device: The index of the device, by the name of its thread.
        calls: The backwards of that device that are damaged, counted from 0.
        kind: Which damage.
    """

    def __init__(self, device: int = 0, calls: Callable[[int], bool] = lambda _: False, kind: str = "bit") -> None:
        self.device, self.calls, self.kind = device, calls, kind
        self.count = itertools.count()

    def damage(self, grad: torch.Tensor) -> torch.Tensor:
        name = threading.current_thread().name
        here = int(name.split("-")[1]) if name.startswith("lockstep-") else 0
        if here != self.device or not self.calls(next(self.count)):
            return grad
        grad = grad.clone()
        if self.kind == "bit":
            grad.view(torch.int32).view(-1)[int(grad.abs().argmax())] ^= 1 << 22
        else:
            grad.view(-1)[:1000] = 0.0
        return grad


class Net(nn.Module):
    """A network with batch statistics and dropout."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Linear(6, 300), nn.BatchNorm1d(300), nn.Linear(300, 3)
        self.faults = (lambda: fault,)  # not copied with the replicas

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(Faulty.apply(self.norm(self.stem(x)), self.faults[0]()))
        return self.head(functional.dropout(hidden, training=self.training))


def updater_of(num_devices: int, fault: Fault | None = None, **options: Any) -> ls.ParallelUpdater:
    torch.manual_seed(0)
    model = Net(fault or Fault())
    data = torch.utils.data.TensorDataset(torch.randn(48, 6), torch.randint(3, (48,)))
    return ls.ParallelUpdater(
        ls.BatchIterator(data, 16, shuffle=True, seed=3),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model,
        devices=["cpu"] * num_devices,
        **{"num_shards": NUM_SHARDS, "loss_fn": ls.supervised(functional.cross_entropy), **options},
    )


def run(updater: ls.ParallelUpdater, num_updates: int) -> None:
    for _ in range(num_updates):
        updater.update()


def digest_of(updater: ls.ParallelUpdater, num_updates: int = 4) -> str:
    run(updater, num_updates)
    found = ls.digest(updater.state_dict())
    updater.finalize()
    return found


@pytest.fixture(scope="module")
def clean() -> str:
    return digest_of(updater_of(1, audit_every=0))


@pytest.mark.each_value
@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("every", [None, 1, 3])
def test_audits_change_no_bit(clean: str, num_devices: int, every: int | None) -> None:
    assert digest_of(updater_of(num_devices, audit_every=every)) == clean


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"split": "strided"}, {"precision": "bf16"}])
def test_audits_change_no_bit_of_other_recipes(options: dict[str, Any]) -> None:
    assert digest_of(updater_of(2, audit_every=1, **options), 2) == digest_of(
        updater_of(1, audit_every=0, **options), 2
    )


def test_one_more_call_in_an_audited_update_and_three_for_parts_in_the_first() -> None:
    calls = itertools.count()

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        next(calls)
        return functional.cross_entropy(model(x), target)

    with updating(updater_of(1, loss_fn=loss_fn, audit_every=3)) as updater:
        for _ in range(4):
            updater.update()
    assert next(calls) == 4 * NUM_SHARDS + 2 + 3  # the updates 0 and 3


@pytest.mark.parametrize(("every", "audited"), [(None, {0, 8, 16, 32}), (16, {0, 16, 32}), (0, set())])
def test_updates_are_audited_again_after_8_16_and_32(every: int | None, audited: set[int]) -> None:
    calls = itertools.count()

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        next(calls)
        return functional.cross_entropy(model(x), target)

    with updating(updater_of(1, loss_fn=loss_fn, audit_every=every)) as updater:
        counts = []
        for _ in range(40):
            before = next(calls)
            updater.update()
            counts.append(next(calls) - before - 1)
    assert {update for update, count in enumerate(counts) if count > NUM_SHARDS} == audited
    # Of the shard and two parts of it, but not of update 16 where each 16th is audited anyway.
    assert set(counts) <= {NUM_SHARDS, NUM_SHARDS + 1, NUM_SHARDS + 1 + 3}


class Restarting(nn.Module):
    """A network that writes to a parameter once some updates have passed."""

    def __init__(self, updates: int) -> None:
        super().__init__()
        self.layer, self.updates, self.clock = nn.Linear(6, 3), updates, (lambda: 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.clock() >= self.updates:
            self.layer.weight.data[0] = x[0].detach()
        return self.layer(x)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(("begins", "found"), [(0, 0), (3, 8), (9, 16)])
def test_what_begins_later_is_refused_when_it_is_looked_for_again(num_devices: int, begins: int, found: int) -> None:
    model, batch = Restarting(begins), (torch.randn(16, 6), torch.randint(3, (16,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = ls.supervised(functional.cross_entropy)
    made = ls.ParallelUpdater([batch], optimizer, model, devices=["cpu"] * num_devices, num_shards=4, loss_fn=loss_fn)
    with updating(made) as updater:
        model.clock = lambda: updater.iteration
        run(updater, found)
        with pytest.raises(ValueError, match="must not write to its parameters"):
            updater.update()
        assert updater.iteration == found


class updating:  # noqa: N801 - a context
    """Finalizes an updater at the end."""

    def __init__(self, updater: ls.ParallelUpdater) -> None:
        self.updater = updater

    def __enter__(self) -> ls.ParallelUpdater:
        return self.updater

    def __exit__(self, *_: object) -> None:
        self.updater.finalize()


def test_a_batch_that_is_changed_in_place_is_what_it_would_be() -> None:
    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x.mul_(2)), target)

    found = set()
    for every in (0, 1):
        torch.manual_seed(0)
        batches = [(torch.randn(16, 6), torch.randint(3, (16,)))] * 3
        updater = updater_of(2, loss_fn=loss_fn, audit_every=every)
        with updating(updater):
            for batch in batches:
                updater.compute_gradients(batch)
                updater.apply_gradients()
        found.add(ls.digest(updater.state_dict()))
    assert len(found) == 1


@pytest.mark.parametrize("kind", ["bit", "zeros"])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_device_that_is_always_wrong_is_named(num_devices: int, kind: str) -> None:
    """Within as many audits as there are devices; with two devices only that they differ."""
    found = []
    for device in range(num_devices):
        updater = updater_of(num_devices, Fault(device, lambda _: True, kind), audit_every=1)
        with updating(updater), pytest.raises(ls.FaultError, match="the results differ in the gradient of") as error:
            run(updater, num_devices)
        assert updater.iteration < num_devices
        assert error.value.update == updater.iteration
        assert error.value.shard in range(NUM_SHARDS)
        found.append(
            (error.value.rank, None if error.value.device is None else str(error.value).split("device ")[1][0])
        )
    named = [(0, str(device)) for device in range(num_devices)]
    assert found == (named if num_devices > 2 else [(None, None)] * 2)


def test_a_fault_that_passes_is_found_exactly_where_its_shard_is_audited() -> None:
    runs = [[Shard(index, 0, range(1)) for index in range(NUM_SHARDS)]]
    wanted = Auditor(1, "raise", 0).choose([runs], 0, 0).shard.index
    for shard in range(NUM_SHARDS):
        updater = updater_of(1, Fault(0, lambda call, at=shard: call == at), audit_every=1)  # type: ignore[misc]
        with updating(updater):
            if shard != wanted:
                updater.update()
                continue
            with pytest.raises(ls.FaultError, match="computed other bits than the rest") as error:
                updater.update()
        assert (error.value.update, error.value.shard, error.value.rank, error.value.device) == (0, shard, 0, "cpu")
        assert updater.iteration == 0


def test_a_fault_that_passes_is_repeated(clean: str, caplog: pytest.LogCaptureFixture) -> None:
    for call in range(2 * NUM_SHARDS):
        updater = updater_of(1, Fault(0, lambda found, at=call: found == at), audit_every=1, on_fault="repeat")  # type: ignore[misc]
        with caplog.at_level(logging.WARNING, "lockstep"):
            found = digest_of(updater)
        was_audited = any("The update is repeated." in each.message for each in caplog.records)
        caplog.clear()
        # After the shards and the audit of the first update, gradients of a shard and of its two parts are compared.
        is_compared = NUM_SHARDS + 1 <= call < NUM_SHARDS + 4
        assert (found == clean) == (was_audited or is_compared)


def test_a_device_that_is_wrong_twice_is_an_error_even_so() -> None:
    updater = updater_of(3, Fault(1, lambda _: True), audit_every=1, on_fault="repeat")
    with updating(updater), pytest.raises(ls.FaultError):
        run(updater, 3)


def test_a_fault_is_a_warning_where_only_the_first_update_is_audited() -> None:
    with updating(updater_of(3, Fault(0, lambda _: True))) as updater:
        with pytest.warns(ls.DeterminismWarning, match=r"device 0\) of rank 0 computed other bits than the rest"):
            updater.update()
        updater.update()


def counter() -> Callable[..., torch.Tensor]:
    calls = itertools.count()
    return lambda model, x, target: functional.cross_entropy(model(x), target) * (1 + next(calls) / 1000)


def generator_of_ones_own() -> Callable[..., torch.Tensor]:
    drawn = iter(random.Random(0).random, None)  # noqa: S311 - no secrets
    return lambda model, x, target: functional.cross_entropy(model(x), target) * next(drawn)


def previous_loss() -> Callable[..., torch.Tensor]:
    last = [1.0]

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = functional.cross_entropy(model(x), target)
        last.append(loss.item() / last[-1])
        return loss * last[-2]

    return loss_fn


def place() -> Callable[..., torch.Tensor]:
    main = threading.main_thread()
    return lambda model, x, target: (
        functional.cross_entropy(model(x), target) * (2.0 if threading.current_thread() is main else 1.0)
    )


SINS = {"counter": counter, "generator": generator_of_ones_own, "previous loss": previous_loss, "thread": place}


@pytest.mark.parametrize("name", SINS)
def test_the_first_update_warns_of_what_it_depends_on(name: str) -> None:
    with updating(updater_of(2, loss_fn=SINS[name]())) as updater:
        with pytest.warns(ls.DeterminismWarning, match="`lockstep verify` names the operator") as warned:
            run(updater, 3)
        assert len(warned) == 1


class Counting(torch.utils.data.Dataset[Any]):
    """A dataset that counts its calls."""

    def __init__(self) -> None:
        self.calls = itertools.count()

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((6,), index + next(self.calls) / 7), index % 3


def test_a_dataset_with_state_is_warned_of() -> None:
    model = nn.Linear(6, 3)
    updater = ls.ParallelUpdater(
        ls.BatchIterator(Counting(), 16),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"],
        num_shards=NUM_SHARDS,
        loss_fn=ls.supervised(functional.cross_entropy),
    )
    with updating(updater), pytest.warns(ls.DeterminismWarning, match="a dataset with state"):
        updater.update()


def test_a_batch_whose_shards_begin_inside_of_a_cache_line_raises_no_alarm() -> None:
    """Products round by the place in memory, so that a copy has to lie as the shard does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 3))
    batches = [(torch.randn(11, 7), torch.randint(3, (11,))) for _ in range(8)]
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.1), ls.supervised(functional.cross_entropy)
    updater = ls.ParallelUpdater(
        batches, optimizer, model, devices=["cpu"], num_shards=NUM_SHARDS, loss_fn=loss_fn, audit_every=1
    )
    with updating(updater), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(updater, len(batches))


class Extremes(nn.Module):
    """Records the largest activation, as observers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("largest", torch.zeros(()))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.largest = torch.maximum(self.largest, x.detach().max())
        return self.norm(x)


@pytest.mark.parametrize(("rule", "warns"), [("mean", True), ({"largest": "mean"}, False), ({"lar*": "max"}, False)])
def test_a_buffer_that_is_averaged_in_silence_is_named(rule: Any, *, warns: bool) -> None:
    model = Extremes()
    with updating(averaging(model, rule)) as updater, warnings.catch_warnings():
        warnings.simplefilter("error")
        if warns:
            with pytest.raises(ls.DeterminismWarning, match="the buffer 'largest', which `buffers` does"):
                updater.update()
        else:
            updater.update()


def averaging(model: nn.Module, buffers: Any, **options: Any) -> ls.ParallelUpdater:
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randint(3, (32,)))
    return ls.ParallelUpdater(
        ls.BatchIterator(data, 16),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        **{"devices": ["cpu"] * 2, "num_shards": NUM_SHARDS, "buffers": buffers, **options},
        loss_fn=ls.supervised(functional.cross_entropy),
    )


@pytest.mark.parametrize(("options", "kind"), [({"audit_every": -1}, ValueError), ({"audit_every": 1.5}, TypeError)])
def test_options_out_of_range_are_refused(options: dict[str, Any], kind: type[Exception]) -> None:
    with pytest.raises(kind, match="`audit_every` must"):
        updater_of(1, **options)
    with pytest.raises(ValueError, match="`on_fault` must be 'raise' or 'repeat', got 'ignore'"):
        updater_of(1, on_fault="ignore")


def test_places_take_turns() -> None:
    """Each is audited as often, and audits as often, by every other one."""
    auditor = Auditor(5, "raise", 7)
    everywhere = [[[Shard(2 * rank + device, 0, range(1))] for device in range(2)] for rank in range(2)]
    chosen = [auditor.choose(everywhere, 0, 5 * number) for number in range(12)]
    assert len({(each.place, each.other) for each in chosen}) == 12
    assert {each.place for each in chosen[:4]} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(len({each.place, each.other, each.spare}) == 3 for each in chosen)


def test_a_place_among_others_of_another_type_audits_itself() -> None:
    auditor, everywhere = Auditor(1, "raise", 7), [[[Shard(0, 0, range(1))], [Shard(1, 0, range(1))]]]
    auditor.is_mixed = True
    chosen = [auditor.choose(everywhere, 0, number) for number in range(4)]
    assert {each.place for each in chosen} == {(0, 0), (0, 1)}
    assert all(each.place == each.other == each.spare for each in chosen)


def test_a_checksum_finds_every_bit() -> None:
    for tensor in (torch.randn(7), torch.randn(3).bfloat16(), torch.randn(5, 3, dtype=torch.float64).T):
        before = checksum(tensor)
        flat = tensor.contiguous()
        for bit in range(8 * flat.nbytes):
            damaged = flat.clone()
            damaged.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            assert checksum(damaged) != before
        assert checksum(tensor.clone()) == before


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 3])
def test_no_alarm_in_many_clean_updates(num_devices: int) -> None:
    with updating(updater_of(num_devices, audit_every=1)) as updater, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5000):
            updater.update()


@pytest.mark.slow
def test_each_of_many_faults_is_found_where_its_shard_is_audited() -> None:
    """Each update starts from the same state with another fault; an error is raised exactly in audited shards."""
    fault, chosen, found = Fault(0), random.Random(1), 0  # noqa: S311 - no secrets
    with updating(updater_of(1, fault, audit_every=1)) as updater:
        for number in range(1000):
            wanted = Auditor(1, "raise", 0).choose(
                [[[Shard(index, 0, range(1)) for index in range(NUM_SHARDS)]]], 0, updater.iteration
            )
            hit = chosen.randrange(NUM_SHARDS)
            fault.calls, fault.count = (lambda call, at=hit: call == at), itertools.count()
            fault.kind = ("bit", "zeros")[number % 2]
            before = updater.iteration
            if hit == wanted.shard.index:
                with pytest.raises(ls.FaultError) as error:
                    updater.update()
                assert (error.value.update, error.value.shard, error.value.device) == (before, hit, "cpu")
                found += 1
                fault.calls = lambda _: False
            updater.update()
    assert 200 < found < 300


class Collecting(torch.optim.SGD):
    """Steps by what a hook of a module has collected, as optimizers with Kronecker factors do."""

    def __init__(self, model: nn.Module, *, collects: bool) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.factors = {"input": torch.eye(6), "constant": torch.ones(6)}
        if collects:
            model.register_forward_pre_hook(lambda _, inputs: self.collect(inputs[0]))

    def collect(self, x: torch.Tensor) -> None:
        self.factors["input"].mul_(0.9).add_(x.T @ x, alpha=0.1)


@pytest.mark.parametrize("collects", [True, False])
def test_what_an_optimizer_collects_while_shards_are_computed_is_named(collects: bool) -> None:
    model = nn.Linear(6, 3)
    optimizer = Collecting(model, collects=collects)
    updater = ls.ParallelUpdater(
        [(torch.randn(8, 6), torch.arange(8) % 3)] * 3,
        optimizer,
        model,
        devices=["cpu"],
        num_shards=2,
        loss_fn=ls.supervised(functional.cross_entropy),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            updater.update()
    updater.finalize()
    texts = [str(each.message) for each in caught]
    assert [text.partition(". ")[0] for text in texts] == [
        "While a shard was computed, this changed, which is no part of the model: `Collecting.factors['input']`"
    ] * collects


def test_a_hook_that_looks_a_module_up_is_told_of_the_copies() -> None:
    model = nn.Linear(6, 3)
    names = {model: "the layer"}
    model.register_forward_pre_hook(lambda module, _: names[module] and None)
    updater = ls.ParallelUpdater(
        [(torch.randn(8, 6), torch.arange(8) % 3)],
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        devices=["cpu"],
        loss_fn=ls.supervised(functional.cross_entropy),
    )
    with pytest.raises(ls.ReplicaError, match=r"a Linear is no key\. Devices compute with copies of the model"):
        updater.update()
    updater.finalize()
