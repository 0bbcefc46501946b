"""Chainer's SerialIterator: the same batches, bookkeeping, and questions to the order sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from traces import Case, cases

from lockstep.data import BatchIterator

GIVEN = ["n", "batch_size", "repeat", "orders", "saved"]


class RecordedOrders:
    """An order sampler that returns recorded orders one after the other, and records what it is asked."""

    def __init__(self, orders: list[list[int]]) -> None:
        self.calls: list[list[object]] = []
        self._orders: Iterator[list[int]] = iter(orders)

    def __call__(self, order: list[int], position: int) -> list[int]:
        self.calls.append([order, position])
        return next(self._orders)


def progress(batches: BatchIterator) -> dict[str, object]:
    return {
        "epoch": batches.epoch,
        "is_new_epoch": batches.is_new_epoch,
        "epoch_detail": batches.epoch_detail,
        "previous_epoch_detail": batches.previous_epoch_detail,
        "current_position": batches.current_position,
    }


class Moved:
    """Takes a recorder over to a restored iterator, whose first order comes out of its state instead."""

    def __init__(self, orders: RecordedOrders) -> None:
        self._orders = orders
        self._first = True

    def __call__(self, order: list[int], position: int) -> list[int]:
        if self._first:
            self._first = False
            return order
        return self._orders(order, position)


Save = Callable[[BatchIterator], BatchIterator]


def nexts(batches: BatchIterator, count: int, save: Save) -> tuple[list[dict[str, object]], BatchIterator]:
    """Take batches; give the record, and the iterator that stands behind them."""
    record = []
    for _ in range(count):
        batches = save(batches)
        try:
            result: dict[str, object] = {"batch": list(next(batches))}
        except StopIteration:
            result = {"batch": None, "raised": "StopIteration"}
        record.append(result | progress(batches))
    return record, batches


def replay(case: Case, *, interrupted: bool) -> dict[str, object]:
    sampler = None if case["orders"] is None else RecordedOrders(case["orders"])

    def batches_of_case(order_sampler: Any = sampler) -> BatchIterator:
        return BatchIterator(
            range(case["n"]), case["batch_size"], repeat=case["repeat"], order_sampler=order_sampler, last_batch="wrap"
        )

    def save(batches: BatchIterator) -> BatchIterator:
        """Where the replay is interrupted, go on with another iterator that loads this one's state."""
        if not interrupted:
            return batches
        other = batches_of_case(None if sampler is None else Moved(sampler))
        other.load_state_dict(batches.state_dict())
        return other

    try:
        batches = batches_of_case()
    except ValueError as error:
        return {"nexts": f"ValueError at construction: {error}"}
    ours: dict[str, object] = {}
    if "initial" in case:
        ours["initial"] = progress(batches)
    ours["nexts"], batches = nexts(batches, len(case["nexts"]), save)
    if "nexts_after_reset" in case:
        batches.reset()
        ours["after_reset"] = progress(batches)
        ours["nexts_after_reset"], batches = nexts(batches, len(case["nexts_after_reset"]), save)
    if "nexts_after_restore" in case:
        restored = batches_of_case()
        restored.load_state_dict(batches.state_dict())
        ours["restored"] = progress(restored)
        ours["nexts_after_restore"], _ = nexts(restored, len(case["nexts_after_restore"]), save)
    if "sampler_calls" in case:
        ours["sampler_calls"] = None if sampler is None else sampler.calls
    return ours


CASES = cases("chainer-cunn/serial_iterator.json", num_cases=30, given=GIVEN)


@pytest.mark.parametrize("case", CASES)
def test_replay(case: Case) -> None:
    case.check(replay(case, interrupted=False))


@pytest.mark.parametrize("case", CASES)
def test_replay_with_a_save_and_load_before_every_batch(case: Case) -> None:
    case.check(replay(case, interrupted=True))
