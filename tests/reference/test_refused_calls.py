"""What Chainer refuses is refused here too, by the same kind of error unless listed as a difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.plain_updaters import CountingUpdater
from torch import nn
from torch.utils.data import TensorDataset
from traces import Case, cases

import lockstep as ls
from lockstep import triggers
from lockstep.compat import chainer
from lockstep.optim import schedule

TRACE = "chainer-cunn/trainer.json"


def optimizer() -> ls.MomentumSGD:
    return ls.MomentumSGD(nn.Linear(1, 1).parameters())


def named(name: str) -> Callable[[Any], None]:
    def hook(_: Any) -> None:
        return None

    hook.__name__ = name
    return hook


class Nameless:
    """A hook that says no name."""

    def __call__(self, _: Any) -> None:
        return None


def hooked_twice(timing: str = "auto") -> None:
    twice = optimizer()
    twice.add_hook(named("x"), name="x")
    twice.add_hook(named("x"), name="x", timing=timing)


def owned() -> None:
    counting = optimizer()
    counting.use_auto_new_epoch = True
    counting.new_epoch()


def updater(**options: Any) -> None:
    model = nn.Linear(1, 1)
    ls.ParallelUpdater([torch.ones(1, 1)], torch.optim.SGD(model.parameters()), **{"model": model, **options})


def run_again(out: Path) -> None:
    trainer = ls.Trainer(CountingUpdater(), (1, "iteration"), out)
    trainer.run()
    trainer.run()


Calls = dict[str, Callable[[], object]]


def calls(out: Path) -> Calls:
    """Give the same calls in our words; those of the original that have no like are left out."""
    trainer = ls.Trainer(CountingUpdater(), (1, "iteration"), out)
    data = TensorDataset(torch.ones(2))
    return {
        "add_hook(1)": lambda: optimizer().add_hook(1),
        'add_hook(timing="never")': lambda: optimizer().add_hook(named("x"), timing="never"),
        "add_hook(object without a name)": lambda: optimizer().add_hook(Nameless()),
        "add_hook(same name twice)": hooked_twice,
        "add_hook(same name, other timing)": lambda: hooked_twice("post"),
        "remove_hook(unknown)": lambda: optimizer().remove_hook("nope"),
        "setup(not a link)": lambda: updater(model=1),
        "loss_scaling(interval=0)": lambda: optimizer().loss_scaling(interval=0),
        "loss_scaling(scale=0)": lambda: optimizer().loss_scaling(scale=0),
        "loss_scaling(scale=-1)": lambda: optimizer().loss_scaling(scale=-1),
        "set_loss_scale(-2)": lambda: optimizer().set_loss_scale(-2),
        "new_epoch(auto=True) without the flag": lambda: optimizer().new_epoch(auto=True),
        "new_epoch() with the flag": owned,
        "ParallelUpdater(models=None, devices=None)": lambda: updater(model=None, devices=[]),
        "ParallelUpdater(devices without main)": lambda: chainer.ParallelUpdater(
            [torch.ones(1, 1)], optimizer(), devices={"a": "cpu", "b": "cpu"}
        ),
        "ParallelUpdater(dict of optimizers, models=None)": lambda: updater(model=None),
        "SerialIterator(shuffle=True, order_sampler=...)": lambda: ls.BatchIterator(
            data, 1, shuffle=True, order_sampler=lambda order, _: order
        ),
        "concat_examples([])": lambda: ls.collate([]),
        'IntervalTrigger(1, "day")': lambda: triggers.Interval(1, "day"),
        'ManualScheduleTrigger(1, "day")': lambda: triggers.ManualSchedule([1], "day"),
        "EarlyStoppingTrigger(patience=1, patients=2)": lambda: triggers.EarlyStopping(patience=1, patients=2),
        "ExponentialShift(rate=-1)": lambda: schedule.exponential(-1),
        "InverseShift(gamma=-1)": lambda: schedule.inverse(-1),
        'Trainer.extend(name="training")': lambda: trainer.extend(lambda _: None, name="training"),
        "Trainer.extend(callable without a name)": lambda: trainer.extend(Nameless()),
        "Trainer.get_extension(unknown)": lambda: trainer.get_extension("zz"),
        "Trainer.run twice": lambda: run_again(out / "twice"),
    }


def refusal(call: Callable[[], object]) -> str | None:
    """Name the kind of error a call raises, by the built-in one that ours derive from."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return None


def refused(through: str = "core") -> list[Any]:
    """List the cases of the trace that are about this."""
    found = cases(TRACE, 5, given=["results.*.message", "results.*.call"], through=through)
    return [each for each in found if each.values[0] is None or "results" in each.values[0]]


def replay(case: Case, ours: Calls, lacking: list[str]) -> None:
    """Compare the kinds of errors, of all calls of the trace but those that there is nothing like."""
    names = [result["call"] for result in case.content["results"]]
    assert [name for name in names if name not in ours] == lacking
    assert set(ours) <= set(names)
    raised = {name: refusal(call) for name, call in ours.items()}
    case.check({"results": [{"raises": raised.get(name)} for name in names]})


@pytest.mark.parametrize("case", refused())
def test_what_the_original_refuses(case: Case, tmp_path: Path) -> None:
    replay(case, calls(tmp_path), ["add_hook before setup"])
