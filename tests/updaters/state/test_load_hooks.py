"""Hooks bring a saved state up to date before it is checked, and a load that fails changes nothing."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.small_updater import updater_of


class Head(nn.Module):
    """Was saved with the name "scale" for its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 2.0))
        self.register_buffer("seen", torch.zeros(1))
        self.register_load_state_dict_pre_hook(rename_scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.weight * x


def rename_scale(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    if prefix + "scale" in state:
        state[prefix + "weight"] = state.pop(prefix + "scale")


class Layer(nn.Module):
    """Counts in halves since version 2, and says so by its version alone."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[prefix + "weight"] = state[prefix + "weight"] * 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.body = nn.Sequential(nn.Identity(), Head())
        self.register_load_state_dict_pre_hook(rename_block)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x))


def rename_block(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    for name in [name for name in state if name.startswith(prefix + "block.")]:
        state[name.replace(prefix + "block.", prefix + "body.")] = state.pop(name)


@contextmanager
def training(**options: Any) -> Iterator[ls.ParallelUpdater]:
    model = Network()
    optimizer = ls.optim.MomentumSGD(model.parameters(), lr=0.125)
    with updater_of(model, torch.arange(8.0).reshape(8, 1), optimizer=optimizer, **options) as updater:
        yield updater


def old_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Give a state as the code before wrote it."""
    old = copy.deepcopy(dict(state))
    model = old["models"]["main"]
    model["block.1.scale"] = model.pop("body.1.weight")
    model["block.1.seen"] = model.pop("body.1.seen")
    return old


def test_hooks_of_modules_bring_an_old_state_up_to_date() -> None:
    with training(num_shards=2) as first, training(devices=["cpu"] * 2, num_shards=2) as second:
        first.update()
        state = old_state(first.state_dict())
        names = list(state["models"]["main"])
        second.load_state_dict(state)
        assert list(state["models"]["main"]) == names
        assert ls.digest(second.state_dict()) == ls.digest(first.state_dict())
        first.update(), second.update()
        assert ls.digest(second.state_dict()) == ls.digest(first.state_dict())


def test_the_versions_of_modules_are_part_of_a_state() -> None:
    with training() as first, training() as second, training() as third:
        first.update()
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=True))
        assert ls.digest(second.state_dict()) == ls.digest(first.state_dict())
        old = copy.deepcopy(first.state_dict())
        old["models"]["main"] = dict(old["models"]["main"])  # written before there were versions
        third.load_state_dict(old)
        weights = [each.get_all_models()["main"].layer.weight for each in (first, third)]
        assert torch.equal(weights[0] * 2, weights[1])


def test_names_that_no_hook_knows_are_refused_and_nothing_is_changed() -> None:
    with training() as updater:
        updater.update()
        state = old_state(updater.state_dict())
        updater.update()
        before = ls.digest(updater.state_dict())
        state["models"]["main"]["block.1.stray"] = torch.ones(1)
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "body.1.stray"'):
            updater.load_state_dict(state)
        assert ls.digest(updater.state_dict()) == before


class Grown(nn.Module):
    """Takes over a buffer of any size, and something that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("known", torch.zeros(1))
        self.note = "here"

    def get_extra_state(self) -> list[str]:
        return [self.note]

    def set_extra_state(self, state: list[str]) -> None:
        (self.note,) = state

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.known = torch.zeros_like(state[prefix + "known"])
        super()._load_from_state_dict(state, prefix, *rest)


def test_what_a_load_put_in_place_of_tensors_is_taken_back() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grown, self.lazy, self.head = Grown(), nn.LazyLinear(1, bias=False), Head()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.lazy(x))

    model = Whole()
    with updater_of(model) as updater:
        state = copy.deepcopy(updater.state_dict())
        known, weight = model.grown.known, model.lazy.weight
        saved = state["models"]["main"]
        saved.update({"grown.known": torch.ones(3), "grown._extra_state": ["there"], "lazy.weight": torch.ones(1, 1)})
        saved["head.weight"] = torch.ones(2)
        with pytest.raises(RuntimeError, match=r"size mismatch for head.weight"):
            updater.load_state_dict(state)
        assert model.grown.known is known
        assert model.grown.note == "here"
        assert model.lazy.weight is weight
        assert isinstance(weight, nn.UninitializedParameter)
        saved["head.weight"] = torch.ones(1)
        updater.load_state_dict(state)
        assert (model.grown.note, model.grown.known.tolist()) == ("there", [1.0] * 3)
        updater.update()


def test_a_parameter_without_a_shape_may_be_renamed() -> None:
    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.new = nn.LazyLinear(1)
            self.register_load_state_dict_pre_hook(self.rename)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.new(x)

        @staticmethod
        def rename(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
            for name in ("weight", "bias"):
                if prefix + "old." + name in state:
                    state[prefix + "new." + name] = state.pop(prefix + "old." + name)

    with updater_of(Renamed()) as updater:
        state = updater.state_dict()
        saved = state["models"]["main"]
        state["models"]["main"] = {name.replace("new", "old"): value for name, value in saved.items()}
        updater.load_state_dict(state)
        updater.update()
        assert updater.state_dict()["models"]["main"]["new.weight"].shape == (1, 1)


# Optimizers -----------------------------------------------------------------------------------


def rename_state(_: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
    """Bring a state up to date from before the count of updates, when the velocity was called "momentum"."""
    if "t" in state:
        return None
    remembered = {
        index: {"velocity" if key == "momentum" else key: value for key, value in each.items()}
        for index, each in state["state"].items()
    }
    return {**state, "state": remembered, "t": 0}


def before_the_count(state: Mapping[str, Any]) -> dict[str, Any]:
    old = {key: value for key, value in state.items() if key != "t"}
    old["state"] = {
        index: {"momentum" if key == "velocity" else key: value for key, value in each.items()}
        for index, each in state["state"].items()
    }
    return old


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weight.grad = torch.ones_like(weight)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("masters", [False, True])
def test_hooks_of_optimizers_come_before_the_check(masters: bool) -> None:
    def build() -> ls.optim.MomentumSGD:
        weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16 if masters else torch.float32))
        made = ls.optim.MomentumSGD([weight], lr=0.5)
        if masters:
            made.use_fp32_update()
        return made

    first, second = stepped(build()), build()
    calls: list[dict[str, Any]] = []
    second.register_load_state_dict_pre_hook(lambda _, state: calls.append(state))
    old = before_the_count(first.state_dict())
    with pytest.raises(ls.StateError, match=r"The state of an optimizer must hold .*; missing: 't'"):
        second.load_state_dict(old)
    assert ls.digest(second) == ls.digest(build())
    second.register_load_state_dict_pre_hook(rename_state)
    second.load_state_dict(old)
    assert len(calls) == 2
    assert ls.digest(second) == ls.digest({**first.state_dict(), "t": 0})
    assert "t" not in old


def test_a_hook_that_raises_changes_nothing() -> None:
    first, second = (stepped(ls.optim.MomentumSGD([nn.Parameter(torch.ones(2))], lr=lr)) for lr in (0.5, 0.25))
    before = ls.digest(second)

    def spring(*_: Any) -> None:
        raise ValueError("sprung")

    handle = second.register_load_state_dict_pre_hook(spring)
    with pytest.raises(ValueError, match="sprung"):
        second.load_state_dict(first.state_dict())
    assert ls.digest(second) == before
    handle.remove()
    second.load_state_dict(first.state_dict())
    assert ls.digest(second) == ls.digest(first)


@pytest.mark.parametrize("own", [True, False])
def test_an_updater_restores_optimizers_without_their_hooks(own: bool) -> None:
    model = Network()
    rule = ls.optim.MomentumSGD if own else torch.optim.SGD
    optimizer = rule(model.parameters(), lr=0.125, momentum=0.5)

    def migrate(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        del state["old"]  # knows only states of before, which had this key

    with updater_of(model, torch.arange(8.0).reshape(8, 1), optimizer=optimizer) as updater:
        updater.update()
        state = updater.state_dict()
        state["optimizers"]["main"]["old"] = 1
        updater.update()
        before = ls.digest(updater.state_dict())
        optimizer.register_load_state_dict_pre_hook(migrate)
        broken = copy.deepcopy(state)
        broken["optimizers"]["main"]["param_groups"] = []
        with pytest.raises((ls.StateError, ValueError), match="groups"):
            updater.load_state_dict(broken)
        assert ls.digest(updater.state_dict()) == before
        updater.load_state_dict(state)
        assert "old" in state["optimizers"]["main"]
        del state["optimizers"]["main"]["old"]
        assert ls.digest(updater.state_dict()) == ls.digest(state)


# Wrappers -------------------------------------------------------------------------------------


def test_hooks_of_a_wrapper_see_the_names_that_are_saved() -> None:
    for wrapped in (ls.DataParallel(Head(), devices=["cpu"] * 2), ls.OnDevice(Head(), "cpu")):
        seen: list[set[str]] = []

        def note(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any, seen: list[Any] = seen) -> None:
            seen.append(set(state))
            state[prefix + "weight"] = state.pop(prefix + "renamed")

        wrapped.register_load_state_dict_pre_hook(note)
        net = nn.Sequential(wrapped)
        net.load_state_dict({"0.renamed": torch.full((1,), 5.0), "0.seen": torch.ones(1)})
        assert seen == [{"0.renamed", "0.seen"}]
        assert net.state_dict()["0.weight"].tolist() == [5.0]
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "0.stray"'):
            net.load_state_dict({"0.renamed": torch.ones(1), "0.seen": torch.ones(1), "0.stray": torch.ones(1)})
        assert len(wrapped._load_state_dict_pre_hooks) == 1
