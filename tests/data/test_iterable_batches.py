"""Whatever somebody iterates over gets the bookkeeping of an iterator, and keeps its batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep as ls
from lockstep.data import BatchIterator, IterableBatches, Samples, as_iterator
from lockstep.errors import OrderError, ReplayWarning, StateError
from lockstep.extensions import Evaluator

BATCHES = [torch.arange(3), torch.arange(3, 6), torch.arange(6, 7)]


class Sized:
    """Can be iterated over again and again, and says how long it is, truly or not."""

    def __init__(self, batches: Sequence[Any], length: int | None = None) -> None:
        self.batches = batches
        self.length = len(batches) if length is None else length
        self.num_given = 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            self.num_given += 1
            yield batch


class Unsized:
    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class Shuffling:
    """Has another order in each epoch and says where it stands, as a StatefulDataLoader does."""

    def __init__(self, num_batches: int, *, sized: bool) -> None:
        self.num_batches = num_batches
        self.epoch = 0
        self.position = 0
        self.loaded = False
        if sized:
            self.__class__ = SizedShuffling

    def __iter__(self) -> Iterator[Any]:
        if not self.loaded:
            self.position = 0
        self.loaded = False
        while self.position < self.num_batches:
            self.position += 1
            yield torch.tensor([self.epoch * 7 % self.num_batches, self.position])
        self.epoch += 1
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.position, self.loaded = state["epoch"], state["position"], True


class SizedShuffling(Shuffling):
    def __len__(self) -> int:
        return self.num_batches


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(7))


def loader() -> DataLoader[Any]:
    return DataLoader(
        TensorDataset(torch.arange(7)), 3, collate_fn=lambda samples: torch.stack([x for (x,) in samples])
    )


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: list(BATCHES),
    "tuple": lambda: tuple(BATCHES),
    "sized": lambda: Sized(BATCHES),
    "unsized": lambda: Unsized(BATCHES),
    "generator function": lambda: lambda: (batch for batch in BATCHES),
    "DataLoader": loader,
    "DataLoader of a stream": lambda: DataLoader(Stream(), 3),
    "resumable": lambda: Shuffling(3, sized=False),
    "resumable and sized": lambda: Shuffling(3, sized=True),
}
ONE_SHOT: dict[str, Callable[[], Any]] = {
    "generator": lambda: (batch for batch in BATCHES),
    "iterator": lambda: iter(BATCHES),
    "iterator of a DataLoader": lambda: iter(loader()),
}
WITH_LENGTH = {"list", "tuple", "sized", "DataLoader", "resumable and sized"}
REPLAYING = {"sized", "unsized", "generator function", "DataLoader", "DataLoader of a stream"}


def progress(batches: IterableBatches) -> tuple[object, ...]:
    return batches.epoch, batches.epoch_detail, batches.previous_epoch_detail, batches.is_new_epoch


def steps(batches: IterableBatches, count: int) -> list[tuple[object, ...]]:
    """Take batches, fewer where they end, and note where each led to."""
    return [(batch.tolist(), *progress(batches)) for batch in islice(batches, count)]


@pytest.mark.parametrize("kind", SOURCES)
def test_the_table_of_an_epochs_bookkeeping(kind: str) -> None:
    third = (lambda n: n / 3) if kind in WITH_LENGTH else (lambda n: float(n // 3))
    batches = IterableBatches(SOURCES[kind]())
    assert progress(batches) == (0, 0.0, None, False)
    for passed in range(1, 11):
        batch = next(batches)
        if "resumable" not in kind:
            assert torch.equal(batch, BATCHES[(passed - 1) % 3])
        assert batches.epoch == passed // 3
        assert batches.epoch_detail == pytest.approx(third(passed), abs=1e-15)  # a sum of two roundings
        assert batches.previous_epoch_detail == pytest.approx(third(passed - 1), abs=1e-15)
        assert batches.is_new_epoch is (passed % 3 == 0)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [*SOURCES, *ONE_SHOT])
@pytest.mark.parametrize("cut", range(5))
@pytest.mark.parametrize("looked_at", [0, 1, 2])
def test_the_table_again_with_a_save_and_load_in_the_middle(kind: str, cut: int, looked_at: int) -> None:
    make = (SOURCES | ONE_SHOT)[kind]
    undisturbed, first, second = (IterableBatches(make()) for _ in range(3))
    expected = steps(undisturbed, 9)
    before = steps(first, cut)
    with suppress(StopIteration):
        first.peek(looked_at)
    state = first.state_dict()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        second.load_state_dict(state)
        assert progress(second) == progress(first)
        assert second.state_dict() == state
        assert before + steps(second, 9 - cut) == expected
        assert before + steps(first, 9 - cut) == expected
    replays = state["position"] > 0 and (kind in REPLAYING or kind in ONE_SHOT)
    assert [warning.category for warning in caught] == [ReplayWarning] * replays


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_that_shuffles_is_warned_of_between_epochs_too(shuffle: bool) -> None:
    first, second = (IterableBatches(DataLoader(list(range(6)), 2, shuffle=shuffle)) for _ in range(2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps(first, 3)
        assert first.state_dict()["position"] == 0
        second.load_state_dict(first.state_dict())
        steps(first, 6)
        assert caught == []
        # Once, and not in the epochs that follow.
        steps(second, 6)
    assert [each.category for each in caught] == [ReplayWarning] * shuffle
    assert all("epoch 1 begins anew" in str(each.message) for each in caught)


@pytest.mark.parametrize("kind", ONE_SHOT)
def test_an_iterator_has_one_epoch(kind: str) -> None:
    batches = IterableBatches(ONE_SHOT[kind]())
    assert batches.repeat is False
    assert [step[0] for step in steps(batches, 5)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert progress(batches) == (1, 1.0, 1.0, True)
    with pytest.raises(StopIteration):
        batches.peek()


@pytest.mark.parametrize("kind", SOURCES)
def test_what_can_be_repeated_need_not_be(kind: str) -> None:
    batches = IterableBatches(SOURCES[kind](), repeat=False)
    assert len(list(batches)) == 3
    assert progress(batches) == (1, 1.0, 1.0, True)
    batches.reset()
    assert progress(batches) == (0, 0.0, None, False)
    assert len(list(batches)) == 3


@given(
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 4)), max_size=8),
)
def test_looking_ahead_and_passing_several_changes_nothing(
    length: int, sized: bool, repeat: bool, moves: list[tuple[int, int]]
) -> None:
    data = [torch.tensor([index]) for index in range(length)]

    def make() -> IterableBatches:
        return IterableBatches(Sized(data) if sized else Unsized(data), repeat=repeat)

    looking, plain = make(), make()
    for ahead, count in moves:
        before = progress(looking), looking.state_dict()
        with suppress(StopIteration):
            looking.peek(ahead)
        assert (progress(looking), looking.state_dict()) == before
        start = plain.epoch_detail, plain.epoch
        passed = steps(plain, count)
        if len(passed) < count:
            with pytest.raises(StopIteration):
                looking.advance(count)
            assert (progress(looking), looking.state_dict()) == before
            return
        looking.advance(count)
        assert looking.epoch_detail == plain.epoch_detail
        assert looking.previous_epoch_detail == start[0]
        assert looking.is_new_epoch is (plain.epoch > start[1])


def test_with_a_length_nothing_is_asked_for_ahead_of_its_use() -> None:
    source = Sized(BATCHES)
    batches = IterableBatches(source)
    assert source.num_given == 0
    for count in (1, 2, 3, 4):
        next(batches)
        assert source.num_given == count


def test_samples_go_through_the_converter() -> None:
    lists: list[Any] = [[(torch.tensor([1.0]), 2)], ((torch.tensor([0.0]), 3), (torch.tensor([2.0]), 1))]
    batches = IterableBatches(lists, batches_of="samples")
    first, second = batches.peek(), batches.peek(1)
    assert isinstance(first, Samples)
    assert list(first) == lists[0]
    x, y = ls.collate(second[0:2])
    assert (x.tolist(), y.tolist()) == ([[0.0], [2.0]], [3, 1])


def test_a_batch_that_is_no_list_of_samples_stays_the_next() -> None:
    batches = IterableBatches([torch.zeros(2)], batches_of="samples")
    for _ in range(2):
        with pytest.raises(TypeError, match="`source` must yield lists of samples, got a Tensor"):
            next(batches)
    assert progress(batches) == (0, 0.0, None, False)


class Flaky:
    """Raises once at each of some batches."""

    def __init__(self, *bad: int) -> None:
        self.bad = set(bad)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index, batch in enumerate(BATCHES):
            if index in self.bad:
                self.bad.remove(index)
                raise OSError(f"batch {index} is out of reach")
            yield batch


@pytest.mark.filterwarnings("ignore::lockstep.errors.ReplayWarning")
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_an_error_leaves_the_iterator_where_it_was(bad: int) -> None:
    batches, found = IterableBatches(Flaky(bad)), []
    num_errors = 0
    while len(found) < 4:
        before = progress(batches)
        try:
            found.append(next(batches).tolist())
        except OSError:
            num_errors += 1
            assert progress(batches) == before
    assert found == [[0, 1, 2], [3, 4, 5], [6], [0, 1, 2]]
    assert num_errors == 1


def test_an_error_of_an_iterator_is_no_quiet_end() -> None:
    batches = IterableBatches(iter(Flaky(2)))
    assert batches.epoch == 0
    next(batches)
    next(batches)
    assert batches.epoch == 0
    with pytest.raises(OSError, match="batch 2"):
        next(batches)
    with pytest.raises(OrderError, match="`source` raised an error, and an iterator cannot be restarted"):
        next(batches)
    assert batches.epoch == 0


@pytest.mark.parametrize("kind", ONE_SHOT)
def test_an_iterator_does_not_go_back(kind: str) -> None:
    batches = IterableBatches(ONE_SHOT[kind]())
    batches.reset()
    batches.peek()
    batches.reset()
    state = batches.state_dict()
    next(batches)
    after = batches.state_dict()
    with pytest.raises(OrderError, match="`reset` must not follow a batch if `source` is an iterator"):
        batches.reset()
    with pytest.raises(StateError, match="`source` is an iterator that has been started"):
        batches.load_state_dict(state)
    batches.load_state_dict(after)
    assert batches.state_dict() == after
    assert [step[0] for step in steps(batches, 5)] == [[3, 4, 5], [6]]


@pytest.mark.parametrize("kind", [*SOURCES, *ONE_SHOT])
@pytest.mark.parametrize("passed", range(5))
def test_after_finalize_it_goes_on(kind: str, passed: int) -> None:
    make = (SOURCES | ONE_SHOT)[kind]
    batches, undisturbed = IterableBatches(make()), IterableBatches(make())
    before = steps(batches, passed)
    batches.finalize()
    batches.finalize()
    assert before + steps(batches, 7 - passed) == steps(undisturbed, 7)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Sized(BATCHES, 4), r"`source` must hold as many batches .* `len\(\)` \(4\), got 3\."),
        (Sized(BATCHES, 2), r"`source` must hold as many batches .* `len\(\)` \(2\), got more\."),
        (Unsized([]), "`source` must hold at least 1 batches in epoch 0, got 0"),
        (lambda: iter(()), "`source` must hold at least 1 batches in epoch 0, got 0"),
    ],
)
def test_a_source_that_breaks_its_promise_is_refused(source: Any, message: str) -> None:
    batches = IterableBatches(source)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReplayWarning)
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                list(zip(range(9), batches, strict=False))
    assert batches.epoch == 0


def test_a_source_that_cannot_be_iterated_over_again_although_it_seems_so() -> None:
    batches = IterableBatches(Unsized(iter(BATCHES)))  # type: ignore[arg-type]  # that it is no sequence is the point
    steps(batches, 3)
    with pytest.raises(ValueError, match="at least 1 batches in epoch 1, got 0"):
        next(batches)


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (torch.zeros(3), {}, TypeError, "`source` must be a lockstep Iterator, .*, got a Tensor"),
        (TensorDataset(torch.zeros(3)), {}, TypeError, "got a TensorDataset. `BatchIterator` makes"),
        ({"x": 1}, {}, TypeError, "got a dict"),
        ("batches", {}, TypeError, "got a str"),
        (nn.Sequential(), {}, TypeError, "got a Sequential"),
        (Unsized, {}, TypeError, "got a type"),
        (3, {}, TypeError, "got a int"),
        (BatchIterator("abc", 2), {}, TypeError, "must not be a lockstep Iterator, .*, got a BatchIterator"),
        ([], {}, ValueError, "`source` must hold at least one batch, got none"),
        (iter(BATCHES), {"repeat": True}, ValueError, "`repeat` must be None or False if"),
        (BATCHES, {"batches_of": "rows"}, ValueError, "must be 'tensors' or 'samples', got 'rows'"),
    ],
)
def test_bad_arguments_are_refused(source: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        IterableBatches(source, **options)


@pytest.mark.parametrize("call", [lambda it: it.peek(-1), lambda it: it.advance(0)])
def test_bad_counts_are_refused(call: Any) -> None:
    with pytest.raises(ValueError, match="must be at least"):
        call(IterableBatches(BATCHES))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown: 'extra'"),
        ({"epoch": -1}, "`epoch` must be an integer of at least 0, got -1"),
        ({"position": 1.0}, "`position` must be an integer of at least 0, got 1.0"),
        ({"position": 3}, r"`position` must lie in 0\.\.2, because `source` holds 3 batches, got 3"),
        ({"previous_epoch_detail": 0}, "`previous_epoch_detail` must be a float or None, got 0"),
        ({"is_new_epoch": 0}, "`is_new_epoch` must be a bool, got 0"),
        ({"source": {"position": 1}}, "`source` must have `load_state_dict`"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    batches = IterableBatches(Sized(BATCHES))
    state = batches.state_dict()
    next(batches)
    before = batches.state_dict()
    with pytest.raises(StateError, match=message):
        batches.load_state_dict(state | change)
    assert batches.state_dict() == before


def test_an_iterator_stays_and_an_iterable_is_adapted() -> None:
    own = BatchIterator("abc", 2)
    assert as_iterator(own) is own
    adapted = as_iterator(BATCHES)
    assert isinstance(adapted, IterableBatches)
    assert adapted.batches_of == "tensors"
    with pytest.raises(TypeError, match=r"`iterator\['main'\]` must be a lockstep Iterator, .*, got a int"):
        as_iterator(3, name="iterator['main']")  # type: ignore[arg-type]  # that it is refused is the point


X = torch.arange(14.0).reshape(7, 2).sin()
Y = torch.arange(7.0).cos()


def train(batches: Any, *, devices: int = 1, updates: int = 7, accumulate: int = 1) -> tuple[str, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1), nn.Flatten(0))
    updater = ls.ParallelUpdater(
        batches,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        model,
        devices=["cpu"] * devices,
        num_shards=2,
        accumulate=accumulate,
        loss_fn=ls.supervised(nn.functional.mse_loss),
    )
    try:
        for _ in range(updates):
            assert updater.update().applied
        return ls.digest(model), updater.epoch_detail
    finally:
        updater.finalize()


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("devices", [1, 2])
def test_an_updater_takes_anything(devices: int, accumulate: int) -> None:
    data = TensorDataset(X, Y)
    kinds: list[Iterable[Any] | Callable[[], Any]] = [
        BatchIterator(data, 3, last_batch="short"),
        DataLoader(data, 3),
        [(X[:3], Y[:3]), (X[3:6], Y[3:6]), (X[6:], Y[6:])],
        lambda: zip(X.split(3), Y.split(3), strict=True),
        IterableBatches(DataLoader(data, 3, collate_fn=list), batches_of="samples"),
    ]
    found = [train(kind, devices=devices, accumulate=accumulate) for kind in kinds]
    assert len({digest for digest, _ in found}) == 1
    assert [int(detail + 1e-9) for _, detail in found] == [7 * accumulate // 3] * 5


def test_an_updater_refuses_what_holds_no_batches() -> None:
    with pytest.raises(TypeError, match=r"`iterator` must be a lockstep Iterator, .*, got a TensorDataset"):
        train(TensorDataset(X, Y))


def test_an_evaluator_takes_them_too() -> None:
    data = TensorDataset(X, Y)
    model = nn.Sequential(nn.Linear(2, 1), nn.Flatten(0))
    loss_fn = ls.supervised(nn.functional.mse_loss)
    found = {
        float(Evaluator(source, loss_fn=loss_fn, model=model, converter=converter).evaluate()["loss"])  # type: ignore[arg-type]  # a number
        for source, converter in [
            (DataLoader(data, 3), None),
            (IterableBatches(DataLoader(data, 3), repeat=False), None),
            (IterableBatches(lambda: zip(X.split(3), Y.split(3), strict=True), repeat=False), None),
            (BatchIterator(data, 3, repeat=False), ls.collate),
            (
                IterableBatches(DataLoader(data, 3, collate_fn=list), batches_of="samples", repeat=False),
                ls.collate,
            ),
        ]
    }
    assert len(found) == 1
    with pytest.raises(ValueError, match="`iterator` must end after one pass"):
        Evaluator(IterableBatches(DataLoader(data, 3)), loss_fn=loss_fn)


# Batches that are read before their update -----------------------------------------------------------------


def test_nothing_is_read_early_that_no_worker_loads_in_advance() -> None:
    read: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(4):
            read.append(number)
            yield torch.full((1,), number)

    source = IterableBatches(batches)
    source.peek()
    assert source.peek_early(1) is None
    assert read == [0]
    assert source.peek_early(1, always=True) == 1
    assert source.peek(1) == 1
    assert source.peek_early(0) == 0
    assert source.state_dict()["position"] == 0


def test_an_epoch_of_an_iterable_starts_when_its_first_batch_is_used() -> None:
    started: list[int] = []

    def batches() -> Iterator[torch.Tensor]:
        started.append(len(started))
        yield from (torch.zeros(1), torch.ones(1))

    source = IterableBatches(batches)
    source.peek(1)
    assert source.peek_early(2, always=True) is None
    source.advance(2)
    assert source.peek_early(0, always=True) is None
    assert started == [0]
    source.peek()
    assert started == [0, 1]


def test_an_error_of_reading_early_is_raised_once_where_the_batch_is_used() -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        yield torch.zeros(1)
        raise ValueError("no third batch")

    source = IterableBatches(batches())
    source.peek(1)
    assert source.peek_early(2, always=True) is None
    assert source.peek() == 0
    with pytest.raises(ValueError, match="no third batch"):
        source.peek(2)
    with pytest.raises(ls.OrderError, match="cannot be restarted"):
        source.peek(2)


def test_a_list_of_samples_is_the_same_object_every_time() -> None:
    source = IterableBatches([[1, 2], [3]], batches_of="samples")
    assert source.peek() is source.peek()


def test_a_stream_may_read_what_the_last_update_has_left_and_fill_one_tensor_again() -> None:
    weights, filled, seen = [0], torch.zeros(1), []

    def stream() -> Iterator[torch.Tensor]:
        while True:
            yield filled.fill_(weights[0])

    source = IterableBatches(stream)
    for update in range(1, 5):
        seen.append(source.peek().item())
        weights[0] = update
        source.advance()
        assert not (source.is_new_epoch if update % 2 else source.epoch)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("asks", [True, False])
def test_the_end_of_an_epoch_shows_when_it_is_asked_for(*, asks: bool) -> None:
    source = IterableBatches(lambda: iter([torch.zeros(1), torch.ones(1)]))
    found = []
    for _ in range(4):
        source.advance()
        if asks:
            found.append(source.is_new_epoch)
    assert found == [False, True] * 2 * asks
    assert (source.epoch, source.is_new_epoch, source.state_dict()["position"]) == (2, True, 0)


def test_a_state_that_was_saved_where_the_source_failed_goes_on_at_the_end_of_the_epoch() -> None:
    fails = True

    def batches() -> Iterator[torch.Tensor]:
        yield torch.zeros(1)
        yield torch.ones(1)
        if fails:
            raise OSError("lost")

    source = IterableBatches(batches)
    source.advance(2)
    assert not source.is_new_epoch
    state = source.state_dict()
    fails = False
    resumed = IterableBatches(batches)
    resumed.load_state_dict(state)
    with pytest.warns(ls.ReplayWarning):
        assert resumed.peek() == 0
    assert (resumed.epoch, resumed.is_new_epoch) == (1, True)
    with pytest.raises(OSError, match="lost"):
        source.peek()
    with pytest.warns(ls.ReplayWarning):
        assert source.peek() == 0
