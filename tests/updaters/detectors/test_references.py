"""What a loss function refers to is found without running its code, whatever it is."""

from __future__ import annotations

import functools
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.updaters.detectors import MOST_OBJECTS, attributes, outside_tensors, states
from tests.support.runs import cross_entropy, finalized, updater_for
from tests.support.workloads import MLP

CENTER = torch.zeros(2)
SHARED = {"center": torch.zeros(2)}
Pair = namedtuple("Pair", "first second")


def refuse(*_args: Any, **_kwargs: Any) -> Any:
    raise AssertionError("code of the class has run")


class Hostile:
    """Fails whenever code of its class runs."""

    __slots__ = ("center", "unset")

    def __init__(self) -> None:
        object.__setattr__(self, "center", torch.zeros(2))

    __class__ = property(refuse)  # as a lazy proxy has it
    __getattribute__ = __iter__ = __len__ = __eq__ = __hash__ = __bool__ = __repr__ = __call__ = refuse


class HostileDict(Hostile):
    __slots__ = ()
    __dict__ = property(refuse)


class HostileList(list[Any]):
    __iter__ = __len__ = __getitem__ = __eq__ = refuse


class HostileMapping(dict[Any, Any]):
    __iter__ = keys = items = copy = __getitem__ = __len__ = refuse


class Unlike(torch.Tensor):
    """A tensor with code of its own for every function."""

    __torch_function__ = classmethod(refuse)


class Uninitialized(nn.Module):
    def __init__(self) -> None:
        object.__setattr__(self, "center", torch.zeros(2))


@dataclass(slots=True)
class Slotted:
    center: torch.Tensor
    number: float = 1.0


def names_of(value: Any) -> list[str]:
    return list(outside_tensors(lambda model: (model, value), []))


def freed() -> torch.Tensor:
    tensor = torch.zeros(2)
    tensor.untyped_storage().resize_(0)
    return tensor


def without_versions() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2)


def endless() -> Any:
    owner = types.SimpleNamespace(center=torch.zeros(2))
    owner.owners = [owner, {"owner": owner}]
    return owner


KEPT = Slotted(torch.zeros(2))
SHARED_MODULE = nn.Linear(2, 2)
FOUND: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "slots": (lambda: KEPT, ["value.center"]),
    "hostile": (Hostile, ["value.center"]),
    "hostile dict": (HostileDict, ["value.center"]),
    "hostile list": (lambda: HostileList([torch.zeros(2)]), ["value[0]"]),
    "hostile mapping": (lambda: HostileMapping(center=torch.zeros(2)), ["value['center']"]),
    "hostile keys": (lambda: {Hostile: torch.zeros(2), 3: torch.zeros(2)}, ["value[0]", "value[3]"]),
    "dicts": (lambda: OrderedDict(center=defaultdict(list, center=torch.zeros(2))), ["value['center']['center']"]),
    "sequences": (lambda: deque([Pair(torch.zeros(2), 1)]), ["value[0][0]"]),
    "proxy": (lambda: weakref.proxy(SHARED_MODULE), []),
    "weak reference": (lambda: weakref.ref(SHARED_MODULE), []),
    "tensor subclass": (lambda: torch.zeros(2).as_subclass(Unlike), []),
    "lazy module": (lambda: nn.LazyLinear(2, bias=False), []),
    "uninitialized module": (Uninitialized, ["value.center"]),
    "meta": (lambda: torch.zeros(2, device="meta"), ["value"]),
    "sparse": (lambda: torch.eye(2).to_sparse(), ["value"]),
    "freed": (freed, ["value"]),
    "inference": (without_versions, ["value"]),
    "nested": (lambda: torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]), []),
    "float8": (lambda: torch.zeros(2).to(torch.float8_e5m2), ["value"]),
    "negative": (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, ["value"]),
    "integers and single elements": (
        lambda: [torch.arange(2), torch.zeros(()), torch.zeros(1), 1.0, True, None, "text"],
        [],
    ),
    "endless": (endless, ["value.center"]),
    "class": (lambda: Slotted, []),
    "lock": (threading.Lock, []),
    "optimizer": (lambda: torch.optim.SGD([torch.zeros(2)], lr=0.1), []),
    "too deep": (lambda: [[[torch.zeros(2)]]], []),
    "module inside": (lambda: [[nn.Linear(2, 2, bias=False)]], ["value[0][0].weight"]),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", FOUND)
def test_tensors_are_found_and_no_code_is_run(name: str) -> None:
    make, expected = FOUND[name]
    value = make()
    assert names_of(value) == expected
    assert len(states(lambda model: (model, value), [])) >= 2  # reads what has values


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", FOUND)
def test_training_goes_on(name: str) -> None:
    make, _ = FOUND[name]
    value = make()

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model, x, target) if model.training else value

    with finalized(updater_for(MLP, loss_fn=loss_fn, num_shards=2)) as updater:
        for _ in range(4):
            assert updater.update().applied


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_looked_at() -> None:
    teacher = torch.jit.script(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
    assert names_of(torch.jit.script(torch.nn.functional.silu)) == []

    def loss_fn(model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (
            cross_entropy(model, x, target) * getattr(teacher, "1").running_mean.sum().exp()
            + teacher(x).detach().mean()
        )

    with finalized(updater_for(MLP, loss_fn=loss_fn, num_shards=2)) as updater:
        named = r"part of the model: `teacher.1.running_mean`, `teacher.1.running_var`\."
        with pytest.warns(ls.DeterminismWarning, match=named):
            updater.update()


def test_what_a_function_refers_to() -> None:
    def with_default(model: Any, memory: Any = CENTER, *, other: Any = CENTER) -> Any:
        return model, memory, other, later

    def outer(model: Any, *_args: Any) -> Any:
        def inner() -> Any:
            return model, SHARED

        return inner

    class Loss:
        def __call__(self, model: Any) -> Any:
            return model, CENTER

    def names(loss_fn: Any) -> list[str]:
        return list(outside_tensors(loss_fn, []))

    assert names(with_default) == ["memory"]  # one tensor has one name
    later = torch.zeros(2)
    assert names(with_default) == ["later", "memory"]
    assert names(outer) == ["SHARED['center']"]
    assert names(functools.partial(outer, CENTER, other=later)) == ["SHARED['center']", "args[0]", "other"]
    assert names(Loss()) == names(Loss().__call__) == ["CENTER"]
    assert names(ls.supervised(torch.nn.functional.cross_entropy)) == []


def test_a_large_structure_is_not_looked_at_whole() -> None:
    many = [types.SimpleNamespace(center=torch.zeros(2)) for _ in range(MOST_OBJECTS + 5)]
    assert len(names_of(many)) < MOST_OBJECTS


def test_attributes_that_other_threads_add() -> None:
    owner, is_done = types.SimpleNamespace(center=torch.zeros(2), kept=deque(maxlen=100)), threading.Event()

    def add() -> None:
        while not is_done.is_set():
            for index in range(1000):
                setattr(owner, f"name{index}", index)
                owner.kept.append(index)
            for index in range(1000):
                delattr(owner, f"name{index}")

    thread = threading.Thread(target=add)
    thread.start()
    try:
        found = [names_of(owner) for _ in range(50)]
    finally:
        is_done.set()
        thread.join()
    assert found == [["value.center"]] * 50


def test_attributes_of_objects_without_any() -> None:
    assert attributes(3) == {}
    assert attributes(KEPT) == {"center": KEPT.center, "number": 1.0}
