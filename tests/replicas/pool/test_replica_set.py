"""Replicas: shared memory, carried settings, followed changes, surfaced errors."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import lockstep as ls
from lockstep.replicas.pool.settings import SMALLEST_DENORMAL
from lockstep.streams import DEFAULT_GENERATOR_LOCK
from tests.support.small_updater import updater_of


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


def test_replicas_share_the_memory_of_parameters_and_nothing_else() -> None:
    model = net()
    with ls.ReplicaGroup(model, ["cpu"] * 3) as group:
        assert len(group.replicas) == 3
        for replica in group.replicas:
            assert replica is not model
            for own, original in zip(replica.parameters(), model.parameters(), strict=True):
                assert own is not original
                assert own.data_ptr() == original.data_ptr()
                assert own.grad is None
            for own, original in zip(replica.buffers(), model.buffers(), strict=True):
                assert own.data_ptr() != original.data_ptr()


def test_ties_stay_ties() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    model["c"] = model["a"]
    with ls.ReplicaGroup(model, ["cpu"] * 2) as group:
        for replica in group.replicas:
            assert replica["b"].weight is replica["a"].weight
            assert replica["c"] is replica["a"]


def settings_seen() -> dict[str, Any]:
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "denormals": SMALLEST_DENORMAL * 1.0 == 0.0,
    }


def seen_by_all(group: ls.ReplicaGroup) -> list[dict[str, Any]]:
    seen: dict[int, dict[str, Any]] = {}

    def look(place: int) -> None:
        seen[place] = settings_seen()

    group.run(look)
    return [seen[place] for place in range(len(group.devices))]


@pytest.mark.parametrize(
    ("ambient", "name", "value"),
    [
        (torch.no_grad, "grad", False),
        (torch.enable_grad, "grad", True),
        (torch.inference_mode, "inference", True),
        (lambda: torch.autocast("cpu", torch.float16), "autocast dtype", torch.float16),
        (lambda: torch.autocast("cpu", torch.bfloat16), "autocast", True),
        (lambda: torch.device("meta"), "device", torch.device("meta")),
    ],
)
def test_settings_of_the_caller_reach_every_thread(ambient: Callable[[], Any], name: str, value: object) -> None:
    before = settings_seen()
    with ls.ReplicaGroup(net(), ["cpu"] * 3) as group:
        for _ in range(2):  # the threads keep nothing of the first time
            with ambient():
                inside = settings_seen()
                found = seen_by_all(group)
                assert settings_seen() == inside
            assert [seen[name] for seen in found] == [value] * 3
            assert [seen["threads"] for seen in found] == [1] * 3
            assert [seen["autocast cache"] for seen in found] == [False] * 3
            outside = seen_by_all(group)
            assert all(seen[name] == before[name] for seen in outside)
    assert settings_seen() == before


def test_the_default_dtype_reaches_every_thread() -> None:
    with ls.ReplicaGroup(net(), ["cpu"] * 2) as group:
        torch.set_default_dtype(torch.float64)
        try:
            assert [seen["dtype"] for seen in seen_by_all(group)] == [torch.float64] * 2
        finally:
            torch.set_default_dtype(torch.float32)


def test_rounding_of_denormals_reaches_every_thread() -> None:
    with ls.ReplicaGroup(net(), ["cpu"] * 2) as group:
        assert [seen["denormals"] for seen in seen_by_all(group)] == [False] * 2
        torch.set_flush_denormal(True)
        try:
            assert [seen["denormals"] for seen in seen_by_all(group)] == [True] * 2
        finally:
            torch.set_flush_denormal(False)
        assert [seen["denormals"] for seen in seen_by_all(group)] == [False] * 2


def replaced(model: nn.Module) -> None:
    model[0] = nn.Linear(3, 4)


def assigned(model: nn.Module) -> None:
    state = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()})


def moved(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data + 1.0


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "attribute": lambda model: setattr(model[2], "p", 0.25),
    "eval": lambda model: model.eval(),
    "frozen": lambda model: model[0].requires_grad_(False),
    "replaced": replaced,
    "assigned": assigned,
    "loaded": loaded,
    "moved": moved,
    "double": lambda model: model.double(),
    "appended": lambda model: model.append(nn.Linear(2, 2)),
    "momentum": lambda model: setattr(model[1], "momentum", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_replicas_follow_the_model(change: str) -> None:
    model = net()
    with ls.ReplicaGroup(model, ["cpu"] * 2) as group:
        first = group.replicas
        assert group.replicas is first
        CHANGES[change](model)
        for replica in group.replicas:
            assert repr(replica) == repr(model)
            assert replica[2].p == model[2].p
            assert replica.training == model.training
            for own, original in zip(replica.parameters(), model.parameters(), strict=True):
                assert own.dtype == original.dtype
                assert own.requires_grad == original.requires_grad
                assert own.data_ptr() == original.data_ptr()
        again = group.replicas
        assert group.replicas is again


class Configured(nn.Module):
    """Computes with values that its attributes hold."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.scales = {"first": [1.0, 2.0]}
        self.config = SimpleNamespace(scale=1.0, inner=SimpleNamespace(skipped={1}))
        self.mask = torch.ones(3)
        self.pair = ([1.0], 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.scales["first"][0] * self.config.scale * len(self.config.inner.skipped) * sum(self.pair[0])
        return self.layer(x * self.mask) * scale


IN_PLACE: dict[str, Callable[[Configured], object]] = {
    "a list in a dict": lambda model: model.scales["first"].__setitem__(0, 3.0),
    "a dict": lambda model: model.scales.update(first=[4.0]),
    "an object": lambda model: setattr(model.config, "scale", 3.0),
    "a set in an object": lambda model: model.config.inner.skipped.add(2),
    "a tensor": lambda model: model.mask.mul_(0.5),
    "a list in a tuple": lambda model: model.pair[0].append(2.0),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_replicas_follow_what_attributes_hold(change: str) -> None:
    model = Configured()
    x = torch.ones(2, 3)
    with ls.ReplicaGroup(model, ["cpu"] * 2) as group:
        before = group.forward(x)
        first = group.replicas
        assert group.replicas is first
        IN_PLACE[change](model)
        expected = model(x).detach()
        assert not torch.equal(before, expected)
        assert torch.equal(group.forward(x).detach(), expected)
        again = group.replicas
        assert group.replicas is again


def test_replicas_stay_where_what_they_share_or_hold_much_of_changes() -> None:
    model = Configured()
    model.log = logging.getLogger("tests.shared")  # type: ignore[assignment]  # of which there is one for all copies
    model.history = list(range(20_000))  # type: ignore[assignment]
    with ls.ReplicaGroup(model, ["cpu"] * 2) as group:
        group.forward(torch.ones(2, 3))
        first = group.replicas
        model.history.append(1)  # type: ignore[operator]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logging.getLogger("tests.shared"), "level", logging.ERROR)
            group.forward(torch.ones(2, 3))
        assert group.replicas is first


class Recorder:
    """Something outside the model that wants to hear of its forwards."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def hear(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG002 - torch's interface
        self.heard.append(len(args[0]))

    def __call__(self, *args: Any) -> None:
        self.hear(*args)


def noting(heard: list[int], module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:  # noqa: ARG001 - torch's interface
    heard.append(len(args[0]))


HOOKS: dict[str, Callable[[Recorder], Any]] = {
    "a method": lambda recorder: recorder.hear,
    "an object": lambda recorder: recorder,
    "a partial": lambda recorder: functools.partial(noting, recorder.heard),
    "a closure": lambda recorder: lambda *args: recorder.heard.append(len(args[1][0])),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("devices", [1, 2])
def test_hooks_that_belong_to_others_are_called(kind: str, devices: int) -> None:
    model = nn.Linear(1, 1)
    recorder = Recorder()
    with updater_of(model, torch.ones(4, 1), devices=devices, num_shards=2) as updater:
        updater.update()
        handle = model.register_forward_hook(HOOKS[kind](recorder))
        updater.update()
        assert recorder.heard == [2, 2]
        handle.remove()
        updater.update()
        assert recorder.heard == [2, 2]


def test_a_models_own_hooks_go_with_it() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(1, 1)
            self.owners: list[int] = []
            self.register_forward_pre_hook(self.note)

        def note(self, module: nn.Module, args: Any) -> None:  # noqa: ARG002 - torch's interface
            assert module is self
            self.owners.append(id(module))

    model = Counting()
    with updater_of(model, torch.ones(4, 1), devices=2, num_shards=4, audit_every=0) as updater:
        updater.update()
        assert model.owners == []
        assert sum(len(replica.owners) for replica in updater._engine.replicas.replicas) == 4


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(1, 1)
    model.lock = threading.Lock()
    with (
        ls.ReplicaGroup(model, ["cpu"]) as group,
        pytest.raises(TypeError, match=r"`model` must be copyable by copy.deepcopy, got a Linear"),
    ):
        _ = group.replicas


class Renewed(nn.Linear):
    """Copied without the memo, so that ties and shared memory are lost."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Renewed:
        copied = Renewed(self.in_features, self.out_features)
        copied.load_state_dict(self.state_dict())
        return copied


class Itself(nn.Linear):
    """Gives itself as its copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Itself:
        return self


@pytest.mark.parametrize("kind", [Renewed, Itself])
def test_a_copy_with_parameters_of_its_own_is_refused(kind: type[nn.Linear]) -> None:
    """Replicas share memory by what deepcopy is told; a copy that does not would keep its first weights."""
    with (
        ls.ReplicaGroup(nn.Sequential(kind(2, 2)), ["cpu"]) as group,
        pytest.raises(TypeError, match=r"`model` must pass the memo .* whose copy has another '0\.weight'"),
    ):
        _ = group.replicas


class Asking(nn.Linear):
    """Asks, while it is copied, whether another thread could draw for its shards meanwhile."""

    answers: ClassVar[list[bool]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Asking:
        def ask() -> None:
            could = DEFAULT_GENERATOR_LOCK.acquire(blocking=False)
            self.answers.append(could)
            if could:
                DEFAULT_GENERATOR_LOCK.release()

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return self


def test_no_other_thread_draws_while_a_copy_restores_the_generators() -> None:
    Asking.answers.clear()
    # The copy has the parameters of the original, which is refused afterwards.
    with ls.ReplicaGroup(nn.Sequential(Asking(2, 2)), ["cpu"]) as group, pytest.raises(TypeError, match="whose copy"):
        _ = group.replicas
    assert Asking.answers == [False]


def test_a_closed_group_says_so() -> None:
    group = ls.ReplicaGroup(net(), ["cpu"] * 2)
    group.run(lambda _: None)
    group.close()
    group.close()
    with pytest.raises(ls.OrderError, match="A closed ReplicaGroup cannot be used"):
        group.run(lambda _: None)
    with pytest.raises(ls.OrderError, match="A closed ReplicaGroup cannot be used"):
        _ = group.replicas


def test_the_first_devices_error_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []

    def work(place: int) -> None:
        if place == 2:
            raise RuntimeError("place 2")
        time.sleep(0.05)
        ended.append(place)
        if place == 1:
            raise RuntimeError("place 1")

    with ls.ReplicaGroup(net(), ["cpu"] * 3) as group:
        with pytest.raises(RuntimeError, match="place 1"):
            group.run(work)
        assert sorted(ended) == [0, 1]
        assert group.stopping
        group.run(lambda _: None)
        assert not group.stopping


def test_a_failure_stops_the_other_replicas_at_their_next_look() -> None:
    looked: dict[int, bool] = {}

    def work(place: int) -> None:
        if place == 1:
            raise RuntimeError("place 1")
        deadline = time.monotonic() + 60
        while not group.stopping and time.monotonic() < deadline:
            time.sleep(0.001)
        looked[place] = group.stopping

    with ls.ReplicaGroup(net(), ["cpu"] * 3) as group, pytest.raises(RuntimeError, match="place 1"):
        group.run(work)
    assert looked == {0: True, 2: True}


def test_a_group_that_was_forgotten_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    group = ls.ReplicaGroup(net(), ["cpu"] * 3)
    group.run(lambda _: None)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("lockstep-")]
    assert len(threads) == 2
    del group
    gc.collect()
    for thread in threads:
        thread.join(timeout=60)
    assert set(threading.enumerate()) <= before


def test_each_replica_has_a_thread_that_lasts() -> None:
    seen: list[dict[int, int]] = []

    def note(place: int) -> None:
        seen[-1][place] = threading.get_ident()

    with ls.ReplicaGroup(net(), ["cpu"] * 3) as group:
        for _ in range(3):
            seen.append({})
            group.run(note)
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0].values())) == 3
    assert seen[0][0] == threading.get_ident()


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "computed",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        lambda layer: nn.utils.weight_norm(layer, "weight"),
    ],
    ids=["prune", "weight_norm"],
)
def test_weights_computed_before_each_forward(computed: Callable[[nn.Module], nn.Module]) -> None:
    # In float64, for in these gradients all but a little cancels.
    model, x = computed(nn.Linear(3, 2, dtype=torch.float64)), torch.arange(12.0).double().reshape(4, 3)
    with ls.ReplicaGroup(model, devices=["cpu", "cpu"]) as group:
        for _ in range(2):
            assert torch.allclose(group.forward(x), model(x))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
        group.forward(x)
        group.backward(torch.ones(4, 2, dtype=torch.float64))
    ours = [parameter.grad for parameter in model.parameters()]
    theirs = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(ours, theirs, strict=True))
