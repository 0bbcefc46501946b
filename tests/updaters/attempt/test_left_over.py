"""What a forward leaves in a copy of the model is found by a new copy, some updates after it began."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.updaters.step import engine
from tests.support.ranks import run_on_ranks


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that other tests have compiled something, after which no model is copied."""
    monkeypatch.setattr(engine, "has_compiled", lambda: False)


class WarmUp(nn.Module):
    """Counts its forwards in a plain attribute, and adds a layer once it has been warm for some updates."""

    def __init__(self, warm: int) -> None:
        super().__init__()
        self.layer, self.late, self.calls, self.warm = nn.Linear(6, 3), nn.Linear(6, 3), 0, warm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = min(self.calls + 1, self.warm)
        return self.layer(x) + (self.late(x) if self.calls == self.warm else 0.0 * self.late(x))


class Growing(nn.Module):
    """Keeps the longest input it has seen, and normalizes by its length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.longest = nn.Linear(1, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.longest = max(self.longest, x.shape[1])
        return self.layer(x.sum(1, keepdim=True) / self.longest)


TABLES: dict[int, torch.Tensor] = {}


class ByItsId(nn.Module):
    """Finds a table of its own by its ``id``, which is another one in each process."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = TABLES.setdefault(id(self), torch.zeros(()))
        TABLES[id(self)] = (last + 1).clamp(max=10)
        return self.layer(x) * (2 if last == 10 else 1)


class Harmless(nn.Module):
    """Keeps what it computes anew in every forward, and a cache that any copy fills with the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shape, self.last, self.table = nn.Linear(6, 3), None, 0.0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(6.0)
            self.register_buffer("steps", torch.arange(3.0), persistent=False)
        self.shape, self.last = x.shape, float(x.sum())
        return self.layer(x + self.table)


def warned(model: nn.Module, num_updates: int, *, sizes: tuple[int, ...] = (6,), **options: Any) -> list[str]:
    """Run updates, and return what is warned of in each audited one, by its number."""
    torch.manual_seed(0)
    batches = [(torch.randn(8, size), torch.randint(3, (8,))) for size in sizes]
    updater = ls.ParallelUpdater(
        (batches * num_updates)[:num_updates],
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        **{"devices": ["cpu"], "num_shards": 4, "loss_fn": ls.supervised(functional.cross_entropy), **options},
    )
    found = []
    for update in range(num_updates):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            updater.update()
        found += [f"{update}: {each.message}" for each in caught]
    updater.finalize()
    return found


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_an_attribute_that_has_taken_effect_is_named(num_devices: int) -> None:
    (text,) = warned(WarmUp(10), 9, devices=["cpu"] * num_devices, num_shards=2 * num_devices)
    assert text.startswith(("2: ", "4: "))
    assert "by a new copy of the model, as a run that is resumed here has it" in text
    assert "these attributes in earlier updates: calls." in text


def test_what_takes_effect_later_still_is_found_by_the_next_audit() -> None:
    (text,) = warned(WarmUp(4 * 10), 17)
    assert text.startswith("8: ")


def test_the_longest_input_that_was_seen_is_found() -> None:
    (text,) = warned(Growing(), 9, sizes=(4, 12, 8))
    assert text.startswith("2: ")
    assert "longest" in text


class Registering(nn.Module):
    """Registers a layer, a parameter or a buffer in its first forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 3)), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.inner[0]
        if not hasattr(first, "new"):
            made = {"layer": nn.Linear(6, 6), "parameter": nn.Parameter(torch.randn(6)), "buffer": nn.Buffer(x.mean(0))}
            first.new = made[self.kind].requires_grad_(False)
        return self.inner(first.new(x) if self.kind == "layer" else x - first.new)


@pytest.mark.parametrize("kind", ["layer", "parameter", "buffer"])
def test_what_forward_registers_is_found(kind: str) -> None:
    first, second = warned(Registering(kind), 3)
    assert first.startswith("0: Forward registers inner.0.new in the copies")
    assert second.startswith("1: ")
    assert "in earlier updates: inner.0.new." in second


def test_what_a_module_finds_by_its_id_is_found() -> None:
    (text,) = warned(ByItsId(), 9)
    assert text.startswith("8: ")


@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_is_computed_anew_is_not_warned_of(num_devices: int) -> None:
    assert warned(Harmless(), 17, devices=["cpu"] * num_devices) == []


class Remembering(nn.Module):
    """Needs what it has kept in the first updates."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.memory = nn.Linear(6, 3), (lambda: 0), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls() < 5:
            self.memory = 2.0
        return self.layer(x) * self.memory


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_new_copy_that_raises_is_warned_of_and_the_run_goes_on(num_devices: int) -> None:
    torch.manual_seed(0)
    model, batch = Remembering(), (torch.randn(8, 6), torch.randint(3, (8,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_fn = ls.supervised(functional.cross_entropy)
    updater = ls.ParallelUpdater(
        [batch], optimizer, model, devices=["cpu"] * num_devices, num_shards=4, loss_fn=loss_fn
    )
    model.calls = lambda: updater.iteration
    for _ in range(8):
        updater.update()
    with pytest.warns(ls.DeterminismWarning, match="by a new copy of the model.* and raised ReplicaError.*TypeError"):
        assert updater.update().applied
    assert updater.update().applied
    updater.finalize()


def test_no_model_is_copied_where_something_was_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "has_compiled", lambda: True)
    assert warned(WarmUp(10), 9) == []


def test_a_number_of_updates_of_ones_own_compares_places_only() -> None:
    assert warned(WarmUp(10), 17, audit_every=8) == []


def test_updaters_go_on_with_the_copies_that_they_have() -> None:
    digests = set()
    for every in (None, 0):
        torch.manual_seed(1)
        model = Growing()
        warned(model, 12, sizes=(4, 12, 8), audit_every=every)
        digests.add(ls.digest(model))
    assert len(digests) == 1


def _on_rank(communicator: ls.Communicator) -> list[str]:
    return warned(WarmUp(10), 10, communicator=communicator)


def test_all_ranks_warn_and_go_on() -> None:
    for found in run_on_ranks(_on_rank, 2):
        (text,) = found
        assert text.startswith(("2: ", "4: "))
        assert "by a new copy of the model" in text
