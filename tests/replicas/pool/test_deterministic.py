"""Deterministic kernels are chosen by one call, missed with one warning, and named where an operation has none."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.replicas.pool.deterministic import NOTICE, missing_settings, warn_of_kernels
from tests.support.runs import cross_entropy, finalized
from tests.support.workloads import MLP

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def unset() -> Iterator[None]:
    """Start without the variable and the notice, and check that no setting is left changed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)
        patch.setattr(NOTICE, "settled", False)
        before = settings()[:3]
        yield
        assert settings()[:3] == before


def settings() -> tuple[object, ...]:
    return (
        torch.get_deterministic_debug_mode(),
        torch.backends.cudnn.benchmark,
        os.environ.get(VARIABLE),
        NOTICE.settled,
    )


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(True, (2, False, ":4096:8", False)), ("warn", (1, False, ":4096:8", False)), (False, (0, True, None, True))],
)
def test_a_mode_sets_what_it_needs_and_restores_it(mode: Any, expected: tuple[object, ...]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", True)
        before = settings()
        with ls.use_deterministic_kernels(mode):
            assert settings() == expected
            with ls.use_deterministic_kernels("warn"):
                assert settings()[0] == 1
            assert settings() == expected
        assert settings() == before


def test_a_call_on_its_own_stays_in_effect() -> None:
    restore = ls.use_deterministic_kernels()
    assert settings() == (2, False, ":4096:8", False)
    with restore:
        pass


def test_the_other_workspace_is_kept() -> None:
    os.environ[VARIABLE] = ":16:8"
    with ls.use_deterministic_kernels():
        assert os.environ[VARIABLE] == ":16:8"
    del os.environ[VARIABLE]


def test_what_cannot_be_right_is_refused_before_anything_changes() -> None:
    with pytest.raises(ValueError, match="`mode` must be True, False or 'warn', got 'fast'"):
        ls.use_deterministic_kernels("fast")  # type: ignore[arg-type]
    os.environ[VARIABLE] = ":0:0"
    before = settings()
    with pytest.raises(ValueError, match=r"CUBLAS_WORKSPACE_CONFIG is ':0:0', got True. Set the variable to ':4096:8'"):
        ls.use_deterministic_kernels()
    assert settings() == before
    del os.environ[VARIABLE]


def test_what_is_missing_is_named_once() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "benchmark", True)
        assert missing_settings({}) == [
            "torch.use_deterministic_algorithms(True)",
            "CUBLAS_WORKSPACE_CONFIG=:4096:8",
            "torch.backends.cudnn.benchmark = False",
        ]
    with pytest.warns(ls.DeterminismWarning, match=r"\(True\), CUBLAS_WORKSPACE_CONFIG=:4096:8\. Call lock"):
        warn_of_kernels({VARIABLE: ":0:0"})
    warn_of_kernels({})


def test_nothing_is_missing_after_the_call_and_nothing_is_said_to_those_who_prefer_speed() -> None:
    with ls.use_deterministic_kernels():
        assert missing_settings(os.environ) == []
        warn_of_kernels(os.environ)
    with ls.use_deterministic_kernels(False):
        warn_of_kernels({})
    with pytest.warns(ls.DeterminismWarning):
        warn_of_kernels({})


class Putting(nn.Module):
    """A model with an operation that has no deterministic kernel, on CPUs neither."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.net = MLP.model()
        self.where = where

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return Put.apply(self.net(inputs), self.where)


class Put(torch.autograd.Function):
    """Return the input after an operation without a deterministic kernel, in forward or in backward."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        if where == "forward":
            torch.zeros(2).put_(torch.tensor([1]), torch.ones(1))
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.where == "backward":
            torch.zeros(2).put_(torch.tensor([1]), torch.ones(1))
        return gradient, None


def updater_of(model: nn.Module, **options: Any) -> ls.ParallelUpdater:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_fn": cross_entropy} | options
    return ls.ParallelUpdater(
        ls.BatchIterator(MLP.data(8), 8), optimizer, model, devices=["cpu", "cpu"], num_shards=2, **options
    )


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_operation_without_a_deterministic_kernel_is_named_with_its_shard(where: str) -> None:
    with finalized(updater_of(Putting(where))) as updater:
        with (
            ls.use_deterministic_kernels(),
            pytest.raises(
                ls.ReplicaError,
                match=rf"The {where} of shard 0 .* on cpu \(device 0 of 0..1\): put_ does not have a deterministic.*"
                r"use_deterministic_kernels\('warn'\) runs this operation",
            ) as caught,
        ):
            updater.update()
        assert (caught.value.shard, updater.iteration) == (0, 0)
        with (
            ls.use_deterministic_kernels("warn"),
            pytest.warns(UserWarning, match="put_ does not have a deterministic"),
        ):
            updater.update()
        with ls.use_deterministic_kernels(False), warnings.catch_warnings():
            warnings.simplefilter("error")
            updater.update()


def test_an_error_that_an_accelerator_reports_late_says_so() -> None:
    def failing(*_: object) -> torch.Tensor:
        raise torch.AcceleratorError("device-side assert triggered")

    with (
        finalized(updater_of(MLP.model(), loss_fn=failing)) as updater,
        pytest.raises(ls.ReplicaError, match=r"assert triggered An accelerator reports .* CUDA_LAUNCH_BLOCKING=1"),
    ):
        updater.update()


def test_cublas_without_its_variable_is_told_the_cure() -> None:
    def failing(*_: object) -> torch.Tensor:
        raise RuntimeError("this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2.")

    with (
        finalized(updater_of(MLP.model(), loss_fn=failing)) as updater,
        pytest.raises(ls.ReplicaError, match=r"CUDA >= 10.2\. Or call lockstep\.use_det"),
    ):
        updater.update()
