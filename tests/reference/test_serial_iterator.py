"""Chainer's SerialIterator: the same batches, bookkeeping, and questions to the order sampler."""

from __future__ import annotations

from collections.abc import Iterator

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


def nexts(batches: BatchIterator, count: int) -> list[dict[str, object]]:
    record = []
    for _ in range(count):
        try:
            result: dict[str, object] = {"batch": list(next(batches))}
        except StopIteration:
            result = {"batch": None, "raised": "StopIteration"}
        record.append(result | progress(batches))
    return record


def replay(case: Case) -> dict[str, object]:
    sampler = None if case["orders"] is None else RecordedOrders(case["orders"])

    def batches_of_case() -> BatchIterator:
        return BatchIterator(
            range(case["n"]), case["batch_size"], repeat=case["repeat"], order_sampler=sampler
        )

    try:
        batches = batches_of_case()
    except ValueError as error:
        return {"nexts": f"ValueError at construction: {error}"}
    ours: dict[str, object] = {}
    if "initial" in case:
        ours["initial"] = progress(batches)
    ours["nexts"] = nexts(batches, len(case["nexts"]))
    if "nexts_after_reset" in case:
        batches.reset()
        ours["after_reset"] = progress(batches)
        ours["nexts_after_reset"] = nexts(batches, len(case["nexts_after_reset"]))
    if "nexts_after_restore" in case:
        restored = batches_of_case()
        restored.load_state_dict(batches.state_dict())
        ours["restored"] = progress(restored)
        ours["nexts_after_restore"] = nexts(restored, len(case["nexts_after_restore"]))
    if "sampler_calls" in case:
        ours["sampler_calls"] = None if sampler is None else sampler.calls
    return ours


@pytest.mark.parametrize("case", cases("chainer-cunn/serial_iterator.json", num_cases=30, given=GIVEN))
def test_replay(case: Case) -> None:
    case.check(replay(case))
