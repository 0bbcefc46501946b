"""States load into wrapped modules as into bare ones, with the versions that modules saved beside their tensors."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas import DataParallel, OnDevice


class Migrating(nn.Module):
    """Doubled its weight in version 2, and doubles it when it loads a state of version 1."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.weight * x).sum()

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: dict[str, Any], *arguments: Any
    ) -> None:
        if local_metadata.get("version") is None or local_metadata["version"] < 2:
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Migrating()


def in_parallel(module: nn.Module) -> nn.Module:
    return DataParallel(module, devices=["cpu", "cpu"])


def on_device(module: nn.Module) -> nn.Module:
    return OnDevice(module, "cpu")


BARE = Migrating
WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "DataParallel": lambda: in_parallel(Migrating()),
    "OnDevice": lambda: on_device(Migrating()),
    "DataParallel of OnDevice": lambda: in_parallel(on_device(Migrating())),
    "OnDevice of DataParallel": lambda: on_device(in_parallel(Migrating())),
}
AROUND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda module: module,
    "in a Sequential": lambda module: nn.Sequential(nn.Linear(2, 3), module),
    "twice as deep": lambda module: nn.Sequential(nn.Sequential(nn.Linear(2, 3), module)),
}


def weight_of(module: nn.Module) -> torch.Tensor:
    return next(
        parameter for name, parameter in module.named_parameters() if name.endswith("weight") and parameter.dim() == 1
    )


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("saved", [*WRAPPED, "bare"])
@pytest.mark.parametrize("loaded", [*WRAPPED, "bare"])
def test_a_module_that_migrates_by_version_leaves_a_current_state_alone(around: str, saved: str, loaded: str) -> None:
    source, target = (AROUND[around](WRAPPED.get(kind, BARE)()) for kind in (saved, loaded))
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1.5)
    target.load_state_dict(source.state_dict())
    assert ls.digest(source.state_dict()) == ls.digest(target.state_dict())


@pytest.mark.parametrize("kind", WRAPPED)
def test_an_old_state_is_migrated_once(kind: str) -> None:
    state = Migrating().state_dict()
    state._metadata[""]["version"] = 1  # type: ignore[attr-defined]
    module = WRAPPED[kind]()
    module.load_state_dict(state)
    assert torch.equal(weight_of(module), torch.full((3,), 2.0))
    module.load_state_dict(module.state_dict())
    assert torch.equal(weight_of(module), torch.full((3,), 2.0))


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_child_of_an_old_version_is_migrated_by_its_own(kind: str) -> None:
    """BatchNorm counted no batches before its version 2: a state without that count loads, by that version only."""
    state = Migrating().state_dict()
    del state["norm.num_batches_tracked"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "norm.num_batches_tracked"'):
        WRAPPED[kind]().load_state_dict(state)
    state._metadata["norm"]["version"] = 1  # type: ignore[attr-defined]
    WRAPPED[kind]().load_state_dict(state)


@pytest.mark.parametrize("kind", WRAPPED)
def test_tensors_are_named_as_they_are_saved(kind: str) -> None:
    net = nn.Sequential(nn.Linear(2, 3), WRAPPED[kind]())
    state = net.state_dict()
    state["1.wieght"] = state.pop("1.weight") if "1.weight" in state else torch.ones(3)
    state["1.norm.mean"] = torch.ones(3)
    state["1.weight"] = torch.ones(3)
    del state["1.norm.bias"]
    found = net.load_state_dict(state, strict=False)
    assert found.missing_keys == ["1.norm.bias"]
    assert sorted(found.unexpected_keys) == ["1.norm.mean", "1.wieght"]


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_load_that_fails_leaves_the_wrapper_whole(kind: str) -> None:
    module = WRAPPED[kind]()
    inner = next(each for each in module.modules() if isinstance(each, Migrating))

    def refuse(*_: Any) -> None:
        raise ZeroDivisionError

    for owner in (inner, inner.norm):
        handle = owner.register_load_state_dict_pre_hook(refuse)
        names = [name for name, _ in module.named_modules()]
        with pytest.raises(ZeroDivisionError):
            module.load_state_dict(module.state_dict())
        handle.remove()
        assert [name for name, _ in module.named_modules()] == names
    module.load_state_dict(module.state_dict())


@pytest.mark.parametrize("kind", WRAPPED)
def test_hooks_of_the_wrapped_module_are_called_once_and_with_it(kind: str) -> None:
    module = WRAPPED[kind]()
    inner = next(each for each in module.modules() if isinstance(each, Migrating))
    seen: list[tuple[str, nn.Module]] = []
    inner.register_load_state_dict_pre_hook(lambda owner, *_: seen.append(("before", owner)))
    inner.register_load_state_dict_post_hook(lambda owner, _: seen.append(("after", owner)))
    module.load_state_dict(module.state_dict())
    assert seen == [("before", inner), ("after", inner)]


@pytest.mark.parametrize("kind", WRAPPED)
def test_tensors_may_be_assigned(kind: str) -> None:
    module = WRAPPED[kind]()
    state = Migrating().state_dict()
    module.load_state_dict(state, assign=True)
    assert weight_of(module).data_ptr() == state["weight"].data_ptr()
