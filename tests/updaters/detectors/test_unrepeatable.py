"""Kernels that give other bits in every call are warned of, once, with the cure."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.runs import Placement, finalized, updater_for
from tests.support.workloads import MLP


class Solving:
    """A loss that solves a least-squares problem, whose result it does not use."""

    def __init__(self, driver: str | None) -> None:
        self.driver = driver

    def __call__(self, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        torch.linalg.lstsq(torch.eye(3), torch.ones(3, 1), driver=self.driver)
        return nn.functional.cross_entropy(model(x), target)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize(("driver", "times"), [(None, 1), ("gelsy", 1), ("gels", 0), ("gelsd", 0)])
def test_least_squares_by_a_driver_that_is_not_repeatable(driver: str | None, times: int, num_devices: int) -> None:
    run = updater_for(MLP, Placement(num_devices), loss_fn=Solving(driver))
    with finalized(run) as updater, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            updater.update()
    found = [str(each.message) for each in caught if each.category is ls.DeterminismWarning]
    assert len(found) == times
    assert all("driver='gelsd'" in each for each in found)


def test_nothing_stays_registered() -> None:
    with finalized(updater_for(MLP, Placement(1))) as updater:
        updater.update()
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_lstsq", "BackendSelect")
    found = torch.linalg.lstsq(2 * torch.eye(3), torch.ones(3, 1)).solution
    assert torch.equal(found, torch.full((3, 1), 0.5))
