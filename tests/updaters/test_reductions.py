"""Sums, means by class weights and means over tokens are those of the whole batch, however it is cut."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.replicas import NoMeans
from tests.support.runs import finalized

X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.25])


def model() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(4, 3)


def trained(loss_fn: Any, num_shards: int, batch: Any = (X, Y), *, num_devices: int = 1) -> tuple[nn.Linear, float]:
    """Make one step of SGD at rate 1 and give the model with the loss."""
    net = model()
    updater = ls.ParallelUpdater(
        [batch],
        torch.optim.SGD(net.parameters(), lr=1.0),
        net,
        devices=["cpu"] * num_devices,
        num_shards=num_shards,
        loss_fn=loss_fn,
    )
    try:
        result = updater.update()
        observed = result.observation()["loss"]
        assert float(observed) == float(result.loss)
        return net, float(result.loss)
    finally:
        updater.finalize()


def plain(loss: Callable[[nn.Module], torch.Tensor]) -> tuple[nn.Linear, float]:
    """Make the same step in a plain loop."""
    net = model()
    value = loss(net)
    value.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
    return net, value.item()


def assert_same(ours: tuple[nn.Linear, float], theirs: tuple[nn.Linear, float]) -> None:
    # Shards are summed in another order than the plain loop sums samples.
    for mine, other in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)


SUMS = {
    "module": nn.CrossEntropyLoss(reduction="sum"),
    "partial": partial(functional.cross_entropy, reduction="sum"),
}


@pytest.mark.parametrize("criterion", SUMS)
@pytest.mark.parametrize("num_shards", [1, 2, 4, 5])
def test_a_summed_loss_is_the_sum_over_the_batch(criterion: str, num_shards: int) -> None:
    ours = trained(ls.supervised(SUMS[criterion]), num_shards)
    assert_same(ours, plain(lambda net: functional.cross_entropy(net(X), Y, reduction="sum")))


def test_a_summed_loss_has_the_same_bits_on_two_devices() -> None:
    loss_fn = ls.supervised(SUMS["module"])
    (one, first), (two, second) = (trained(loss_fn, 4, num_devices=count) for count in (1, 2))
    assert ls.digest(one) == ls.digest(two)
    assert first == second


def test_a_summed_loss_in_a_step_function_and_over_accumulated_batches() -> None:
    net = model()
    updater = ls.ParallelUpdater(
        [(X[:6], Y[:6]), (X[6:], Y[6:])],
        torch.optim.SGD(net.parameters(), lr=1.0),
        net,
        devices=["cpu"],
        num_shards=2,
        accumulate=2,
        loss_fn=ls.supervised(SUMS["module"]),
    )
    try:
        result = updater.update()
    finally:
        updater.finalize()
    assert_same((net, float(result.loss)), plain(lambda net: functional.cross_entropy(net(X), Y, reduction="sum")))

    def step(updater: ls.ParallelUpdater, batch: Any) -> None:
        assert updater.compute_gradients(batch).summed
        updater.apply_gradients()

    stepped = model()
    by_hand = ls.ParallelUpdater(
        [(X, Y)],
        torch.optim.SGD(stepped.parameters(), lr=1.0),
        stepped,
        devices=["cpu"],
        num_shards=3,
        step_fn=step,
        loss_fn=ls.supervised(SUMS["module"]),
    )
    try:
        found = by_hand.update()
    finally:
        by_hand.finalize()
    wanted = trained(ls.supervised(SUMS["module"]), 3)
    assert ls.digest(stepped) == ls.digest(wanted[0])
    assert float(found.loss) == wanted[1]


def test_a_criterion_that_does_not_reduce_is_refused() -> None:
    for criterion in (nn.CrossEntropyLoss(reduction="none"), partial(functional.mse_loss, reduction="none")):
        with pytest.raises(ValueError, match="`criterion` must reduce its loss to one element, got reduction='none'"):
            ls.supervised(criterion)


class ReducingItself(nn.CrossEntropyLoss):
    """Reduces in its own forward what its base leaves."""

    def __init__(self) -> None:
        super().__init__(reduction="none")

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = super().forward(output, target)
        return ((1 - (-each).exp()) ** 2 * each).mean()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_criterion_that_reduces_in_its_own_forward_is_a_mean(num_shards: int) -> None:
    assert_same(trained(ls.supervised(ReducingItself()), num_shards), plain(lambda net: ReducingItself()(net(X), Y)))


@pytest.mark.parametrize("num_shards", [1, 2, 4, 5])
def test_class_weights_count_in_means(num_shards: int) -> None:
    criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=1)
    assert_same(trained(ls.supervised(criterion), num_shards), plain(lambda net: criterion(net(X), Y)))


WEIGHTED: dict[str, Any] = {
    "a function": partial(functional.cross_entropy, weight=CLASS_WEIGHTS, ignore_index=1),
    "likelihoods": partial(functional.nll_loss, weight=CLASS_WEIGHTS),
    "an ignored class": nn.CrossEntropyLoss(ignore_index=1),
    "a function with an ignored class": partial(functional.cross_entropy, ignore_index=1),
}


@pytest.mark.parametrize("num_shards", [1, 2, 4, 5])
@pytest.mark.parametrize("name", WEIGHTED)
def test_targets_count_as_in_the_mean_of_the_criterion(name: str, num_shards: int) -> None:
    criterion = WEIGHTED[name]
    assert_same(trained(ls.supervised(criterion), num_shards), plain(lambda net: criterion(net(X), Y)))


class Focal(nn.CrossEntropyLoss):
    """Divides by the number of samples, whatever the class weights."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(output, target, self.weight, reduction="none").mean()


class Smooth(nn.modules.loss._WeightedLoss):
    """Divides by the weights of classes, without the function of torch."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scores = output.log_softmax(1)
        each, weight = -0.9 * scores.gather(1, target[:, None])[:, 0] - 0.1 * scores.mean(1), self.weight[target]
        return (each * weight).sum() / weight.sum()


class OfValid(nn.CrossEntropyLoss):
    """Divides by the number of targets that are not ignored."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        each = functional.cross_entropy(output, target, reduction="none", ignore_index=self.ignore_index)
        return ((1 - torch.exp(-each)) ** 2 * each)[target != self.ignore_index].mean()


class Poly(nn.CrossEntropyLoss):
    """Adds a mean over samples to one by the weights of classes."""

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(output, target) + (1 - output.softmax(1).gather(1, target[:, None])).mean()


@pytest.mark.parametrize("num_shards", [1, 3, 5])
@pytest.mark.parametrize("make", [lambda: Smooth(weight=CLASS_WEIGHTS), OfValid, lambda: OfValid(ignore_index=1)])
def test_a_criterion_of_ones_own_shows_what_it_divides_by(make: Callable[[], nn.Module], num_shards: int) -> None:
    criterion = make()
    ignored = getattr(criterion, "ignore_index", None)
    labels = Y if ignored is None else torch.where(torch.arange(len(Y)) % 5 == 0, ignored, Y)
    found = trained(ls.supervised(criterion), num_shards, (X, labels))
    assert_same(found, plain(lambda net: criterion(net(X), labels)))


def test_a_criterion_that_mixes_means_is_warned_of() -> None:
    (said,) = said_by(ls.supervised(Poly(weight=CLASS_WEIGHTS)), 4, 1)
    assert "but returns a term that is a mean weighted" in said


CHANGES: dict[str, tuple[Any, str, Any]] = {
    "weights from an epoch on": (nn.CrossEntropyLoss(), "weight", CLASS_WEIGHTS),
    "weights of a criterion of one's own": (Focal(), "weight", CLASS_WEIGHTS),
    "an ignored class": (nn.NLLLoss(), "ignore_index", 1),
    "a sum": (nn.CrossEntropyLoss(), "reduction", "sum"),
    "a mean": (nn.CrossEntropyLoss(reduction="sum"), "reduction", "mean"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_option_of_the_criterion_that_changes_counts_from_the_next_update_on(change: str) -> None:
    criterion, option, value = CHANGES[change]
    loss_fn = ls.supervised(criterion)
    setattr(criterion, option, value)
    assert_same(trained(loss_fn, 5), plain(lambda net: criterion(net(X), Y)))
    criterion.reduction = "none"
    if change == "weights of a criterion of one's own":
        # It reduces in its own forward, whatever its base does.
        return
    with pytest.raises(ValueError, match="must reduce its loss to one element"):
        trained(loss_fn, 5)


class Smoothed(nn.CrossEntropyLoss):
    """Takes pairs of targets, as a criterion for mixed samples does."""

    def forward(self, output: torch.Tensor, target: Any) -> torch.Tensor:  # type: ignore[override]
        first, second = (super(Smoothed, self).forward(output, each) for each in target)
        return (first + second) / 2


def test_a_cross_entropy_of_ones_own_is_a_mean_over_samples() -> None:
    criterion, net = Smoothed(), nn.Linear(X.size(1), 3)
    found = ls.supervised(criterion)(net, X, (Y, Y.flip(0)))
    assert torch.equal(cast("torch.Tensor", found), criterion(net(X), (Y, Y.flip(0))))


TOKENS = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(2))
LABELS = torch.arange(30).view(6, 5) % 3
LABELS[0, :] = -100
LABELS[1, 2:] = -100
LABELS[4, 1:] = -100


@pytest.mark.parametrize("num_shards", [1, 2, 3, 6])
def test_a_mean_over_tokens_is_that_of_the_batch(num_shards: int) -> None:
    ours = trained(ls.token_mean(), num_shards, (TOKENS, LABELS))
    assert_same(ours, plain(lambda net: functional.cross_entropy(net(TOKENS).flatten(0, 1), LABELS.flatten())))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 6])
def test_ignored_positions_do_not_count_in_the_mean(num_shards: int) -> None:
    loss_fn = ls.supervised(functional.cross_entropy)

    def by_position(net: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> Any:
        # Scores of shape (samples, classes, positions), as of a segmentation.
        return loss_fn(lambda given: net(given).transpose(1, 2), x, labels)

    ours = trained(by_position, num_shards, (TOKENS, LABELS))
    assert_same(ours, plain(lambda net: functional.cross_entropy(net(TOKENS).flatten(0, 1), LABELS.flatten())))


class Output(dict[str, torch.Tensor]):
    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


class Tagger(nn.Module):
    def __init__(self, *, shifted: bool) -> None:
        super().__init__()
        self.head = model()
        self.shifted = shifted

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
        logits, targets = (self.head(x[:, :-1]), labels[:, 1:]) if self.shifted else (self.head(x), labels)
        return Output(loss=functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))


class TinyForCausalLM(Tagger):
    def __init__(self) -> None:
        super().__init__(shifted=True)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 6])
@pytest.mark.parametrize("shifted", [False, True])
def test_a_model_that_returns_its_loss_is_weighted_by_the_labels_it_counts(shifted: bool, num_shards: int) -> None:
    losses, digests = [], []
    for shards in (1, num_shards):
        net = TinyForCausalLM() if shifted else Tagger(shifted=False)
        updater = ls.ParallelUpdater(
            [{"x": TOKENS, "labels": LABELS}],
            torch.optim.SGD(net.parameters(), lr=1.0),
            net,
            devices=["cpu"],
            num_shards=shards,
            loss_fn=ls.token_mean(),
        )
        try:
            losses.append(float(updater.update().loss))
        finally:
            updater.finalize()
        digests.append(net.head.weight.detach().clone())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    torch.testing.assert_close(digests[1], digests[0], rtol=1e-5, atol=1e-6)


class DoubledSum:
    """Twice the sum of outputs, whose gradient is twice the sum of inputs: 20 in each shard of two samples."""

    reduction = "sum"

    def __call__(self, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return output.sum() * 2


def test_shards_of_a_summed_loss_are_searched_at_the_factor_that_they_are_computed_with() -> None:
    """Under a mean the factor would be half as large, and the gradients finite."""
    net = nn.Linear(1, 1, bias=False)
    batch = torch.full((4, 1), 5.0), torch.zeros(4, 1)
    updater = ls.ParallelUpdater(
        [batch],
        torch.optim.SGD(net.parameters(), lr=1.0),
        net,
        devices=["cpu"],
        num_shards=2,
        loss_scale=2e37,
        loss_fn=ls.supervised(DoubledSum()),
        on_overflow="skip",
    )
    try:
        assert [found.shard for found in updater.find_nonfinite()] == [0, 1]
        assert not updater.update().applied
    finally:
        updater.finalize()


def test_a_model_without_a_loss_in_its_dict_is_refused_by_name() -> None:
    class NoLoss(Tagger):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
            return Output(logits=self.head(x) + labels.sum())

    net = NoLoss(shifted=False)
    with pytest.raises(TypeError, match="must return its loss as `loss` where the batch is a dict, got a Output"):
        ls.token_mean()(net, x=TOKENS, labels=LABELS)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (
            lambda net: (net(X).sum(), {}),
            r"must return a tensor or a lockstep.Loss, got a tuple\. If entry \[0\] is the loss, .* To report other",
        ),
        (lambda _: {"accuracy": 1.0}, r"got a dict\. To report other numbers .* lockstep.Loss\(value, metrics="),
        (lambda net: {"loss": net(X).sum()}, r"got a dict\. Return its entry 'loss'"),
    ],
)
def test_what_is_no_loss_is_refused_with_the_cure(returned: Callable[[nn.Module], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        trained(lambda net, *_: returned(net), 1)


def test_a_model_that_returns_no_loss_is_refused_in_its_own_words() -> None:
    net = Returning()
    updater = ls.StandardUpdater([(TOKENS, LABELS)], torch.optim.SGD(net.parameters(), lr=1.0), net)
    try:
        with pytest.raises(ls.ReplicaError, match="Without `loss_fn` the model must return its loss") as caught:
            updater.update()
    finally:
        updater.finalize()
    assert isinstance(caught.value.__cause__, TypeError)


class Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, y


@pytest.mark.parametrize("num_shards", [1, 3, 4])
def test_labels_of_samples_that_are_ignored_do_not_count(num_shards: int) -> None:
    # With four shards, one of them holds ignored labels only.
    labels = Y.clone()
    labels[:4] = -100
    labels[7] = -100
    ours = trained(ls.supervised(functional.cross_entropy), num_shards, (X, labels))
    assert_same(ours, plain(lambda net: functional.cross_entropy(net(X), labels)))


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
@pytest.mark.parametrize("older", [{"size_average": False}, {"reduce": True}, {"size_average": True, "reduce": True}])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_the_older_arguments_of_torch(older: dict[str, bool], num_shards: int) -> None:
    criterion = partial(functional.cross_entropy, **older)
    assert_same(trained(ls.supervised(criterion), num_shards), plain(lambda net: criterion(net(X), Y)))


def test_the_older_argument_for_no_reduction() -> None:
    with pytest.raises(ValueError, match="must reduce its loss to one element"):
        ls.supervised(partial(functional.cross_entropy, reduce=False))


@pytest.mark.parametrize("wrapped", [partial, lambda module: module.forward, lambda module: partial(module.forward)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_wrapped_module_is_that_module(wrapped: Callable[[nn.Module], Any], reduction: str) -> None:
    criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, reduction=reduction)
    assert_same(trained(ls.supervised(wrapped(criterion)), 3), plain(lambda net: criterion(net(X), Y)))


def of_samples(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [functional.cross_entropy(net(one[None]), each[None]) for one, each in zip(x, y, strict=True)]
    ).mean()


def ignoring(scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores, y, ignore_index=0)


def of_tokens(net: nn.Module, x: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Predict each next token from the one input, with labels that are shifted and padded, as in transformers."""
    labels = functional.pad(tokens, (0, 1), value=-100)[:, 1:].flatten()
    return functional.cross_entropy(net(x).repeat_interleave(tokens.shape[1], 0), labels)


OF_PARTS = "for some samples, of which parts have"
NO_MEANS: dict[str, tuple[Any, str]] = {
    "padded tokens": (
        lambda net, x, y: of_tokens(net, x, torch.stack([y, y, torch.where(y > 0, y, -100)], 1)),
        "a mean weighted",
    ),
    "reduction": (lambda net, x, y: functional.cross_entropy(net(x), y, reduction="sum"), OF_PARTS),
    "squares": (lambda net, x, _: net(x).square().sum(), OF_PARTS),
    "absolute": (lambda net, x, _: functional.l1_loss(net(x), net(x) + 1, reduction="sum"), OF_PARTS),
    "several dimensions": (lambda net, x, _: -net(x).sum((0, 1)), OF_PARTS),
    "root": (lambda net, x, _: net(x).square().mean().sqrt(), OF_PARTS),
    "norm": (lambda net, x, _: net(x).norm(), OF_PARTS),
    "classes": (lambda net, x, y: functional.cross_entropy(net(x), y, weight=CLASS_WEIGHTS), "a mean weighted"),
    "ignored": (lambda net, x, y: functional.cross_entropy(net(x), y, ignore_index=0), "a mean weighted"),
    "a mask": (
        lambda net, x, y: functional.mse_loss(net(x), x[:, :3], reduction="none")[y > 0].mean(),
        OF_PARTS,
    ),
    "divided by a mask": (
        lambda net, x, y: (net(x).square().sum(1) * (y > 0)).sum() / (y > 0).sum().clamp(min=1),
        OF_PARTS,
    ),
    "two heads": (lambda net, x, y: (ignoring(net(x), y) + ignoring(-net(x), y)) / 2, "a term that is a mean weighted"),
    "reconstruction": (
        lambda net, x, _: functional.mse_loss(net(x), net(x) + 1, reduction="sum") - 0.5 * net(x).exp().sum(),
        OF_PARTS,
    ),
}
MEANS: dict[str, Any] = {
    "shifted tokens": lambda net, x, y: of_tokens(net, x, torch.stack([y, y, y], 1)),
    "mean": lambda net, x, y: functional.cross_entropy(net(x), y),
    "means of columns": lambda net, x, _: net(x).square().mean(0).sum(),
    "as many tasks as samples": lambda net, x, _: torch.stack([net(x).square().mean()] * 3).sum(),
    "samples": of_samples,
    "divided": lambda net, x, y: functional.cross_entropy(net(x), y, reduction="sum") / len(x),
    "divided terms": lambda net, x, y: (
        (functional.cross_entropy(net(x), y, reduction="sum") - 0.5 * net(x).exp().sum()) / len(x)
    ),
    "a term divided": lambda net, x, y: (
        functional.cross_entropy(net(x), y) + functional.cross_entropy(net(x), y, reduction="sum") / len(x)
    ),
    "probabilities": lambda net, x, y: functional.cross_entropy(net(x), functional.one_hot(y, 3).float()),
    "a mask of columns": lambda net, x, _: net(x)[:, torch.tensor([True, False, True])].mean(),
    "by all elements": lambda net, x, _: (each := net(x)).square().sum() / each.numel(),
    "a temperature": lambda net, x, _: net(x).square().sum() / (len(x) * 0.07),
    "a loss without a weight": lambda net, x, y: ls.Loss(functional.cross_entropy(net(x), y), metrics={"one": (1, 1)}),
    "a penalty": lambda net, x, y: (
        functional.cross_entropy(net(x), y) + 0.1 * sum(each.square().sum() for each in net.parameters())
    ),
    "a norm as a penalty": lambda net, x, y: functional.cross_entropy(net(x), y) + net.weight.norm(),
    "sum of a criterion": ls.supervised(partial(functional.cross_entropy, reduction="sum")),
    "classes of a criterion": ls.supervised(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)),
    "weight": lambda net, x, y: ls.Loss(functional.cross_entropy(net(x), y, ignore_index=0), weight=(y != 0).sum()),
}


def said_by(loss_fn: Any, num_shards: int, num_devices: int) -> list[str]:
    net = model()
    updater = ls.ParallelUpdater(
        [(X, Y)],
        torch.optim.SGD(net.parameters(), lr=0.01),
        net,
        devices=["cpu"] * num_devices,
        num_shards=num_shards,
        loss_fn=loss_fn,
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(4):
            updater.update()
    updater.finalize()
    return [str(each.message) for each in said]


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("case", NO_MEANS)
def test_a_loss_that_is_no_mean_is_warned_of_once(case: str, num_devices: int) -> None:
    loss_fn, what = NO_MEANS[case]
    (said,) = said_by(loss_fn, 4, num_devices)
    assert what in said
    assert said_by(loss_fn, 1, 1) == []


def found_in(*losses: Any) -> list[str]:
    seen = NoMeans()
    for loss in losses:
        seen.note(loss, batch=0)
    return [*seen.found]


def test_a_loss_of_thousands_of_terms_is_looked_through() -> None:
    scores = X @ torch.randn(4, 3, requires_grad=True)
    terms = [functional.cross_entropy(scores, Y), *[scores.mean()] * 3_000]
    assert found_in(sum(terms)) == []
    (found,) = found_in(sum([*terms, functional.cross_entropy(scores, Y)]), sum([*terms, ignoring(scores, Y)]))
    assert found.startswith("a term that is a mean weighted")


def test_a_sum_that_is_doubled_is_looked_through_once() -> None:
    total = functional.cross_entropy(X @ torch.randn(4, 3, requires_grad=True), Y)
    for _ in range(64):
        total = total + total
    assert found_in(total) == []


def test_labels_of_which_all_shards_ignore_the_same_part_give_means() -> None:
    labels = torch.stack([torch.full_like(Y, -100), Y, Y], 1)
    # Batches of an update may differ from each other, but not their shards.
    batches = [(X, labels), (X, labels[:, 1:]), (X, labels)]
    net = model()
    updater = ls.ParallelUpdater(
        batches,
        torch.optim.SGD(net.parameters(), lr=0.01),
        net,
        devices=["cpu"] * 2,
        num_shards=4,
        loss_fn=of_tokens,
        accumulate=2,
    )
    with finalized(updater), warnings.catch_warnings():
        warnings.simplefilter("error")
        updater.update()


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("begins", [1, 3, 5])
def test_labels_that_are_ignored_later_are_warned_of_then(begins: int, num_devices: int) -> None:
    net, labels = model(), [Y if update < begins else torch.where(Y == 0, -100, Y) for update in range(7)]
    updater = ls.ParallelUpdater(
        [(X, each) for each in labels],
        torch.optim.SGD(net.parameters(), lr=0.01),
        net,
        devices=["cpu"] * num_devices,
        num_shards=3,
        loss_fn=lambda net, x, y: functional.cross_entropy(net(x), y),
    )
    with finalized(updater):
        for update in range(7):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                updater.update()
            assert ["a mean weighted" in str(each.message) for each in said] == [True] * (update == begins)


@pytest.mark.parametrize("case", MEANS)
def test_a_mean_raises_no_alarm(case: str) -> None:
    assert said_by(MEANS[case], 4, 2) == []


def test_a_partial_with_an_argument_is_no_bare_module() -> None:
    class Shifted(nn.Module):
        reduction = "mean"

        def forward(self, shift: float, scores: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(scores * shift, y)

    criterion = partial(Shifted(), 2.0)
    assert_same(trained(ls.supervised(criterion), 3), plain(lambda net: criterion(net(X), Y)))


class Tokens(nn.Module):
    """Returns the mean loss over its labels, as models of transformers do."""

    def __init__(self, *, shifts: bool, virtual: int = 0) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embedding, self.head, self.drop = nn.Embedding(8, 4), nn.Linear(4, 8), nn.Dropout(0.5)
        self.shifts, self.virtual, self.calls = shifts, virtual, 0
        self.prompt = nn.Parameter(torch.randn(virtual, 4))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        hidden = torch.cat([self.prompt.expand(len(ids), -1, -1), self.embedding(ids)], 1)
        labels = torch.cat([labels.new_full((len(ids), self.virtual), -100), labels], 1)
        logits = self.head(self.drop(hidden) if self.training and self.drop.p < 0.5 else hidden)
        if self.shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class BareForCausalLM(Tokens):
    """Does not shift, whatever its name is, as decoders of encoder-decoder models do not."""


IDS = torch.randint(8, (6, 5), generator=torch.Generator().manual_seed(3))
OF_IDS = torch.where(torch.arange(5) < torch.tensor([5, 5, 2, 1, 4, 3])[:, None], IDS, -100)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Tokens(shifts=True),
        lambda: Tokens(shifts=False),
        lambda: Tokens(shifts=True, virtual=2),
        lambda: BareForCausalLM(shifts=False),
    ],
    ids=["shifts", "does not", "virtual tokens", "only by name"],
)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 6])
def test_which_labels_count_is_found_by_the_loss(make: Callable[[], Tokens], num_shards: int) -> None:
    batch = {"ids": IDS, "labels": OF_IDS}
    plain_model, model = make().double(), make().double()
    plain_model(**batch)["loss"].backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with finalized(
        ls.ParallelUpdater([batch], optimizer, model, devices=["cpu"], num_shards=num_shards, loss_fn=ls.token_mean())
    ) as updater:
        updater.compute_gradients(batch)
        assert all(module.training for module in model.modules())
    for one, other in zip(model.parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


class Noisy(Tokens):
    """Draws in evaluation mode, too."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(ids, labels)
        return {"loss": found["loss"] * torch.rand(())}


def test_a_model_that_draws_is_asked_with_the_same_numbers_and_draws_none() -> None:
    model = Noisy(shifts=True)
    torch.manual_seed(3)
    plain_loss = model(IDS, OF_IDS)["loss"]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    found = ls.token_mean()(model, ids=IDS, labels=OF_IDS)
    assert torch.equal(found.value, plain_loss)
    assert found.weight == (OF_IDS[:, 1:] != -100).sum()
    assert torch.equal(torch.get_rng_state(), state)


class OnlyTraining(Tokens):
    """Returns no loss in evaluation mode."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(ids, labels) if self.training else {}


def test_a_model_without_a_loss_in_evaluation_mode_needs_the_argument() -> None:
    model = OnlyTraining(shifts=True)
    with pytest.raises(ValueError, match="`shifted` must be True or False for a OnlyTraining"):
        ls.token_mean()(model, ids=IDS, labels=OF_IDS)
    assert all(module.training for module in model.modules())
    assert ls.token_mean(shifted=True)(model, ids=IDS, labels=OF_IDS).weight == (OF_IDS[:, 1:] != -100).sum()


def test_labels_whose_first_ones_are_ignored_need_no_second_call() -> None:
    model = Tokens(shifts=False)
    labels = OF_IDS.clone()
    labels[:, 0] = -100
    assert ls.token_mean()(model, ids=IDS, labels=labels).weight == (labels != -100).sum()
    assert vars(model)["calls"] == 1


class Focal(nn.CrossEntropyLoss):
    """Divides by the number of samples, although it has class weights."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        each = functional.cross_entropy(input, target, weight=self.weight, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()


class Tempered(nn.CrossEntropyLoss):
    """Divides by the weights of classes."""

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:  # noqa: A002 - torch's name
        return super().forward(input / 2, target)


@pytest.mark.parametrize("kind", [Focal, Tempered])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_class_weights_of_a_criterion_of_ones_own(kind: type[nn.CrossEntropyLoss], num_shards: int) -> None:
    criterion = kind(weight=torch.tensor([0.2, 1.0, 4.0], dtype=torch.float64))
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) ** 2 % 3
    nets = [nn.Linear(4, 3).double() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    criterion(nets[0](x), y).backward()
    optimizer = torch.optim.SGD(nets[1].parameters(), lr=0.1)
    loss_fn = ls.supervised(criterion)
    with finalized(
        ls.ParallelUpdater([(x, y)], optimizer, nets[1], devices=["cpu"], num_shards=num_shards, loss_fn=loss_fn)
    ) as updater:
        updater.compute_gradients((x, y))
    torch.testing.assert_close(nets[1].weight.grad, nets[0].weight.grad, rtol=1e-12, atol=1e-14)
