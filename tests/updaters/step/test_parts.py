"""A loss that is no mean over samples shows by its values for a shard and for parts of the shard."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from tests.support.ranks import run_on_ranks
from tests.support.runs import finalized

X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(24) % 3
WEIGHTS = torch.rand(24, generator=torch.Generator().manual_seed(2)) + 0.1
SHOWN = "for some samples"


def linear() -> nn.Module:
    return nn.Linear(4, 3)


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 3))


class Encoder(nn.Module):
    """A variational encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, log_var = self.layer(x).chunk(2, dim=1)
        drawn = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        return drawn, -0.5 * (1 + log_var - mean.square() - log_var.exp())


def updater_of(
    loss_fn: Any, build: Callable[[], nn.Module] = linear, *, num_devices: int = 1, **options: Any
) -> ls.ParallelUpdater:
    torch.manual_seed(1)
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    batches = options.pop("batches", [(X.clone(), Y, WEIGHTS)])
    options = {"num_shards": 3, "devices": ["cpu"] * num_devices, **options}
    return ls.ParallelUpdater(batches, optimizer, net, loss_fn=loss_fn, **options)


def said_by(updater: ls.ParallelUpdater, updates: int = 4) -> list[int]:
    """Return the updates that warn of what the parts show."""
    found = []
    with finalized(updater):
        for update in range(updates):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                updater.update()
            found += [update for each in said if SHOWN in str(each.message)]
    return found


def each_loss(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(net(x), y, reduction="none")


def balanced(*terms: torch.Tensor) -> torch.Tensor:
    return sum((each / each.detach() for each in terms), torch.zeros(()))


NO_MEANS: dict[str, Callable[..., Any]] = {
    "a sum with a factor": lambda net, x, y, _: -1.5 * -each_loss(net, x, y).sum(),
    "by a constant size": lambda net, x, y, _: each_loss(net, x, y).sum() / 32,
    "weights of samples": lambda net, x, y, w: (each_loss(net, x, y) * w).sum() / w.sum(),
    "the mean of weights": lambda net, x, y, w: (each_loss(net, x, y) * w).mean() / w.mean(),
    "a scalar product": lambda net, x, y, w: each_loss(net, x, y) @ w,
    "a mask": lambda net, x, y, w: functional.cross_entropy(net(x)[w > 0.5], y[w > 0.5]),
    "a root as a term": lambda net, x, y, _: each_loss(net, x, y).mean() + net(x).square().mean().sqrt(),
    "the hardest": lambda net, x, y, _: each_loss(net, x, y).topk(2).values.mean(),
    "a loop": lambda net, x, y, _: sum(each_loss(net, x, y)),
    "dice": lambda net, x, _, w: 1 - 2 * (net(x).sigmoid()[:, 0] * w).sum() / (net(x).sigmoid()[:, 0] + w).sum(),
    "pairs": lambda net, x, _, __: functional.cross_entropy(net(x) @ net(x).T, torch.arange(len(x))),
    # Some parts have no positives, and the mean of nothing is NaN.
    "rare positives": lambda net, x, y, _: each_loss(net, x, y).mean() + net(x)[y == 0].square().mean(),
    "the value alone is a mean": lambda net, x, y, _: balanced(each_loss(net, x, y).mean(), net(x).square().mean()),
    "another weight": lambda net, x, y, w: ls.Loss((each_loss(net, x, y) * w).sum() / w.sum(), weight=w.square().sum()),
    "a sum with noise for each label": lambda net, x, *_: (
        2 * ((out := net(x.repeat_interleave(3, 0))) + torch.randn_like(out)).square().sum()
    ),
}


@pytest.mark.each_value
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("case", NO_MEANS)
def test_what_is_no_mean_is_warned_of_once(case: str, num_devices: int) -> None:
    assert said_by(updater_of(NO_MEANS[case], num_devices=num_devices)) == [0]


def of_views(net: nn.Module, x: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    """Compare three views of the same samples, one after another, and take no other numbers of rows."""
    one, other, third = net(x).view(3, -1, 3)
    return (one - other).square().mean() + (third - other).square().mean()


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_loss_that_takes_some_numbers_of_samples_only_is_compared_for_these(num_devices: int) -> None:
    batch = torch.randn(27, 4, generator=torch.Generator().manual_seed(3)), torch.zeros(27), torch.zeros(27)
    assert said_by(updater_of(of_views, batches=[batch], num_devices=num_devices)) == [0]


def in_both_modes(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Set the targets in evaluation mode, as with pseudo labels."""
    net.eval()
    with torch.no_grad():
        targets = net(x.flip(1)).softmax(1)
    net.train()
    return functional.cross_entropy(net(x), y) + functional.cross_entropy(net(x), targets)


def test_a_loss_that_sets_the_mode_hides_nothing_of_batch_normalization() -> None:
    assert said_by(updater_of(in_both_modes, normalized)) == []


def of_encoder(reduced: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def loss_fn(net: nn.Module, x: torch.Tensor, _: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        drawn, divergence = net(x)
        return functional.mse_loss(drawn, x[:, :2]) + 0.1 * reduced(divergence)

    return loss_fn


def test_random_numbers_hide_nothing() -> None:
    assert said_by(updater_of(of_encoder(torch.sum), Encoder)) == [0]
    assert said_by(updater_of(of_encoder(torch.mean), Encoder)) == []


class Uncertain(nn.Module):
    """Two tasks, weighted by learned uncertainties."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scales = nn.Linear(4, 4), nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out


def weighted_tasks(net: Any, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    out = net(x)
    losses = torch.stack([functional.cross_entropy(out[:, :3], y), out[:, 3].square().mean()])
    return (losses * (-net.scales).exp() + net.scales).sum()


def mixed(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    share, order = torch.rand(()), torch.randperm(len(x))
    out = net(share * x + (1 - share) * x[order])
    return share * functional.cross_entropy(out, y) + (1 - share) * functional.cross_entropy(out, y[order])


def diffused(net: nn.Module, x: torch.Tensor, _: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
    times = torch.randint(0, 10, (len(x),)) / 10
    return (net(x + torch.randn_like(x) * times[:, None])[:, :1] - times[:, None]).square().mean()


def penalized(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    loss = functional.cross_entropy(net(x), y)
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    return loss + 0.1 * (slope.norm(dim=1) - 1).square().mean()


def in_half(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return functional.cross_entropy(net(x), y) - 0.9 * functional.cross_entropy(net(1.1 * x), y)


def until(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Draw until something has happened: a depth, a span, a pair of numbers, a direction."""
    depth, at, pair = 1, 0, torch.zeros(2)
    while torch.rand(()) < 0.7:
        depth += 1
    while at < 8:
        at += int(torch.randint(1, 5, ()))
    while pair[0] == pair[1]:
        pair = torch.randint(3, (2,))
    while not torch.bernoulli(torch.tensor(0.5)):
        depth += 1
    found = torch.randn(4)
    while (found / found.norm() - 0.5 * found).norm() > 1e-3:
        found = found / found.norm() + 0.5 * (found - found / found.norm())
        found = 2 * found / found.norm()
    return functional.cross_entropy(net(x + found / depth), y)


def deranged(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    order = torch.randperm(len(x))
    while (order == torch.arange(len(x))).any():
        order = torch.randperm(len(x))
    return functional.cross_entropy(net(x) + 0.1 * net(x[order]), y)


def of_distributions(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    shares = torch.distributions.Beta(0.4, 0.4).sample((len(x), 1))
    made = torch.distributions.Gamma(net(x * shares).exp(), torch.ones(3)).rsample()
    weights = torch.distributions.Dirichlet(torch.ones(3)).sample((len(x),))
    # It draws until all samples are accepted, and takes the last number of each that was.
    angles = torch.distributions.VonMises(torch.zeros(len(x), 1), torch.ones(len(x), 1)).sample()
    hard = functional.gumbel_softmax(net(x)) * angles
    return functional.cross_entropy(net(x), y) + ((made + hard) * weights).mean()


def activated() -> nn.Module:
    layers = [nn.Linear(4, 6), nn.RReLU(), nn.AlphaDropout(0.3), nn.Linear(6, 6), nn.Dropout(1.0), nn.Linear(6, 3)]
    return nn.Sequential(*layers)


def exiting(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    loss = each_loss(net, x, y).mean() + net(x)[y == 0].square().mean()
    if not loss.isfinite():
        sys.exit(1)
    return loss


def refusing(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    if len(x) != 8:
        raise RuntimeError("another number of samples")
    return 2 * each_loss(net, x, y).sum()


def two_views(outputs: torch.Tensor) -> torch.Tensor:
    """Compare both halves of the rows."""
    one, other = outputs.chunk(2)
    return (one - other).square().mean()


def noisy_mean(outputs: torch.Tensor) -> torch.Tensor:
    return (outputs + torch.randn_like(outputs)).square().mean()


MEANS: dict[str, tuple[Callable[..., Any], Callable[[], nn.Module], dict[str, Any]]] = {
    "mean": (lambda net, x, y, _: each_loss(net, x, y).mean(), linear, {}),
    "batch normalization and dropout": (lambda net, x, y, _: each_loss(net, x, y).mean(), normalized, {}),
    "weighted": (lambda net, x, y, w: (each_loss(net, x, y) * w).mean(), linear, {}),
    "its weight": (lambda net, x, y, w: ls.Loss((each_loss(net, x, y) * w).sum() / w.sum(), w.sum()), linear, {}),
    "mixed": (mixed, linear, {}),
    "as many tasks as samples": (weighted_tasks, Uncertain, {"num_shards": 12}),
    "diffused": (diffused, linear, {}),
    "a penalty of gradients": (penalized, linear, {}),
    "half precision": (in_half, normalized, {}),
    "bf16": (lambda net, x, y, _: each_loss(net, x, y).mean(), normalized, {"precision": "bf16"}),
    "bf16-true": (
        lambda net, x, y, _: each_loss(net, x.bfloat16(), y).mean(),
        lambda: normalized().bfloat16(),
        {"precision": "bf16-true"},
    ),
    "float32 in float64": (
        lambda net, x, y, _: functional.cross_entropy(net(x.double()).float(), y),
        lambda: linear().double(),
        {},
    ),
    "strided": (lambda net, x, y, _: each_loss(net, x, y).mean(), linear, {"split": "strided"}),
    "several batches": (lambda net, x, y, _: each_loss(net, x, y).mean(), linear, {"accumulate": 2}),
    "one sample per shard": (lambda net, x, y, _: each_loss(net, x, y).sum(), linear, {"num_shards": 24}),
    "draws until": (until, linear, {}),
    "deranged": (deranged, linear, {}),
    "distributions": (of_distributions, linear, {}),
    "activations that draw": (lambda net, x, y, _: each_loss(net, x, y).mean(), activated, {}),
    "ends at NaN": (exiting, linear, {}),
    "without running statistics": (
        lambda net, x, y, _: each_loss(net, x, y).mean(),
        lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)),
        {},
    ),
    "not for parts": (refusing, linear, {}),
    "changed in place": (lambda net, x, y, _: each_loss(net, x.mul_(2), y).mean(), linear, {}),
    "summed on purpose": (lambda net, x, y, _: each_loss(net, x, y).sum(), linear, {"reduction": "sum"}),
    "not audited": (lambda net, x, y, _: 2 * each_loss(net, x, y).sum(), linear, {"audit_every": 0}),
    "two views in one forward": (
        lambda net, x, *_: two_views(functional.dropout(net(torch.cat([x, x])), 0.3)),
        linear,
        {},
    ),
    "noise for each label": (lambda net, x, *_: noisy_mean(net(x.repeat(3, 1))), linear, {}),
    "noise for each label of a sample": (lambda net, x, *_: noisy_mean(net(x.repeat_interleave(3, 0))), linear, {}),
}


@pytest.mark.each_value
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("case", MEANS)
def test_a_mean_raises_no_alarm(case: str, num_devices: int) -> None:
    loss_fn, build, options = MEANS[case]
    assert said_by(updater_of(loss_fn, build, num_devices=num_devices, **options)) == []


def test_numbers_that_are_not_torchs_leave_it_open() -> None:
    def noisy(net: nn.Module, x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return each_loss(net, x, y).mean() * (1 + random.random())  # noqa: S311 - not torch's

    assert said_by(updater_of(noisy)) == []


def test_what_begins_later_is_found_in_the_next_audit() -> None:
    begun: list[int] = []

    def later(net: nn.Module, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (each_loss(net, x, y) * w).sum() / w.sum() if begun else each_loss(net, x, y).mean()

    updater = updater_of(later)
    with finalized(updater), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for update in range(9):
            begun += [update] * (update == 5)
            updater.update()
    assert [str(each.message).count(SHOWN) for each in said] == [1]


class Counted(nn.Module):
    """Counts what it has seen in a buffer, and reports it."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = normalized()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        ls.report({"mean": x.mean()}, self)
        out: torch.Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("num_devices", [1, 2])
def test_nothing_of_an_update_changes(num_devices: int) -> None:
    found = []
    for audit_every in (0, None):
        updater = updater_of(
            lambda net, x, y, _: each_loss(net, x, y).mean(),
            Counted,
            num_devices=num_devices,
            audit_every=audit_every,
            buffers={"seen": "sum"},
        )
        with finalized(updater):
            seen = [dict(updater.update().observation()) for _ in range(3)]
        modes = {each.training for each in updater.get_all_models()["main"].modules()}
        found.append((ls.digest(updater.state_dict()), repr(seen), modes, torch.get_rng_state().tolist()))
    assert found[0] == found[1]


def _on_rank(communicator: ls.ProcessCommunicator, case: str) -> list[int]:
    return said_by(updater_of(NO_MEANS[case], num_shards=4, communicator=communicator))


def test_one_of_several_ranks_warns() -> None:
    found = run_on_ranks(_on_rank, 2, "weights of samples")
    assert sorted(found) == [[], [0]]


REPORTED: dict[str, tuple[Callable[..., Any], bool]] = {
    "number of correct ones": (lambda out, y, _: {"right": (out.argmax(1) == y).sum()}, True),
    "maximum": (lambda out, _, __: {"largest": out.max()}, True),
    "perplexity": (lambda out, y, _: {"perplexity": functional.cross_entropy(9 * out, y).exp()}, True),
    # A shard of nine has parts of two and of three samples.
    "accuracy": (lambda out, y, _: {"accuracy": (out.argmax(1) == y).float().mean()}, False),
    "a constant": (lambda *_: {"rate": 0.1, "size": 3}, False),
    "a time": (lambda *_: {"time": random.random()}, False),  # noqa: S311 - another one each time
    "NaN": (lambda *_: {"nan": float("nan")}, False),
}


@pytest.mark.parametrize("by_metrics", [False, True])
@pytest.mark.parametrize("case", REPORTED)
def test_a_reported_value_that_is_no_mean_is_named(case: str, *, by_metrics: bool) -> None:
    values_of, warns = REPORTED[case]

    def loss_fn(net: nn.Module, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> Any:
        out = net(x)
        values, loss = values_of(out.detach(), y, w), functional.cross_entropy(out, y)
        if by_metrics:
            return ls.Loss(loss, metrics={name: (value * len(x), len(x)) for name, value in values.items()})
        ls.report(values)
        return loss

    updater = updater_of(loss_fn, batches=[(X.clone()[:18], Y[:18], WEIGHTS[:18])], num_shards=2)
    with finalized(updater), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        updater.update()
    found = [str(each.message) for each in said if "is no mean over samples" in str(each.message)]
    assert len(found) == warns
    assert all("The reported value 'right' is " in each for each in found if case == "number of correct ones")


def of_objects(net: nn.Module, x: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
    """Divide by the number of objects of all images."""
    squares = [(out - each).square().sum() for out, each in zip(net(x)[:, 0], boxes, strict=True)]
    return sum(squares, torch.zeros(())) / sum(len(each) for each in boxes)


def of_images(net: nn.Module, x: torch.Tensor, boxes: list[torch.Tensor]) -> torch.Tensor:
    """Divide by the number of objects of each image."""
    squares = [(out - each).square().mean() for out, each in zip(net(x)[:, 0], boxes, strict=True)]
    return torch.stack(squares).mean()


def to_lists(samples: Any, _: torch.device) -> dict[str, Any]:
    """Return a list of boxes, of which each image has its own number."""
    return {"x": torch.stack([x for x, _ in samples]), "boxes": [boxes for _, boxes in samples]}


@pytest.mark.parametrize(("loss_fn", "warns"), [(of_objects, [0]), (of_images, [])])
def test_a_batch_with_a_list_of_tensors_is_cut_by_its_entries(loss_fn: Any, warns: list[int]) -> None:
    samples = [(x, torch.rand(1 + index % 5)) for index, x in enumerate(X)]
    batches = ls.IterableBatches([samples] * 4, batches_of="samples")
    assert said_by(updater_of(loss_fn, batches=batches, converter=to_lists)) == warns


def test_a_batch_whose_parts_are_not_known_is_not_cut() -> None:
    sizes: list[int] = []

    def loss_fn(net: nn.Module, x: torch.Tensor, **_: object) -> torch.Tensor:
        sizes.append(len(x))
        return net(x).sum()

    def converter(samples: Any, device: torch.device) -> dict[str, Any]:
        return {**to_lists(samples, device), "edges": torch.zeros(2, 7)}

    samples = [(x, torch.rand(1 + index % 5)) for index, x in enumerate(X)]
    batches = ls.IterableBatches([samples], batches_of="samples")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert said_by(updater_of(loss_fn, batches=batches, converter=converter), updates=1) == []
    assert set(sizes) == {8}
