"""Rare uses of Chainer, recorded for this project: what agrees, and what differs by a rule.

The files below ``recorded/chainer-edges`` have the form of the reference traces (see their README.md). They were
recorded in November 2026 with Python 3.8.18, chainer 7.8.1 and numpy 1.23.5 on a CPU, and chosen from some 5,000 random
cases: those in which lockstep differs from Chainer in a way that the reference traces do not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import test_hook_order
import test_loss_scaling
import test_lr_shifts
import test_optimizers
import test_parallel_updater
import test_triggers
import torch
from differences import for_replay, read_differences
from traces import RECORDED, Case, Tolerance, read

from lockstep.compat import chainer
from lockstep.optim.hooks import WeightDecay


def name(content: Mapping[str, Any]) -> str:
    return str(content.get("name", content.get("trigger", content.get("extension"))))


def recorded(file: str, num_cases: int, given: Sequence[str]) -> list[Case]:
    listed = for_replay(read_differences(), "core")
    return read(RECORDED, file, num_cases, given=given, key="cases", name=name, differences=listed)


@pytest.mark.parametrize("case", recorded("chainer-edges/optimizers.json", 2, test_optimizers.GIVEN))
def test_frozen_parameters_and_clipping(case: Case) -> None:
    test_optimizers.replay(case, test_optimizers.CLASSES)


@pytest.mark.parametrize("case", recorded("chainer-edges/loss_scaling.json", 1, test_loss_scaling.GIVEN))
def test_an_infinite_gradient_without_momentum(case: Case) -> None:
    test_loss_scaling.replay_loss_scaling(case, test_optimizers.CLASSES)


@pytest.mark.parametrize("case", recorded("chainer-edges/hook_order.json", 2, test_hook_order.GIVEN))
def test_several_skipped_updates(case: Case) -> None:
    test_hook_order.replay(case, test_optimizers.CLASSES)


@pytest.mark.parametrize("case", recorded("chainer-edges/parallel_updater.json", 1, test_parallel_updater.GIVEN))
def test_several_epochs_in_a_batch(case: Case) -> None:
    test_parallel_updater.replay(test_parallel_updater.Run(case))


@pytest.mark.parametrize("case", recorded("chainer-edges/lr_shifts.json", 4, test_lr_shifts.GIVEN))
def test_shifts_of_other_lengths(case: Case) -> None:
    test_lr_shifts.test_replay(case)


@pytest.mark.filterwarnings("ignore:.*was not observed at this check:UserWarning")
@pytest.mark.parametrize("case", recorded("chainer-edges/triggers.json", 8, test_triggers.GIVEN))
def test_limits_nan_and_rounded_positions(case: Case) -> None:
    test_triggers.test_replay(case)


@pytest.mark.parametrize("case", recorded("chainer-edges/update_rules.json", 2, ["optimizer"]))
def test_rates_and_hooks_of_single_parameters(case: Case) -> None:
    net = torch.nn.ParameterList(torch.tensor(each) for each in ([1.0, -2.0, 0.5], [3.0, 0.25], [-1.0]))
    optimizer = getattr(chainer, case["optimizer"])(lr=0.1, momentum=0.5).setup(net)
    optimizer.add_hook(WeightDecay(0.01))
    a, b, c = (parameter.update_rule for parameter in net)
    seen: list[tuple[float, bool]] = []
    b.hyperparam.lr = 0.5
    a.add_hook(WeightDecay(0.25), name="own")
    a.add_hook(lambda rule, parameter: seen.append((parameter[0].item(), rule is a)), name="post", timing="post")

    def change(update: int) -> None:
        if update == 2:
            optimizer.lr = 0.05
        elif update == 3:
            c.enabled = False
        elif update == 4:
            b.hyperparam.momentum = 0.75
        elif update == 5:
            c.enabled = True
            a.remove_hook("own")
        elif update == 6:
            optimizer.momentum, b.hyperparam.lr = 0.25, 0.125

    params = []
    for update in range(7):
        change(update)
        for index, parameter in enumerate(net):
            parameter.grad = (torch.arange(len(parameter)) + 1 - 0.5 * update + index) * 0.125
        optimizer.update()
        params.append([parameter.tolist() for parameter in net])
    rules = [a.hyperparam, b.hyperparam, c.hyperparam]
    assert all(is_own for _, is_own in seen)
    ours = {
        "params": params,
        "post_hook_saw": [value for value, _ in seen],
        "lr": [each.lr for each in rules],
        "momentum": [each.momentum for each in rules],
    }
    # The original scales by the rate in another order.
    case.check(ours, {"params.*": Tolerance(1e-6), "post_hook_saw.*": Tolerance(1e-6)})
