"""What a forward leaves in the replica is read from there, in whatever way a program refers to the original model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.updaters.step.originals import noting_reads
from tests.support.ranks import run_on_ranks
from tests.support.runs import finalized

X = torch.linspace(-1, 1, 24).reshape(8, 3)
SUBCLASSES: list[str] = []


class Registering(nn.Module):
    """A base whose subclasses are registered, and which has no other attributes than declared ones."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        SUBCLASSES.append(cls.__name__)


class Divergence(Registering):
    """Leaves a term of the loss in an attribute, and its negative in a buffer."""

    negative: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.term: Any = 0.0
        self.register_buffer("negative", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.term = x.square().mean()
        self.negative = -self.term.detach()
        return x


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 2), Divergence())
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    @property
    def total(self) -> Any:
        return self.net[1].term

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.net[1], name)


class Script:
    def __init__(self, model: Wrapped) -> None:
        self.model = model

    def loss(self, net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net(x).mean() + self.model.net[1].term


def of_list(model: Wrapped) -> Callable[..., Any]:
    layers = list(model.net)
    return lambda net, x: net(x).mean() + sum(each.term for each in layers if isinstance(each, Divergence))


READS: dict[str, tuple[Callable[[Wrapped], Callable[..., Any]], str, str]] = {
    "a list": (of_list, "term", "of_list.<locals>"),
    "a method": (lambda model: Script(model).loss, "term", "Script.loss"),
    "an index": (lambda model: lambda net, x: net(x).mean() + model.net[1].term, "term", "<lambda>"),
    "getattr": (lambda model: lambda net, x: net(x).mean() + getattr(model.net[1], "term"), "term", ""),  # noqa: B009
    "a property": (lambda model: lambda net, x: net(x).mean() + model.total, "term", "Wrapped.total"),
    "a wrapper": (lambda model: lambda net, x: net(x).mean() + model.term, "term", "Wrapped.__getattr__"),
    "a buffer": (lambda model: lambda net, x: net(x).mean() - model.net[1].negative, "net.1.negative", "<lambda>"),
}


def updater_of(model: nn.Module, loss_fn: Any, num_devices: int) -> ls.ParallelUpdater:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ls.ParallelUpdater(
        [X], optimizer, model, devices=["cpu"] * num_devices, num_shards=2, loss_fn=loss_fn, buffers="first"
    )


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("case", READS)
def test_reads_from_the_original_are_refused(case: str, num_devices: int) -> None:
    make, name, reader = READS[case]
    model = Wrapped()
    updater = updater_of(model, make(model), num_devices)
    before = ls.digest(updater.state_dict())
    with finalized(updater), pytest.raises(ValueError, match="your original model") as said:
        updater.update()
    assert repr(name) in str(said.value)
    if sys.version_info >= (3, 11):  # before, code has no qualified name
        assert reader in str(said.value)
    assert ls.digest(updater.state_dict()) == before


@pytest.mark.filterwarnings("ignore:Forward changes attributes:lockstep.DeterminismWarning")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_an_evaluation_refuses_them_too(num_devices: int) -> None:
    model = Wrapped()
    updater = updater_of(model, lambda net, x: net(x).square().mean(), num_devices)
    with finalized(updater):
        updater.update()
        for loss_fn, is_right in (Script(model).loss, False), (lambda net, x: net(x).mean() + net.net[1].term, True):
            evaluator = ls.extensions.Evaluator([X], loss_fn=loss_fn)
            if is_right:
                assert evaluator.evaluate(model)
            else:
                with pytest.raises(ValueError, match="A function must read 'term', which a forward sets"):
                    evaluator.evaluate(model)
        assert updater.update().applied


def _evaluate(communicator: ls.Communicator) -> str:
    model = Wrapped()
    evaluator = ls.extensions.Evaluator([X], loss_fn=Script(model).loss, num_shards=1)
    with pytest.raises((ValueError, ls.PeerError), match="A function must read 'term', which a forward sets") as said:
        evaluator.evaluate(model, communicator=communicator)
    communicator.barrier()
    return type(said.value).__name__


def test_a_rank_without_a_shard_hears_of_it() -> None:
    assert sorted(run_on_ranks(_evaluate, 2)) == ["PeerError", "ValueError"]


@pytest.mark.filterwarnings("ignore:Forward changes attributes:lockstep.DeterminismWarning")
def test_reads_of_what_forward_leaves_alone_are_not_refused() -> None:
    model = Wrapped()
    updater = updater_of(model, lambda net, x: net(x).square().mean() * model.scale + net.net[1].term, 2)
    with finalized(updater):
        assert updater.update().applied


def test_modules_have_their_own_classes_again_and_no_subclass_is_registered() -> None:
    model, reads = Wrapped(), dict[tuple[int, str], str]()
    kinds, registered = [*map(type, model.modules())], [*SUBCLASSES]
    with noting_reads(model, reads):
        assert isinstance(model.net[1], Divergence)
        assert model.net[1].term == 0.0
    with pytest.raises(KeyError), noting_reads(model, reads):
        raise KeyError
    assert [*map(type, model.modules())] == kinds
    assert registered == SUBCLASSES
    assert reads[id(model.net[1]), "term"].endswith("is_registered")
