"""The check of the first training forwards of a group and of a DataParallel, by a new copy of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.passes import forward_check


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check as in a process in which no other test has compiled anything."""
    monkeypatch.setattr(forward_check, "has_compiled", lambda: False)


FAR = torch.Generator().manual_seed(7)


class Hidden(nn.Module):
    """Adds what something decides that is no part of the model."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 3), kind
        self.own, self.numpy = torch.Generator().manual_seed(1), np.random.default_rng(1)
        self.step, self.last = 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.step += 1
        added: dict[str, Callable[[], Any]] = {
            "a generator in an attribute": lambda: torch.rand(3, generator=self.own),
            "a global generator": lambda: torch.rand(3, generator=FAR),
            "one of NumPy": self.numpy.random,
            "a counter": lambda: self.step,
            "an output that is kept": lambda: self.last,
            "the stream of the shard": lambda: torch.rand(3),
            "nothing": lambda: 0,
        }
        found: torch.Tensor = y + added[self.kind]()
        self.last = y.detach().mean()
        return found


def said_by(run: Callable[[torch.Tensor], object], times: int = 6) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for index in range(times):
            run(torch.randn(12, 4, generator=torch.Generator().manual_seed(index)))
    return [str(each.message) for each in said]


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "is_named"),
    [
        ("a generator in an attribute", True),
        ("a global generator", True),
        ("one of NumPy", True),
        ("a counter", True),
        ("an output that is kept", True),
        ("the stream of the shard", False),
        ("nothing", False),
    ],
)
def test_what_decides_beside_the_model_is_named_once(kind: str, is_named: bool, devices: int) -> None:
    torch.manual_seed(0)
    parallel = ls.DataParallel(Hidden(kind), ["cpu"] * devices, num_shards=4)
    with ls.ReplicaGroup(Hidden(kind), ["cpu"] * devices, num_shards=4) as group:
        for run in (parallel, group.forward):
            said = said_by(run)
            assert len(said) == is_named
            assert all("by a new copy of the model, which returned other bits in `output`" in each for each in said)


def test_the_check_changes_no_bit_and_no_generator() -> None:
    def trained(*, checked: bool) -> str:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3))
        parallel = ls.DataParallel(model, ["cpu"] * 2, num_shards=4)
        if not checked:
            parallel(torch.zeros(8, 4))
            passes = parallel._passes
            passes._unchecked = 0
            model.load_state_dict(start)
        torch.manual_seed(3)
        for _ in range(6):
            parallel(torch.randn(12, 4)).square().mean().backward()
        return ls.digest(model, [each.grad for each in model.parameters()], torch.get_rng_state())

    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)).state_dict()
    assert trained(checked=True) == trained(checked=False)


def test_the_model_is_called_again_in_the_fourth_training_forward_only() -> None:
    calls: list[int] = []

    class Counting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return super().forward(x)

    parallel = ls.DataParallel(Counting(4, 3), ["cpu"], num_shards=2)
    counts = []
    for _ in range(6):
        calls.clear()
        parallel(torch.ones(8, 4))
        counts.append(len(calls))
    assert [*counts[:3], *counts[4:]] == [2] * 5
    assert counts[3] > 2


def test_a_second_computation_that_raises_is_told() -> None:
    class Once(nn.Linear):
        seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).seen += 1
            if type(self).seen == 9:
                raise ArithmeticError("on purpose")
            return super().forward(x)

    (said,) = said_by(ls.DataParallel(Once(4, 3), ["cpu"], num_shards=2))
    assert "by a new copy of the model, which raised ReplicaError" in said


def test_inputs_that_a_model_changes_are_not_computed_again() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                x.mul_(0.5)
            return super().forward(x)

    assert not said_by(ls.DataParallel(Scaled(4, 3), ["cpu"], num_shards=2))


@pytest.mark.parametrize("given", [["a"] * 12, ("a",) * 12, np.arange(12)], ids=["list", "tuple", "array"])
def test_lists_with_an_entry_per_sample_are_named_once(given: Any) -> None:
    class Texts(nn.Linear):
        def forward(self, x: torch.Tensor, texts: Any = None) -> torch.Tensor:
            del texts
            return super().forward(x)

    for texts, expected in [(given, 1), (given[:5], 0), ("abcdefghijkl", 0)]:
        parallel = ls.DataParallel(Texts(4, 3), ["cpu"], num_shards=3)
        said = said_by(lambda x, run=parallel, texts=texts: run(x, texts=texts))  # type: ignore[misc]
        assert len(said) == expected
        assert all("`texts` has one entry for each of the 12 samples" in each for each in said)


def test_a_buffer_that_is_none_and_filled_by_shards_is_warned_of() -> None:
    class Late(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 3)
            self.register_buffer("mean", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = x.detach().mean(0)
            return super().forward(x - self.mean)

    said = said_by(ls.DataParallel(Late(), ["cpu"], num_shards=3))
    assert any("buffer 'mean' is None, and shards assign different values to it" in each for each in said)


def test_an_operation_in_place_says_what_to_do() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    for given in (torch.randn(12, 4), torch.randn(12, 4).requires_grad_() * 1):
        parallel = ls.DataParallel(model, ["cpu"], num_shards=3)
        with pytest.raises(ls.ReplicaError, match="must create a new tensor"):
            parallel(given).sum().backward()


def test_outputs_of_other_lengths_name_themselves() -> None:
    class Cropped(nn.Linear):
        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return super().forward(x)[:, : int(lengths.max())]

    parallel = ls.DataParallel(Cropped(4, 3), ["cpu"], num_shards=3)
    with pytest.raises(
        ValueError, match=r"`output` must have the same sizes for all shards .* \(4, 1, 3\), \(4, 2, 3\)"
    ):
        parallel(torch.randn(12, 5, 4), torch.arange(12) // 4 + 1)


def test_an_output_that_is_no_tensor_is_named_by_its_path() -> None:
    class Cached(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"logits": super().forward(x), "cache": object()}

    with pytest.raises(TypeError, match=r"got a object as `output\['cache'\]`. Leave it out"):
        ls.DataParallel(Cached(4, 3), ["cpu"])(torch.randn(12, 4))


@pytest.mark.parametrize("is_mean", [True, False])
def test_dropout_over_parts_of_other_lengths_keeps_everything(is_mean: bool) -> None:
    class Padded(nn.Linear):
        """Drops from the longest of the given sequences only, so that masks have other shapes for parts of a shard."""

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            length = int(lengths.max())
            values = nn.functional.dropout(super().forward(x[:, :length]), 0.5).square().sum(2)
            mask = torch.arange(length) < lengths[:, None]
            if is_mean:
                return ((values * mask).sum(1) / lengths).mean()
            return values[mask].mean()

    lengths = torch.arange(12) % 5 + 1
    parallel = ls.DataParallel(Padded(4, 3), ["cpu"], num_shards=2)
    said = said_by(lambda _: parallel(torch.randn(12, 5, 4), lengths).backward(), times=1)
    assert len(said) == (not is_mean)


def test_a_loss_that_takes_no_part_of_a_shard_is_compared_with_that_of_two_shards() -> None:
    class Grouped(nn.Linear):
        """Compares the three thirds of its samples, and takes no other numbers of them."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one, two, three = super().forward(x).split(len(x) // 3)
            return (one - two).square().mean() + (one * three).sum(1).exp().mean()

    parallel = ls.DataParallel(Grouped(4, 3), ["cpu"], num_shards=4)
    assert len(said_by(lambda x: parallel(x).backward())) == 1
