"""Parts of an optimizer, stepped in threads of their own."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lockstep.compat.nnabla import LAMB, SGDW
from lockstep.optim import CorrectedMomentumSGD, HookedOptimizer, MomentumSGD
from tests.support.optimizers import bits, parameters, put_cut_grads


def in_threads(calls: list[Any]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (CorrectedMomentumSGD, {}),
        (MomentumSGD, {}),
        (SGDW, {"weight_decay": 0.1}),
        (LAMB, {"weight_decay": 0.1}),
    ],
)
def test_parts_in_threads_advance_to_the_same_bits(cls: type[HookedOptimizer], options: dict[str, float]) -> None:
    whole, parted = parameters(), parameters()
    alone, optimizer = (cls(each, missing_grad="zero", **options) for each in (whole, parted))
    cuts = [slice(0, 2), slice(2, 3), slice(3, 5)]
    for step in range(5):
        alone.lr = optimizer.lr = 0.1 / (1 + step)
        put_cut_grads(whole, step, missing=(step,))
        put_cut_grads(parted, step, missing=(step,))
        alone.step()
        group = optimizer.param_groups[0]
        parts = [optimizer.part([{**group, "params": group["params"][cut]}]) for cut in cuts]
        optimizer.step(advance=lambda parts=parts: in_threads([part.advance for part in parts]))
    assert bits(whole) == bits(parted)
    assert optimizer.t == alone.t == 5
    saved, other = optimizer.state_dict(), alone.state_dict()
    assert list(saved["state"]) == list(other["state"]) == [0, 1, 2, 3, 4]
