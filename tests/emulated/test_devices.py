"""The emulated devices catch what goes wrong on GPUs and on no CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import lockstep as ls
from lockstep.replicas.pool import replica_set, settings
from lockstep.replicas.pool.replica_set import ParameterCopier
from tests.support import zygote
from tests.support.emulated import PROJECT, observed
from tests.support.emulated.pool import build_or_skip, on_emulated_devices
from tests.support.emulated.runs import ONE_CPU, train_on, updater_on
from tests.support.runs import cross_entropy, finalized
from tests.support.workloads import CONVNET, MLP

FIRST, SECOND = "emulated:0", "emulated:1"


@on_emulated_devices
def test_memory_is_poisoned_until_it_is_written_and_after_it_is_freed() -> None:
    assert torch.empty(5, device=FIRST).isnan().all()
    assert torch.empty(5, device=SECOND, dtype=torch.int64).eq(-1).all()
    kept = torch.ones(1000, device=FIRST)
    address = kept.data_ptr()
    del kept
    again = torch.empty(1000, device=FIRST)
    assert again.data_ptr() == address
    assert again.isnan().all()


@on_emulated_devices
def test_devices_have_memory_of_their_own() -> None:
    here = torch.ones(3, device=FIRST)
    there = here.to(SECOND)
    there.add_(1.0)
    assert (here.tolist(), there.tolist()) == ([1.0] * 3, [2.0] * 3)
    with pytest.raises(RuntimeError, match="same device"):
        here + there
    with pytest.raises(RuntimeError, match="same device"):
        here + torch.ones(3)


@on_emulated_devices
def test_a_seed_gives_the_numbers_of_the_cpu() -> None:
    torch.manual_seed(5)
    here, there = torch.randn(7), torch.randn(7, device=SECOND)
    assert torch.equal(here, there.cpu())


@on_emulated_devices
@pytest.mark.parametrize("waits", [False, True])
def test_a_stream_that_does_not_wait_for_another_races(*, waits: bool) -> None:
    side = torch.Stream(FIRST)
    with observed() as record:
        values = torch.ones(4, device=FIRST)
        with side:
            if waits:
                side.wait_stream(torch.emulated.default_stream(FIRST))
            doubled = values * 2
        if waits:
            torch.accelerator.current_stream(FIRST).wait_stream(side)
        doubled += 1
    assert bool(record.races) is not waits, record.races
    assert all("no event orders them" in race.what and "test_devices.py" in race.place for race in record.races)


@on_emulated_devices
@pytest.mark.parametrize("recorded", [False, True])
def test_memory_that_is_freed_while_another_stream_reads_it_races(*, recorded: bool) -> None:
    side = torch.Stream(FIRST)
    with observed() as record:
        values = torch.ones(500, device=FIRST)
        side.wait_stream(torch.accelerator.current_stream(FIRST))
        with side:
            total = values.sum()
        if recorded:
            values.record_stream(side)
        del values
        torch.empty(500, device=FIRST)
        del total
    assert bool(record.races) is not recorded, record.races


@on_emulated_devices
def test_a_copy_to_the_cpu_arrives_when_it_is_waited_for() -> None:
    values = torch.arange(4, device=FIRST)
    arrived = values.to("cpu", non_blocking=True)
    assert arrived.tolist() == [-1] * 4
    values.zero_()  # later in the stream than the copy
    torch.accelerator.synchronize(FIRST)
    assert arrived.tolist() == [0, 1, 2, 3]
    event = torch.Event(FIRST)
    again = values.to("cpu", non_blocking=True)
    event.record(torch.accelerator.current_stream(FIRST))
    assert not event.query()
    assert again.tolist() == [-1] * 4
    assert event.query()
    assert again.tolist() == [0] * 4


@on_emulated_devices
@pytest.mark.parametrize("waits", [False, True])
def test_pinned_memory_that_is_written_before_the_copy_has_read_it_races(*, waits: bool) -> None:
    source = torch.arange(4.0).pin_memory()
    with observed() as record:
        source.to(FIRST, non_blocking=True)
        if waits:
            torch.accelerator.synchronize(FIRST)
        source.zero_()
        torch.accelerator.synchronize(FIRST)
    assert bool(record.races) is not waits, record.races


@on_emulated_devices
def test_waits_are_counted_with_their_places() -> None:
    values = torch.ones(3, device=FIRST)
    with observed() as record:
        values.sum().item()
        values.cpu()
        torch.ones(3).to(FIRST)
        values.nonzero()
        values * 2
        torch.ones(3).pin_memory().to(FIRST, non_blocking=True)
    kinds = [wait.what for wait in record.waits]
    assert kinds == ["item", "copy to the CPU", "copy to the device", "aten::nonzero"]
    assert all(wait.place.startswith("tests/emulated/test_devices.py:") for wait in record.waits), record.waits


LEFT = """
import torch
from tests.support import emulated
emulated.load()
left = [torch.ones(size, device="emulated:0").to("cpu", non_blocking=True) for size in [3] * 9 + [3000]]
"""


def test_a_process_ends_while_copies_are_on_their_way() -> None:
    build_or_skip()
    done = zygote.run([sys.executable, "-c", LEFT], cwd=PROJECT)
    assert (done.returncode, done.stderr) == (0, "")


# Bugs planted in lockstep, which no test on CPUs can find ------------------------------------------------


@on_emulated_devices
def test_it_catches_a_missing_stream_wait() -> None:
    """Without the caller's streams, the thread of the second device reads what the caller's stream still writes."""
    side = torch.Stream(SECOND)

    def races() -> list[Any]:
        with finalized(updater_on(MLP, ["emulated:0", "emulated:1"])) as updater, observed() as record:
            side.wait_stream(torch.accelerator.current_stream(SECOND))
            with side:
                updater.update()
                updater.update()
            torch.accelerator.current_stream(SECOND).wait_stream(side)
        return record.races

    assert races() == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settings, "_switch_streams", lambda _: [])
        assert races()


@on_emulated_devices
def test_it_catches_a_copy_that_is_read_too_early() -> None:
    def on_the_cpu(model: Any, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        arrived = inputs.to(FIRST).to("cpu", non_blocking=early)
        return torch.nn.functional.cross_entropy(model(arrived), target)

    early = False
    expected = train_on(MLP, ONE_CPU, loss_fn=on_the_cpu)
    assert expected[0] == train_on(MLP, ONE_CPU)[0]
    early = True
    # What has not arrived is NaN, so no update is applied.
    with pytest.warns(ls.NonFiniteWarning, match="with a loss of nan"):
        found, _ = train_on(MLP, ONE_CPU, loss_fn=on_the_cpu)
    assert found != expected[0]


@on_emulated_devices
def test_it_catches_a_stale_replica() -> None:
    def copy_what_is_newer(copier: ParameterCopier) -> None:
        if copier._current_versions() != copier._versions:
            copy(copier)

    copy = ParameterCopier.copy
    places = ["emulated:0", "emulated:1"]
    expected = train_on(MLP, ONE_CPU, optimizer="fused")[0]
    assert train_on(MLP, places, optimizer="fused")[0] == expected
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_set.ParameterCopier, "copy", copy_what_is_newer)
        assert train_on(MLP, places, optimizer="fused")[0] != expected


@on_emulated_devices
def test_it_catches_a_wait_that_is_not_listed() -> None:
    def reading(model: Any, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model, inputs, target)
        assert loss.item() > 0.0
        return loss

    places = {wait.place for wait in train_on(CONVNET, ["emulated:0"], loss_fn=reading)[1].waits}
    assert any("test_devices.py" in place and place.endswith("reading") for place in places), places
