"""The gradient of a batch as a single shard differs from that of its shards where a loss is no mean over samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.updaters.step.engine import GradientEngine
from lockstep.verify.one_shard import GradientFinding, compare_attempt

WEIGHTS = torch.tensor([1.0, 2.0, 5.0])


def compared(
    monkeypatch: pytest.MonkeyPatch, loss_fn: Any, model: nn.Module | None = None, **options: Any
) -> GradientFinding:
    """Return what is found in the first update of an updater."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    data = TensorDataset(torch.randn(14, 4), torch.randint(3, (14,)))
    found: list[GradientFinding] = []

    def compute(original: Callable[..., None], engine: Any, attempt: Any, context: Any) -> None:
        before = {name: each.clone() for name, each in engine.replicas.model.state_dict().items()}
        each = compare_attempt(engine, attempt)
        assert all(torch.equal(tensor, before[name]) for name, tensor in engine.replicas.model.state_dict().items())
        assert torch.get_default_dtype() == torch.float32
        if each is not None:
            found.append(each)
        original(engine, attempt, context)

    original = GradientEngine.compute
    monkeypatch.setattr(GradientEngine, "compute", lambda *args: compute(original, *args))
    iterator = options.pop("iterator", None) or ls.BatchIterator(data, 14, shuffle=True)
    options = {"num_shards": 4, "devices": 1, "audit_every": 0, **options}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ls.ParallelUpdater(iterator, optimizer, model, loss_fn=loss_fn, **options).update()
    return found[0] if found else GradientFinding("equal", "not compared")


def dice(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found, wanted = model(x).softmax(1)[:, 0], (y == 0).float()
    return 1 - 2 * (found * wanted).sum() / (found.sum() + wanted.sum())


def contrastive(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    del y
    rows = functional.normalize(model(x))
    return functional.cross_entropy(rows @ rows.T, torch.arange(len(x)))


def classified(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y)


def weighted(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y, weight=WEIGHTS)


def ignoring(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y, ignore_index=0)


def root(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.mse_loss(model(x)[:, 0], y.float()).sqrt()


def summed(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x), y, reduction="sum")


def broadcast(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((model(x)[:, :1] - y.float()) ** 2).mean()


def routed(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    output, auxiliary = model(x)
    return functional.cross_entropy(output, y) + 0.01 * auxiliary


class Router(nn.Module):
    """Two experts, and the square of the mean of what each of them is given."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        shares = self.gate(x).softmax(1)
        output = sum(shares[:, [index]] * expert(x) for index, expert in enumerate(self.experts))
        return output, (shares.mean(0) ** 2).sum()


class Centered(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0)


class CenteredAtFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(x) - self.head(x).mean(0)


class Pooled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mean(0, keepdim=True))


WRONG: dict[str, tuple[Any, Callable[[], nn.Module | None], str, str, str]] = {
    "class weights": (weighted, lambda: None, "mean", "in weighted", ""),
    "ignored labels": (ignoring, lambda: None, "mean", "in ignoring", ""),
    "dice": (dice, lambda: None, "mean", "in dice", ""),
    "in-batch negatives": (contrastive, lambda: None, "mean", "in contrastive", ""),
    "square root of a mean": (root, lambda: None, "mean", "in root", ""),
    "sum": (summed, lambda: None, "total", "in summed", ""),
    "target of another shape": (broadcast, lambda: None, "pairs", "in broadcast", ""),
    "auxiliary loss": (routed, Router, "mean", "in Router.forward", "the model, a Router"),
    "layer": (
        classified,
        lambda: nn.Sequential(nn.Linear(4, 3), Centered()),
        "layer",
        "Centered.forward",
        "'1', a Centered",
    ),
    "forward of the model": (
        classified,
        CenteredAtFirst,
        "layer",
        "in CenteredAtFirst",
        "the model, a CenteredAtFirst",
    ),
    "one row": (
        lambda model, x, y: functional.cross_entropy(model(x).expand(len(x), 3), y),
        lambda: nn.Sequential(nn.ReLU(), Pooled(4, 3)),
        "row",
        "in Sequential.forward",
        "the model, a Sequential",
    ),
}
"""Losses that are no means over samples: the loss function, the model, and the kind, line and module to be named."""


@pytest.mark.filterwarnings("ignore:`loss_fn` must return the mean over the samples")
@pytest.mark.parametrize("case", WRONG)
def test_a_loss_that_is_no_mean_over_samples_is_named(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    loss_fn, model, kind, line, module = WRONG[case]
    found = compared(monkeypatch, loss_fn, model())
    assert found.cause is not None
    assert (found.status, found.cause.kind, found.cause.module) == ("differs", kind, module)
    assert line in found.cause.line
    assert ("test_one_shard.py:" in found.cause.line) == (case != "one row")


def of_batch(criterion: Callable[..., torch.Tensor]) -> ls.BatchLoss:
    """Return a loss of this file, computed from the outputs of the whole batch."""
    return ls.BatchLoss(lambda model, x, y: (model(x), y), lambda outputs: criterion(lambda each: each, *outputs))


def counted(model: Any, x: torch.Tensor, y: torch.Tensor) -> ls.Loss:
    return ls.Loss(ignoring(model, x, y), weight=(y != 0).sum())


def mixed_up(samples: Any, device: torch.device) -> Any:
    x, y = (torch.stack(each).to(device) for each in zip(*samples, strict=True))
    share = torch.rand(())
    return share * x + (1 - share) * x.roll(1, 0) + torch.randn_like(x), y


def noisy(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return classified(model, x + torch.randn_like(x), y)


def narrow(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(x.to(torch.bfloat16)).float(), y)


def infinite(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return classified(model, x, y) * (1.0 if x.dtype == torch.float32 else float("inf"))


def overflowing(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return classified(model, x, y) * 100


RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "cross entropy": (classified, {}),
    "mean square": (lambda model, x, y: functional.mse_loss(model(x)[:, 0], y.float()), {}),
    "two views in one forward": (
        lambda model, x, _: functional.mse_loss(*functional.dropout(model(torch.cat([x, x])), 0.3).chunk(2)),
        {},
    ),
    "own weights": (counted, {}),
    "tokens": (ls.token_mean(0), {}),
    "class weights": (ls.supervised(nn.CrossEntropyLoss(weight=WEIGHTS)), {}),
    "sum": (ls.supervised(nn.CrossEntropyLoss(reduction="sum")), {}),
    **{f"batch loss of {each.__name__}": (of_batch(each), {}) for each in (weighted, dice, contrastive, root)},
    "accumulation": (classified, {"accumulate": 2}),
    "strided shards": (classified, {"split": "strided"}),
    "mixed precision": (classified, {"precision": "bf16"}),
    "half precision": (narrow, {"precision": "bf16-true", "model": nn.Linear(4, 3).bfloat16()}),
    "overflow": (overflowing, {"precision": "fp16", "loss_scale": 2.0**17}),
    "a converter that draws": (classified, {"converter": mixed_up}),
    "a loss that draws": (noisy, {}),
}
"""Losses that are means over samples, or are computed as the whole batch needs them."""


@pytest.mark.parametrize("case", RIGHT)
def test_a_mean_over_samples_raises_no_alarm(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    loss_fn, options = RIGHT[case]
    found = compared(monkeypatch, loss_fn, **options)
    assert (found.status, found.cause) == ("equal", None)
    assert (found.reason == "not compared") == isinstance(loss_fn, ls.BatchLoss)


class DropoutOfGPUs(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.native_dropout(x, 0.5, train=True)[0]


@pytest.mark.parametrize(
    "layer",
    [nn.LayerNorm, lambda size: nn.GroupNorm(2, size), lambda _: nn.Dropout(), lambda _: DropoutOfGPUs()],
)
def test_layers_of_single_samples_raise_no_alarm(
    monkeypatch: pytest.MonkeyPatch, layer: Callable[[int], nn.Module]
) -> None:
    model = nn.Sequential(nn.Linear(4, 8), layer(8), nn.Linear(8, 3))
    assert compared(monkeypatch, classified, model) == GradientFinding("equal")


@pytest.mark.parametrize("tracked", [True, False])
def test_batch_normalization_is_noted_and_other_terms_are_found(
    monkeypatch: pytest.MonkeyPatch, *, tracked: bool
) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=tracked), nn.Linear(8, 3))

    assert compared(monkeypatch, classified, model()) == GradientFinding("equal", normalized=("1",))
    found = compared(monkeypatch, dice, model())
    assert (found.status, found.normalized) == ("differs", ("1",))


class Narrow(torch.autograd.Function):
    """A kernel that takes float32 only."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise TypeError("this kernel takes float32 only")
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Counting:
    calls = 0.0

    def __call__(self, model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return classified(model, x, y) * self.calls


@pytest.mark.parametrize(
    ("loss_fn", "options", "reason"),
    [
        (lambda model, x, y: classified(model, Narrow.apply(x), y), {}, "float64: TypeError: this kernel takes"),
        (infinite, {}, "not finite"),
        (Counting(), {}, "returns another gradient when it is called once more"),
        (classified, {"num_shards": 1}, "The batch is a single shard."),
        (classified, {"iterator": [(torch.randn(1, 4), torch.tensor([1]))]}, "dimension by `batch_dim`"),
    ],
)
def test_what_cannot_be_compared_is_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, loss_fn: Any, options: dict[str, Any], reason: str
) -> None:
    found = compared(monkeypatch, loss_fn, **options)
    assert found.status == "skipped"
    assert reason in found.reason


def test_carried_values_and_other_batch_dimensions_raise_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss_of(model: Any, x: torch.Tensor, y: torch.Tensor, carried: torch.Tensor) -> ls.Loss:
        output, hidden = model(x, carried)
        return ls.Loss(functional.mse_loss(output, y), carried=hidden)

    torch.manual_seed(0)
    batches = [(torch.randn(5, 8, 4), torch.randn(5, 8, 6)) for _ in range(2)]
    carried = ls.Carried(torch.randn(2, 8, 6))
    options = {"iterator": batches, "carried": carried, "batch_dim": 1}
    assert compared(monkeypatch, loss_of, nn.GRU(4, 6, 2, dropout=0.5), **options) == GradientFinding("equal")
