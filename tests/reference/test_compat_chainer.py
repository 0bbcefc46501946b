"""Chainer's traces once more, through Chainer's own names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_hook_order
import test_loss_scaling
import test_optimizers
import test_parallel_updater
import test_refused_calls
import torch
from torch import nn
from traces import Case, cases, each_word

import lockstep as ls
from lockstep.compat import chainer


def through_setup(kind: Callable[..., chainer.GradientMethod]) -> Callable[..., chainer.GradientMethod]:
    """Give an optimizer its parameters in Chainer's way, and then each a group of its own.

    A group stands for what Chainer calls an update rule: options and hooks of one parameter.
    """

    def build(
        groups: list[dict[str, Any]], lr: float = 0.01, momentum: float = 0.9, missing_grad: str = ""
    ) -> chainer.GradientMethod:
        assert missing_grad == "zero", "Chainer knows no other"
        optimizer = kind(lr, momentum)
        optimizer.setup(nn.ParameterList([each for group in groups for each in group["params"]]))
        options = optimizer.param_groups.pop()
        for group in groups:
            optimizer.add_param_group({**options, **group})
        return optimizer

    return build


KINDS = {"MomentumSGD": chainer.MomentumSGD, "CorrectedMomentumSGD": chainer.CorrectedMomentumSGD}
CLASSES = {name: through_setup(kind) for name, kind in KINDS.items()}


def again(file: str, num_cases: int, given: list[str]) -> list[Any]:
    return each_word(cases(f"chainer-cunn/{file}", num_cases, given=given, through="compat"))


@pytest.mark.parametrize("case", again("optimizers.json", 30, test_optimizers.GIVEN))
def test_optimizers_through_setup(case: Case) -> None:
    test_optimizers.replay(case, CLASSES)


@pytest.mark.parametrize("case", again("hook_order.json", 4, test_hook_order.GIVEN))
def test_the_order_of_hooks(case: Case) -> None:
    test_hook_order.replay(case, CLASSES)


@pytest.mark.parametrize("case", again("loss_scaling.json", 30, test_loss_scaling.GIVEN))
def test_loss_scaling_through_setup(case: Case) -> None:
    test_loss_scaling.replay_loss_scaling(case, CLASSES, by_setting=True)


@pytest.mark.parametrize("case", again("fp32_update.json", 13, test_loss_scaling.FP32_GIVEN))
def test_fp32_update_through_setup(case: Case) -> None:
    test_loss_scaling.replay_fp32_update(case, CLASSES)


class Run(test_parallel_updater.Run):
    """One case through Chainer's updater; on one device it stands in for the standard one."""

    def make_optimizer(self) -> chainer.GradientMethod:
        kind = KINDS[self.case["optimizer"]]
        return kind(lr=self.case["lr"], momentum=self.case["momentum"]).setup(self.model)

    def build(self) -> ls.ParallelUpdater:
        return chainer.ParallelUpdater(
            self.batches(),
            self.optimizer,
            converter=self.convert,
            devices=self.places(),
            loss_func=self.loss,
            loss_scale=self.case["loss_scale"],
        )


@pytest.mark.parametrize("case", again("parallel_updater.json", 27, test_parallel_updater.GIVEN))
def test_parallel_updater_by_its_own_arguments(case: Case) -> None:
    test_parallel_updater.replay(Run(case))


def optimizer() -> chainer.MomentumSGD:
    return chainer.MomentumSGD().setup(nn.Linear(1, 1))


def updater(**options: Any) -> None:
    chainer.ParallelUpdater([torch.ones(1, 1)], options.pop("optimizer", optimizer()), **options)


def calls(out: Path) -> test_refused_calls.Calls:
    """Give the refused calls by Chainer's own names, and those that have none here by the core's."""
    ours = {
        "add_hook before setup": lambda: chainer.MomentumSGD().add_hook(print),
        "add_hook(1)": lambda: optimizer().add_hook(1),
        'add_hook(timing="never")': lambda: optimizer().add_hook(print, timing="never"),
        "remove_hook(unknown)": lambda: optimizer().remove_hook("nope"),
        "setup(not a link)": lambda: chainer.MomentumSGD().setup(1),
        "loss_scaling(interval=0)": lambda: optimizer().loss_scaling(interval=0),
        "loss_scaling(scale=0)": lambda: optimizer().loss_scaling(scale=0),
        "loss_scaling(scale=-1)": lambda: optimizer().loss_scaling(scale=-1),
        "set_loss_scale(-2)": lambda: optimizer().set_loss_scale(-2),
        "new_epoch(auto=True) without the flag": lambda: optimizer().new_epoch(auto=True),
        "ParallelUpdater(models=None, devices=None)": updater,
        "ParallelUpdater(devices without main)": lambda: updater(devices={"a": "cpu", "b": "cpu"}),
        "ParallelUpdater(dict of optimizers, models=None)": lambda: updater(
            optimizer={"main": optimizer()}, devices={"main": "cpu"}
        ),
        "concat_examples([])": lambda: chainer.concat_examples([]),
    }
    theirs = test_refused_calls.calls(out)
    assert ours.keys() - theirs.keys() == {"add_hook before setup"}
    return {**theirs, **ours}


@pytest.mark.parametrize("case", test_refused_calls.refused("compat"))
def test_what_the_original_refuses(case: Case, tmp_path: Path) -> None:
    test_refused_calls.replay(case, calls(tmp_path), [])
