"""Time-first batches, and hidden states that are carried from batch to batch: a word language model on an LSTM."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lockstep as ls
from lockstep.updaters.state.carried import CarriedAttempt, CarriedValues
from tests.support.ranks import launch_on_ranks
from tests.support.reads import Reads
from tests.support.runs import finalized

WORDS, STREAMS, STEPS, PIECES, SIZE = 11, 6, 5, 4, 8
UPDATES = 7
"""More than one epoch, so that the hidden state starts anew in between."""


class Language(nn.Module):
    """The model of PyTorch's word language model example: an embedding, an LSTM with dropout, and a decoder."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(WORDS, SIZE)
        self.rnn = nn.LSTM(SIZE, SIZE, 2, dropout=dropout)
        self.decoder = nn.Linear(SIZE, WORDS)

    def forward(self, words: torch.Tensor, hidden: Any) -> tuple[torch.Tensor, Any]:
        output, hidden = self.rnn(self.drop(self.encoder(words)), hidden)
        return self.decoder(self.drop(output)), hidden


def model_of(dropout: float = 0.2) -> Language:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Language(dropout)


def pieces() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches of an epoch: (steps, streams), with the words that follow."""
    text = torch.randint(WORDS, (STEPS * PIECES + 1, STREAMS), generator=torch.Generator().manual_seed(2))
    starts = range(0, STEPS * PIECES, STEPS)
    return [(text[start : start + STEPS], text[start + 1 : start + STEPS + 1]) for start in starts]


def zeros() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(2, STREAMS, SIZE), torch.zeros(2, STREAMS, SIZE)


def loss_fn(model: nn.Module, words: torch.Tensor, target: torch.Tensor, carried: Any) -> ls.Loss:
    output, hidden = model(words, carried)
    return ls.Loss(functional.cross_entropy(output.flatten(0, 1), target.flatten()), carried=hidden)


def updater_of(
    devices: int = 1, *, batches: Any = None, dropout: float = 0.2, fused: bool = False, **options: Any
) -> ls.ParallelUpdater:
    model = model_of(dropout)
    return ls.ParallelUpdater(
        pieces() if batches is None else batches,
        torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused),
        model,
        devices=["cpu"] * devices,
        **{"num_shards": 3, "loss_fn": loss_fn, "batch_dim": 1, "carried": ls.Carried(zeros()), **options},
    )


def digest_after(updates: int = UPDATES, **options: Any) -> str:
    with finalized(updater_of(**options)) as updater:
        for _ in range(updates):
            updater.update()
        return ls.digest(updater.state_dict())


def test_devices_and_ranks_change_no_bit() -> None:
    alone = digest_after()
    assert [digest_after(devices=devices) for devices in (2, 3)] == [alone] * 2
    assert launch_on_ranks(digest_after, 2) == [alone] * 2


def test_a_strided_split_changes_no_bit_either() -> None:
    alone = digest_after(split="strided")
    assert digest_after(split="strided", devices=2) == alone
    assert alone != digest_after()


def test_one_shard_is_the_loop_of_pytorchs_example() -> None:
    with finalized(updater_of(num_shards=1, dropout=0.0)) as updater:
        for _ in range(UPDATES):
            updater.update()
        found = ls.digest(updater.get_all_models()["main"])
    model = model_of(0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for update in range(UPDATES):
        if update % PIECES == 0:
            hidden = zeros()
        words, target = pieces()[update % PIECES]
        hidden = tuple(each.detach() for each in hidden)  # type: ignore[assignment]  # repackage_hidden of the example
        optimizer.zero_grad()
        output, hidden = model(words, hidden)
        functional.cross_entropy(output.flatten(0, 1), target.flatten()).backward()
        optimizer.step()
    assert ls.digest(model) == found


def test_the_state_matters_and_may_outlive_an_epoch() -> None:
    found = {
        digest_after(),
        digest_after(carried=ls.Carried(zeros(), each_epoch=False)),
        digest_after(carried=None, loss_fn=lambda model, words, target: loss_fn(model, words, target, None)),
    }
    assert len(found) == 3


def test_a_loaded_state_goes_on_where_it_was_saved() -> None:
    with finalized(updater_of()) as updater:
        for _ in range(3):
            updater.update()
        state = updater.state_dict()
        for _ in range(3):
            updater.update()
        expected = ls.digest(updater.state_dict())
    assert set(state["carried"]) == {"carried[0]", "carried[1]"}
    with finalized(updater_of(devices=2)) as resumed:
        resumed.load_state_dict(state)
        for _ in range(3):
            resumed.update()
        assert ls.digest(resumed.state_dict()) == expected
    carried, message = ls.Carried((torch.zeros(2, STREAMS, 3),)), "must hold carried values of the shapes"
    with finalized(updater_of(carried=carried)) as other, pytest.raises(ls.StateError, match=message):
        other.load_state_dict(state)


class Spoilt:
    """The loss function, with a NaN or an infinite gradient in some of its calls."""

    def __init__(self, bad: set[int]) -> None:
        self.bad, self.calls = bad, 0

    def __call__(self, *args: Any, **kwargs: Any) -> ls.Loss:
        loss = loss_fn(*args, **kwargs)
        self.calls += 1
        if self.calls not in self.bad:
            return loss
        spoilt = tuple(each * math.nan for each in loss.carried)
        return ls.Loss(loss.value * math.inf, carried=spoilt)


def test_a_failed_attempt_leaves_no_state() -> None:
    scale = ls.DynamicLossScale(4.0)
    options: dict[str, Any] = {"num_shards": 1, "loss_scale": scale, "dropout": 0.0}
    # The second attempt at the second update has another loss scale, a power of two, which changes no bit.
    with (
        finalized(updater_of(loss_fn=Spoilt({2}), audit_every=0, **options)) as spoilt,
        finalized(updater_of(**options)) as calm,
    ):
        tries = [spoilt.update().tries for _ in range(3)]
        for _ in range(3):
            calm.update()
        assert tries == [1, 2, 1]
        assert ls.digest(spoilt.state_dict()["carried"]) == ls.digest(calm.state_dict()["carried"])


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_update_keeps_the_old_state(fused: bool) -> None:
    with finalized(
        updater_of(num_shards=1, loss_fn=Spoilt({2}), audit_every=0, fused=fused, on_overflow="skip")
    ) as updater:
        updater.update()
        before = ls.digest(updater.state_dict()["carried"])
        with Reads() as reads:
            result = updater.update()
        assert (reads.count == 0) == fused
        assert not result.applied
        assert ls.digest(updater.state_dict()["carried"]) == before
        assert updater.update().applied


def raising(model: nn.Module, words: torch.Tensor, target: torch.Tensor, carried: Any) -> ls.Loss:
    loss = loss_fn(model, words, target, carried)
    if STATE["raise"]:
        raise RuntimeError
    return loss


STATE = {"raise": False}


def test_an_update_that_raises_leaves_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    with finalized(updater_of(loss_fn=raising)) as updater:
        updater.update()
        before = ls.digest(updater.state_dict())
        monkeypatch.setitem(STATE, "raise", True)
        with pytest.raises(ls.ReplicaError):
            updater.update()
        assert ls.digest(updater.state_dict()) == before


def test_negative_zeros_of_other_ranks_are_kept() -> None:
    attempt = CarriedAttempt(CarriedValues(ls.Carried(torch.zeros(3, 2), dim=0), CPU), [3])
    attempt.keep(range(1), torch.tensor([[-0.0, math.nan]]))
    other = {range(1, 3): [torch.full((2, 2), -0.0)]}
    (merged,) = attempt.merged(lambda own: [own, other])
    assert ls.digest({"0": merged}) == ls.digest({"0": torch.tensor([[-0.0, math.nan], [-0.0, -0.0], [-0.0, -0.0]])})


CPU = torch.device("cpu")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no Carried": ({"carried": zeros()}, r"`carried` must be a lockstep.Carried or None, got a tuple. Pass"),
    "accumulate": ({"accumulate": 2}, r"`carried` must be None unless an update has one batch.*got accumulate=2"),
    "a step function": ({"step_fn": lambda *_: None}, r"`carried` must be None unless .* got a step function"),
    "a dimension": ({"carried": ls.Carried(torch.zeros(3))}, r"`carried` must have a dimension 1 to count samples by"),
    "None": ({"carried": ls.Carried(torch.zeros(3), dim=None)}, r"`dim` of Carried must be a number for every tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    options, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError), match=message):
        updater_of(**options)


def test_what_a_loss_function_must_return_is_said() -> None:
    def forgetful(model: nn.Module, words: torch.Tensor, target: torch.Tensor, carried: Any) -> torch.Tensor:
        return loss_fn(model, words, target, carried).value

    message = r"must return new values of the shapes \[\(2, 2, 8\), \(2, 2, 8\)\] as `carried`, got none. Return"
    with finalized(updater_of(loss_fn=forgetful)) as updater, pytest.raises(ValueError, match=message):
        updater.update()
    message = "must hold 6 samples, one for each that has values in `carried`, got 5"
    with finalized(updater_of(batch_dim=0)) as updater, pytest.raises(ValueError, match=message):
        updater.update()
    with pytest.raises(ValueError, match="`initial` must hold at least one tensor, got none"):
        ls.Carried(())


# Time-first batches --------------------------------------------------------------------------------------


def time_first(model: nn.Module, words: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    output, _ = model(words, None)
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch_first(model: nn.Module, words: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return time_first(model, words.t(), target.t())


def transposed() -> list[tuple[torch.Tensor, ...]]:
    return [tuple(each.t().contiguous() for each in piece) for piece in pieces()]


@pytest.mark.parametrize("options", [{}, {"devices": 2}, {"split": "strided"}, {"num_shards": 4}, {"accumulate": 2}])
def test_time_first_batches_give_the_bits_of_batch_first_ones(options: dict[str, Any]) -> None:
    first = digest_after(batches=transposed(), loss_fn=batch_first, batch_dim=0, carried=None, **options)
    assert digest_after(loss_fn=time_first, carried=None, **options) == first


NAMED: dict[str, tuple[Callable[..., Any], Any]] = {
    "positions": (lambda words, target, bias: (words, target.t(), bias), {0: 1, 2: None}),
    "keys": (
        lambda words, target, bias: {"words": words, "target": target.t(), "bias": bias},
        {"words": 1, "bias": None},
    ),
    "a nest": (
        lambda words, target, bias: {"words": words, "target": target.t(), "bias": {"of": [bias, bias]}},
        {"words": -1, "bias": None},
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_inputs_have_dimensions_of_their_own(name: str) -> None:
    make, dims = NAMED[name]
    bias = torch.linspace(-1.0, 1.0, WORDS)

    def with_bias(model: nn.Module, words: torch.Tensor, target: torch.Tensor, bias: Any) -> torch.Tensor:
        bias = bias["of"][1] if isinstance(bias, dict) else bias
        assert bias.shape == (WORDS,)
        output, _ = model(words, None)
        return functional.cross_entropy((output + bias).flatten(0, 1), target.t().flatten())

    def batch_first_with_bias(model: nn.Module, words: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return with_bias(model, words.t(), target, bias)

    found = digest_after(
        batches=[make(*piece, bias) for piece in pieces()], loss_fn=with_bias, batch_dim=dims, carried=None, devices=2
    )
    assert found == digest_after(batches=transposed(), loss_fn=batch_first_with_bias, batch_dim=0, carried=None)


def test_dimensions_that_do_not_fit_are_refused() -> None:
    wrong: list[tuple[Any, type[Exception], str]] = [
        ("first", TypeError, r"`batch_dim` must be an integer, None, or a dict of these by name, got 'first'"),
        ({"words": 1}, ValueError, r"`batch_dim` must name some of 0, 1, got 'words'"),
        (2, ValueError, r"`0` must have a dimension 2 to count samples by, got shape \(5, 6\)"),
        ({0: 1, 1: 0}, ValueError, r"`1` must hold as many samples as `0` \(6\) along dimension 0, got 5"),
        (None, ValueError, r"`batch` must hold an input that is split over devices"),
    ]
    for dims, error, message in wrong:
        with pytest.raises(error, match=message), finalized(updater_of(batch_dim=dims, carried=None)) as updater:
            updater.update()
