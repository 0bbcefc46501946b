"""What went wrong on accelerators before they could be emulated, each with the test that found it."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.communicators import RunEnvironment
from lockstep.precision import nonfinite_flags
from lockstep.replicas.pool.devices import _of_rank, parse_devices
from lockstep.replicas.pool.settings import ThreadSettings, inherited
from lockstep.streams import DefaultStream
from tests.support.emulated.pool import on_emulated_devices
from tests.support.emulated.runs import updater_on
from tests.support.runs import cross_entropy, finalized
from tests.support.workloads import MLP

FIRST, SECOND = "emulated:0", "emulated:1"


@on_emulated_devices
def test_accelerators_of_any_type_are_found() -> None:
    assert parse_devices("auto") == [torch.device("emulated", index) for index in range(4)]
    assert parse_devices(2) == [torch.device(FIRST), torch.device(SECOND)]
    with pytest.raises(ValueError, match=r"emulated devices 0\.\.3; got 'emulated:4'"):
        parse_devices("emulated:4")
    shares = [_of_rank(None, RunEnvironment(rank, 2, rank, 2)) for rank in range(2)]
    assert [[device.index for device in share] for share in shares] == [[0, 1], [2, 3]]


@on_emulated_devices
def test_settings_hold_the_streams_of_the_devices_in_use_and_set_what_differs() -> None:
    devices = parse_devices([FIRST, SECOND])
    side = torch.Stream(SECOND)
    with side:
        taken = ThreadSettings.capture(["emulated"], devices)
    assert len(taken.streams) == 2
    set_to: list[torch.Stream] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.emulated, "set_stream", set_to.append)
        with inherited(ThreadSettings.capture(["emulated"], devices)):
            assert set_to == []
        assert set_to == []
        with inherited(taken):
            assert set_to == [side]
    assert set_to[0] == side


@on_emulated_devices
def test_a_stream_of_random_numbers_needs_a_default_generator() -> None:
    with pytest.raises(ValueError, match="accelerators with default generators, got meta"):
        DefaultStream("meta")
    with DefaultStream(SECOND) as stream:
        stream.seed(4)
        first = torch.randn(3, device=SECOND)
        stream.seed(4)
        assert torch.equal(first, torch.randn(3, device=SECOND))


@on_emulated_devices
def test_an_optimizer_of_parameters_that_moving_the_model_replaced_is_refused() -> None:
    """On such a device, `Module.to` replaces parameters, so an optimizer from before would move nothing."""
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = ls.BatchIterator(MLP.data(8), 4)
    with pytest.raises(ValueError, match=r"call `model.to\(device\)` before"):
        ls.ParallelUpdater(batches, optimizer, model, devices=[FIRST], loss_fn=cross_entropy)
    with pytest.raises(ValueError, match="create the optimizer again"):
        ls.ParallelUpdater(batches, optimizer, model, devices=[FIRST], loss_fn=cross_entropy)
    with finalized(updater_on(MLP, [FIRST])) as updater:
        updater.update()
        updater.get_all_models()["main"].to("cpu")
        with pytest.raises(ValueError, match="belongs to it any more"):
            updater.update()


@on_emulated_devices
@pytest.mark.parametrize("devices", [(FIRST, "cpu"), (FIRST, SECOND), ("cpu", "cpu")], ids=str)
def test_places_of_several_types_are_warned_of(devices: tuple[str, ...]) -> None:
    mixed = len({name.partition(":")[0] for name in devices}) > 1
    expected: Any = pytest.warns(UserWarning, match="guarantee is suspended") if mixed else nullcontext()
    with warnings.catch_warnings(), expected:
        warnings.simplefilter("always" if mixed else "error")
        ls.DataParallel(nn.Linear(2, 1), devices=devices).release()


@on_emulated_devices
def test_what_a_shard_seeds_stays_on_its_device() -> None:
    def seeding(model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return nn.functional.cross_entropy(model(inputs + torch.rand_like(inputs)), target)

    with finalized(updater_on(MLP, [FIRST, SECOND], loss_fn=seeding)) as updater:
        before = [torch.emulated.get_rng_state(index) for index in range(4)]
        updater.update()
    assert all(map(torch.equal, before, [torch.emulated.get_rng_state(index) for index in range(4)]))


@on_emulated_devices
def test_a_gradient_may_have_no_elements() -> None:
    gradients = [torch.empty(0, device=FIRST), torch.tensor([float("inf")], device=FIRST)]
    assert nonfinite_flags(gradients).tolist() == [0.0, 1.0]
