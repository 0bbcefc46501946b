"""Every sample comes once per epoch, looking ahead changes nothing, and a few numbers are the whole state."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.data import IterableDataset

from lockstep.data import BatchIterator
from lockstep.data.cursor import shuffled_order
from lockstep.errors import StateError

SETTINGS = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 9),
        "repeat": st.booleans(),
        "last_batch": st.sampled_from(["wrap", "short", "drop"]),
        "shuffle": st.booleans(),
        "seed": st.integers(-(2**40), 2**40),
    }
)
LENGTHS = st.integers(1, 12)


def make(length: int, settings: dict[str, Any]) -> BatchIterator:
    if settings["last_batch"] == "drop":
        settings = settings | {"batch_size": min(settings["batch_size"], length)}
    return BatchIterator(range(length), **settings)


def progress(batches: BatchIterator) -> tuple[object, ...]:
    return (
        batches.epoch,
        batches.current_position,
        batches.epoch_detail,
        batches.previous_epoch_detail,
        batches.is_new_epoch,
    )


def steps(batches: BatchIterator, count: int) -> list[tuple[object, ...]]:
    """Take batches, fewer where they end, and note where each led to."""
    return [(list(batch), *progress(batches)) for batch in islice(batches, count)]


def expected_epochs(length: int, settings: dict[str, Any]) -> Iterator[list[int]]:
    epoch = 0
    while True:
        own = shuffled_order(length, seed=settings["seed"], epoch=epoch).tolist()
        yield own if settings["shuffle"] else list(range(length))
        epoch += 1


@given(LENGTHS, SETTINGS)
def test_every_sample_comes_once_per_epoch(length: int, settings: dict[str, Any]) -> None:
    batches = make(length, settings)
    size = batches.batch_size
    taken = [list(batch) for batch in islice(batches, 40)]
    epochs = expected_epochs(length, settings)
    expected: list[list[int]] = []
    rest: list[int] = []
    while len(expected) < 40:
        rest += next(epochs)
        assert sorted(rest[-length:]) == list(range(length))
        while len(rest) >= size:
            expected.append(rest[:size])
            rest = rest[size:]
        if rest and (settings["last_batch"] == "short" or not settings["repeat"]):
            expected += [rest] if settings["last_batch"] != "drop" else []
        if settings["last_batch"] != "wrap" or not settings["repeat"]:
            rest = []
        if not settings["repeat"]:
            break
    assert taken == expected[:40]


@given(LENGTHS, SETTINGS)
def test_progress_is_counted_in_samples(length: int, settings: dict[str, Any]) -> None:
    batches = make(length, settings | {"last_batch": "wrap", "repeat": True})
    assert progress(batches) == (0, 0, 0.0, None, False)
    previous = 0.0
    for passed in range(batches.batch_size, 30 * batches.batch_size, batches.batch_size):
        before = batches.epoch
        next(batches)
        assert (batches.epoch, batches.current_position) == divmod(passed, length)
        assert batches.epoch_detail == passed // length + passed % length / length
        assert batches.previous_epoch_detail == previous
        assert batches.is_new_epoch is (batches.epoch > before)
        previous = batches.epoch_detail


@given(LENGTHS, SETTINGS.filter(lambda settings: settings["last_batch"] != "wrap"))
def test_epochs_that_end_with_their_last_batch(length: int, settings: dict[str, Any]) -> None:
    batches = make(length, settings | {"repeat": True})
    for epoch in range(1, 4):
        for _ in range(length // batches.batch_size + 1):
            next(batches)
            if batches.is_new_epoch:
                break
        assert progress(batches)[:3] == (epoch, 0, float(epoch))
        assert batches.is_new_epoch


@given(LENGTHS, SETTINGS, st.lists(st.integers(0, 7), max_size=12))
def test_peeking_changes_nothing(length: int, settings: dict[str, Any], looks: list[int]) -> None:
    batches, undisturbed = make(length, settings), make(length, settings)
    for ahead in looks:
        before, state = progress(batches), batches.state_dict()
        try:
            seen: list[int] | None = list(batches.peek(ahead))
        except StopIteration:
            seen = None
        assert (progress(batches), batches.state_dict()) == (before, state)
        future = make(length, settings)
        future.load_state_dict(state)
        assert [seen] == ([step[0] for step in steps(future, ahead + 1)][ahead:] or [None])
        assert steps(batches, 1) == steps(undisturbed, 1)


@given(LENGTHS, SETTINGS, st.integers(0, 15), st.integers(0, 3), st.integers(0, 99))
def test_a_saved_state_has_the_same_rest(
    length: int, settings: dict[str, Any], passed: int, looked_at: int, other_seed: int
) -> None:
    batches = make(length, settings)
    steps(batches, passed)
    with suppress(StopIteration):
        batches.peek(looked_at)
    resumed = make(length, settings | {"seed": other_seed})
    steps(resumed, 2)
    resumed.load_state_dict(batches.state_dict())
    assert progress(resumed) == progress(batches)
    assert resumed.seed == settings["seed"]
    assert steps(resumed, 10) == steps(batches, 10)


@given(LENGTHS, SETTINGS, st.integers(0, 10))
def test_a_reset_begins_again(length: int, settings: dict[str, Any], passed: int) -> None:
    batches = make(length, settings)
    steps(batches, passed)
    batches.reset()
    assert progress(batches) == (0, 0, 0.0, None, False)
    assert steps(batches, 5) == steps(make(length, settings), 5)


@given(LENGTHS, SETTINGS, st.integers(1, 6))
def test_several_batches_are_passed_at_once(length: int, settings: dict[str, Any], count: int) -> None:
    together, one_by_one = make(length, settings), make(length, settings)
    steps(together, 1)
    steps(one_by_one, 1)
    before = together.epoch, together.epoch_detail
    last = steps(one_by_one, count)
    if len(last) < count:
        state = together.state_dict()
        with pytest.raises(StopIteration):
            together.advance(count)
        assert together.state_dict() == state
    else:
        together.advance(count)
        assert (together.epoch, together.current_position) == (one_by_one.epoch, one_by_one.current_position)
        assert together.previous_epoch_detail == before[1]
        assert together.is_new_epoch is (together.epoch > before[0])


def test_the_end_stays_the_end() -> None:
    batches = BatchIterator(range(3), 2, repeat=False)
    assert [list(batch) for batch in batches] == [[0, 1], [2]]
    for _ in range(2):
        with pytest.raises(StopIteration):
            batches.peek()
        with pytest.raises(StopIteration):
            batches.advance()
        with pytest.raises(StopIteration):
            next(batches)
    assert progress(batches) == (1, 0, 1.0, 1.0, True)


class RecordingSampler:
    """Reverses the order at the end of each epoch, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], int]] = []

    def __call__(self, order: list[int], position: int) -> list[int]:
        self.calls.append((list(order), position))
        order.reverse()
        return order


@given(LENGTHS, st.integers(1, 9), st.booleans(), st.lists(st.integers(0, 5), max_size=8))
def test_an_order_sampler_is_asked_once_per_epoch(length: int, batch_size: int, repeat: bool, looks: list[int]) -> None:
    looking, plain = RecordingSampler(), RecordingSampler()
    looking_batches = BatchIterator(range(length), batch_size, repeat=repeat, order_sampler=looking)
    plain_batches = BatchIterator(range(length), batch_size, repeat=repeat, order_sampler=plain)
    assert looking.calls == [(list(range(length)), 0)]
    for ahead in looks:
        try:
            looking_batches.peek(ahead)
        except StopIteration:
            assert not repeat
        assert steps(looking_batches, 1) == steps(plain_batches, 1)
    steps(plain_batches, 6)
    assert looking.calls == plain.calls[: len(looking.calls)]


def test_the_order_that_a_sampler_made_is_saved() -> None:
    batches = BatchIterator(range(5), 2, order_sampler=RecordingSampler())
    steps(batches, 3)
    state = batches.state_dict()
    assert state["order"].tolist() == [0, 1, 2, 3, 4]
    state["order"].fill_(0)
    resumed = BatchIterator(range(5), 2, order_sampler=RecordingSampler())
    resumed.load_state_dict(batches.state_dict())
    assert steps(resumed, 6) == steps(batches, 6)


class Weighted:
    """Answers with tensors and repeats, which an order may have."""

    def __call__(self, order: list[int], _position: int) -> Any:
        return torch.zeros(len(order), dtype=torch.int32)


def test_an_order_may_be_a_tensor_with_repeats() -> None:
    assert list(next(BatchIterator(range(4), 3, order_sampler=Weighted()))) == [0, 0, 0]


DRAWN_ORDERS: dict[str, Any] = {
    "weights": lambda order, _: torch.multinomial(torch.arange(1.0, len(order) + 1), len(order), replacement=True),
    "torch": lambda order, _: torch.randperm(len(order)),
    "random": lambda order, _: random.sample(order, len(order)),
    "numpy": lambda order, _: np.random.permutation(len(order)),
}


@pytest.mark.parametrize("drawn", DRAWN_ORDERS)
def test_what_an_order_sampler_draws_depends_on_the_seed_and_the_epoch_only(drawn: str) -> None:
    def batches(seed: int, start: int = 0) -> BatchIterator:
        torch.manual_seed(start)
        random.seed(start)
        np.random.seed(start)
        return BatchIterator(range(20), 20, order_sampler=DRAWN_ORDERS[drawn], seed=seed)

    straight = batches(7)
    before = torch.get_rng_state(), random.getstate()
    epochs = steps(straight, 4)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert len({tuple(epoch[0]) for epoch in epochs}) == 4  # type: ignore[arg-type]
    first = batches(7, start=1)
    first.peek(2)
    assert steps(first, 2) == epochs[:2]
    state = first.state_dict()
    resumed = batches(8, start=2)
    assert steps(resumed, 1) != epochs[:1]
    resumed.load_state_dict(state)
    assert steps(resumed, 2) == epochs[2:]


class FailingSampler:
    """Fails when it is first asked for the second order."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, order: list[int], _position: int) -> Sequence[int]:
        self.num_calls += 1
        if self.num_calls == 2:
            raise RuntimeError("no order today")
        return order


def test_an_error_leaves_the_iterator_where_it_was() -> None:
    batches = BatchIterator(range(3), 2, order_sampler=FailingSampler(), last_batch="wrap")
    next(batches)
    before = progress(batches)
    with pytest.raises(RuntimeError, match="no order today"):
        next(batches)
    assert progress(batches) == before
    assert list(next(batches)) == [2, 0]


def test_orders_follow_from_the_seed_and_the_epoch_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state()
    first = [list(next(BatchIterator(range(50), 50, shuffle=True, seed=seed))) for seed in (0, 1, 2**32, -1)]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    batches = BatchIterator(range(50), 50, shuffle=True)
    epochs = [list(next(batches)) for _ in range(4)]
    assert epochs[0] == first[0]
    assert len({tuple(order) for order in first + epochs[1:]}) == 7


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_next_batch_is_of_a_dataset_that_is_set(num_workers: int) -> None:
    batches = BatchIterator(list(range(6)), 2, shuffle=True, seed=4, num_workers=num_workers)
    try:
        order = [next(batches).indices, batches.peek().indices, batches.peek(1).indices]
        batches.dataset = [10 * index for index in range(6)]
        assert [list(next(batches)) for _ in range(2)] == [[10 * index for index in each] for each in order[1:]]
        with pytest.raises(ValueError, match=r"`dataset` must have as many samples as before \(6\).* a list of 7"):
            batches.dataset = list(range(7))
        larger = BatchIterator(list(range(7)), 2, shuffle=True)
        larger.load_state_dict(batches.state_dict())
        assert (larger.epoch, list(next(larger))) == (1, shuffled_order(7, seed=4, epoch=1).tolist()[:2])
    finally:
        batches.finalize()


def test_what_was_given_can_be_read() -> None:
    dataset = range(7)
    batches = BatchIterator(dataset, 3, repeat=False, last_batch="drop", seed=5)
    assert batches.dataset is dataset
    assert (batches.batch_size, batches.repeat, batches.last_batch, batches.seed) == (3, False, "drop", 5)
    assert next(batches).indices == range(3)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


def returns(order: Any) -> Any:
    return lambda _order, _position: order


@pytest.mark.parametrize(
    ("dataset", "options", "error", "message"),
    [
        ([], {}, ValueError, r"`dataset` must hold at least one sample, got none\."),
        (iter([1]), {}, TypeError, r"`dataset` must have `len\(\)` and `\[index\]`, got a list_iterator\."),
        (Stream(), {}, TypeError, r"`dataset` must have .*, got a Stream\."),
        ({1, 2}, {}, TypeError, r"`dataset` must have .*, got a set\."),
        ("abc", {"batch_size": 0}, ValueError, r"`batch_size` must be at least 1, got 0\."),
        ("abc", {"batch_size": 2.0}, TypeError, r"`batch_size` must be an integer, got 2\.0\."),
        ("abc", {"batch_size": True}, TypeError, r"`batch_size` must be an integer, got True\."),
        ("abc", {"seed": "0"}, TypeError, r"`seed` must be an integer, got '0'\."),
        ("abc", {"num_workers": -1}, ValueError, r"`num_workers` must be at least 0, got -1\."),
        (
            "abc",
            {"last_batch": "pad"},
            ValueError,
            r"must be 'wrap', 'short' or 'drop', got 'pad'",
        ),
        (
            "abc",
            {"last_batch": "drop", "batch_size": 4},
            ValueError,
            r"at most the .* \(3\).*, got 4\.",
        ),
        (
            "abc",
            {"shuffle": True, "order_sampler": returns([0, 1, 2])},
            ValueError,
            "`shuffle` must be False",
        ),
        (
            "abc",
            {"order_sampler": returns([0, 1])},
            ValueError,
            "one index for each of the 3 samples",
        ),
        ("abc", {"order_sampler": returns([0, 1, 3])}, ValueError, r"indices in 0\.\.2, got 0\.\.3\."),
        ("abc", {"order_sampler": returns([-1, 1, 2])}, ValueError, r"indices in 0\.\.2, got -1\.\.2\."),
        (
            "abc",
            {"order_sampler": returns([0.0, 1, 2])},
            TypeError,
            "must hold integers, got torch",
        ),
        ("abc", {"order_sampler": returns([True, False, True])}, TypeError, r"must hold integers"),
    ],
)
def test_bad_arguments_are_refused(dataset: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        BatchIterator(dataset, **({"batch_size": 2} | options))


@pytest.mark.parametrize("call", [lambda it: it.peek(-1), lambda it: it.advance(0)])
def test_bad_counts_are_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        call(BatchIterator("abc", 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, r"unknown: 'extra'"),
        ({"seed": None}, "`seed` must be an integer, got None"),
        ({"epoch": -1}, "`epoch` must be at least 0, got -1"),
        ({"position": 5}, r"`position` must lie in 0\.\.4, because there are 5 samples and .*, got 5\."),
        ({"position": 1.0}, "`position` must be an integer"),
        ({"previous_epoch_detail": "0"}, "`previous_epoch_detail` must be a float or None, got '0'"),
        ({"is_new_epoch": 1}, "`is_new_epoch` must be a bool, got 1"),
        (
            {"order": torch.arange(4)},
            r"`order` must hold one index for each .*, got shape \(4,\)",
        ),
        ({"order": torch.arange(1, 6)}, r"`order` must hold indices in 0\.\.4, got 1\.\.5\."),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    batches = BatchIterator(range(5), 2, order_sampler=RecordingSampler())
    good = batches.state_dict()
    steps(batches, 4)
    before = batches.state_dict()
    with pytest.raises(StateError, match=message):
        batches.load_state_dict(good | change)
    after = batches.state_dict()
    assert torch.equal(after.pop("order"), before.pop("order"))
    assert after == before


def test_missing_keys_are_refused_by_name() -> None:
    batches = BatchIterator(range(5), 2)
    state = batches.state_dict()
    del state["seed"]
    with pytest.raises(StateError, match=r"missing: 'seed'"):
        batches.load_state_dict(state)
    with pytest.raises(StateError, match=r"unknown: 'order'"):
        batches.load_state_dict(batches.state_dict() | {"order": torch.arange(5)})


def test_a_dropping_iterator_needs_a_whole_batch_after_a_saved_place() -> None:
    state = BatchIterator(range(5), 1).state_dict()
    batches = BatchIterator(range(5), 3, last_batch="drop")
    batches.load_state_dict(state | {"position": 2})
    assert steps(batches, 2) == [([2, 3, 4], 1, 0, 1.0, 0.4, True), ([0, 1, 2], 2, 0, 2.0, 1.0, True)]
    with pytest.raises(StateError, match=r"`position` must lie in 0\.\.2"):
        batches.load_state_dict(state | {"position": 3})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_read_early_if_workers_load_them_in_advance(num_workers: int) -> None:
    batches = BatchIterator(list(range(5)), 2, repeat=False, num_workers=num_workers)
    early = [batches.peek_early(ahead) for ahead in range(4)]
    assert [each is not None for each in early] == [num_workers == 1] * 3 + [False]
    for ahead in range(3):
        assert batches.peek_early(ahead, always=True) is batches.peek(ahead)
    assert batches.state_dict()["position"] == 0
    batches.finalize()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_grows_is_refused_at_the_end_of_an_epoch(num_workers: int) -> None:
    samples = list(range(8))
    batches = BatchIterator(samples, 4, num_workers=num_workers)
    try:
        next(batches)
        samples.append(8)
        with pytest.raises(ValueError, match=r"`dataset` must keep its number of samples \(8\).* has 9 now"):
            list(islice(batches, 4))
    finally:
        batches.finalize()
