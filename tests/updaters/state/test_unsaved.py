"""What an optimizer of yours remembers is saved, or a warning says that it is not."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from tests.support.ranks import run_on_ranks


class Averaging(torch.optim.SGD):
    """Keeps a counter and an average beside its state."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count, self.average = 0, [torch.zeros_like(each) for each in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.count += 1
        for average, each in zip(self.average, self.param_groups[0]["params"], strict=True):
            # Not seen by the tensor's version.
            average.data.lerp_(each, 0.5)


class Wrapping(torch.optim.Optimizer):
    """Steps an optimizer inside, whose state it does not return."""

    def __init__(self, parameters: Any) -> None:
        self.inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        super().__init__(self.inner.param_groups, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step(closure)


class Saving(Wrapping):
    """The same with a `state_dict` of its own."""

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)


class Constant(torch.optim.SGD):
    """Has attributes that do not change, and the parameters themselves."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.rho, self.held, self.flag = 0.05, self.param_groups[0]["params"], False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.flag = True


class Named(torch.optim.Optimizer):
    """Keeps state that belongs to no parameter in `state`."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        everywhere = self.state["everywhere"]
        everywhere["steps"] = everywhere.get("steps", 0) + 1
        # One without a dict, as some optimizers keep it.
        self.state["total"] = torch.tensor([everywhere["steps"]])  # type: ignore[index, assignment]  # by a name
        for each in self.param_groups[0]["params"]:
            each.sub_(self.param_groups[0]["lr"] / everywhere["steps"] * each.grad)


def updater_of(optimizer: Any, communicator: ls.Communicator | None = None) -> ls.ParallelUpdater:
    torch.manual_seed(0)
    model, inputs = nn.Linear(3, 1), torch.randn(12, 3)
    data = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
    return ls.ParallelUpdater(
        ls.BatchIterator(data, 4, seed=0),
        optimizer(model.parameters()),
        model,
        num_shards=2,
        loss_fn=ls.supervised(nn.functional.mse_loss),
        communicator=communicator,
    )


@pytest.mark.parametrize(("optimizer", "names"), [(Averaging, "'count', 'average'"), (Wrapping, "'inner'")])
def test_what_is_not_saved_is_named_once(optimizer: Any, names: str) -> None:
    updater = updater_of(optimizer)
    updater.state_dict()
    updater.update()
    with pytest.warns(ls.DeterminismWarning, match=f"{optimizer.__name__} remembers in {names}, because"):
        updater.state_dict()
    updater.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        updater.state_dict()


@pytest.mark.parametrize("optimizer", [Saving, Constant, Named])
def test_what_is_saved_or_does_not_change_raises_no_alarm(optimizer: Any) -> None:
    updater = updater_of(optimizer)
    updater.update()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = copy.deepcopy(updater.state_dict())
    resumed = updater_of(optimizer)
    resumed.load_state_dict(state)
    updater.update()
    resumed.update()
    assert ls.digest(updater.state_dict()) == ls.digest(resumed.state_dict())


def test_state_that_belongs_to_no_parameter_is_in_a_snapshot(tmp_path: Path) -> None:
    updater, resumed = updater_of(Named), updater_of(Named)
    updater.update()
    ls.snapshots.save(updater, tmp_path / "snapshot")
    ls.snapshots.restore(resumed, tmp_path / "snapshot")
    assert resumed.get_optimizer("main").state["everywhere"] == {"steps": 1}
    updater.update()
    resumed.update()
    assert ls.digest(updater.state_dict()) == ls.digest(resumed.state_dict())


class Listing(torch.optim.SGD):
    """Steps the parameters that it was given, instead of those in its groups."""

    def __init__(self, parameters: Any) -> None:
        self.listed = list(parameters)
        super().__init__(self.listed, lr=0.1)


def test_a_list_of_parameters_does_not_hold_master_weights() -> None:
    model = nn.Linear(3, 1).bfloat16()
    data = torch.utils.data.TensorDataset(torch.randn(12, 3), torch.randn(12, 1))
    with pytest.raises(ValueError, match=r"the parameters of Listing by float32 master weights, .* in 'listed'"):
        ls.ParallelUpdater(
            ls.BatchIterator(data, 4), Listing(model.parameters()), model, num_shards=2, precision="bf16-true"
        )


def test_an_update_that_is_made_again_is_warned_of_too() -> None:
    updater = updater_of(Averaging)
    stepping = ls.ParallelUpdater(
        updater.get_iterator("main"),
        updater.get_optimizer("main"),
        updater.get_all_models()["main"],
        num_shards=2,
        loss_fn=ls.supervised(nn.functional.mse_loss),
        step_fn=lambda step, batch: (step.compute_gradients(batch), step.apply_gradients()),
    )
    stepping.update()
    with pytest.warns(ls.DeterminismWarning, match="or an update that is made again, may use other numbers"):
        stepping.update()


def on_ranks(communicator: ls.Communicator) -> str:
    updater = updater_of(Named, communicator=communicator)
    for _ in range(3):
        updater.update()
    return ls.digest(updater.state_dict())


def test_ranks_compare_state_that_belongs_to_no_parameter() -> None:
    expected = on_ranks(ls.LocalCommunicator())
    assert run_on_ranks(on_ranks, 2) == [expected] * 2
