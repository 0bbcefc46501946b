"""Chainer's ParallelUpdater and StandardUpdater: the same batches, gradients, weights and counters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_serial_iterator import RecordedOrders
from torch import nn
from torch.utils.data import Dataset, TensorDataset
from traces import Case, Tolerance, cases, tensor

import lockstep as ls
from lockstep.data import Samples
from lockstep.optim import HookedOptimizer, hooks

GIVEN = ["status", "note", "updater", "models_in_order", "dtype", "optimizer", "lr", "momentum", "loss_scale"]
GIVEN += ["hooks", "batch_size", "repeat", "orders", "dataset", "example_kind", "model", "hidden"]
OPTIMIZERS = {"MomentumSGD": ls.MomentumSGD, "CorrectedMomentumSGD": ls.CorrectedMomentumSGD}
NAMES = {"weight": "W", "bias": "b"}
NORM_NAMES = {"weight": "gamma", "bias": "beta"}


class Net(nn.Module):
    """Two layers, and batch normalisation in between where the case has it."""

    def __init__(self, init: dict[str, Any], *, norm: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.l1 = nn.Linear(4, 5, dtype=dtype)
        self.l2 = nn.Linear(5, 3, dtype=dtype)
        self.bn = nn.BatchNorm1d(5, eps=2e-5, momentum=0.1, dtype=dtype) if norm else None
        with torch.no_grad():
            for layer, module in (("l1", self.l1), ("l2", self.l2)):
                module.weight.copy_(tensor(init[f"{layer}/W"]))
                module.bias.copy_(tensor(init[f"{layer}/b"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.l1(x) if self.bn is None else self.bn(self.l1(x))
        return self.l2(torch.tanh(hidden))

    def named(self) -> dict[str, nn.Parameter]:
        """Give the parameters under the names of the trace."""
        found = {}
        for name, parameter in self.named_parameters():
            layer, kind = name.split(".")
            found[f"{layer}/{(NORM_NAMES if layer == 'bn' else NAMES)[kind]}"] = parameter
        return found


class Dicts(Dataset[dict[str, torch.Tensor]]):
    """The samples of a TensorDataset as dicts."""

    def __init__(self, tensors: TensorDataset) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x, t = self.tensors[index]
        return {"x": x, "t": t}


class Recorder:
    """The last hook before the step; keeps the gradients it sees."""

    name = "recorder"

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.seen: dict[str, torch.Tensor] = {}

    def __call__(self, _: HookedOptimizer) -> None:
        self.seen = {
            name: parameter.grad.clone() for name, parameter in self.parameters.items() if parameter.grad is not None
        }


class Run:
    """One case, with everything the trace records of it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = Net(
            case.shared["init_params"], norm=case["model"] == "mlp_bn", dtype=getattr(torch, case["dtype"])
        )
        self.optimizer = self.make_optimizer()
        for hook in case["hooks"]:
            self.optimizer.add_hook(getattr(hooks, hook["hook"])(*hook["args"]), timing=hook["timing"])
        self.recorder = Recorder(self.model.named())
        self.optimizer.add_hook(self.recorder, timing="pre")
        self.cut: list[list[int]] = []
        self.updater = self.build()

    def make_optimizer(self) -> HookedOptimizer:
        rates = {"lr": self.case["lr"], "momentum": self.case["momentum"]}
        return OPTIMIZERS[self.case["optimizer"]](self.model.parameters(), **rates)

    def batches(self) -> ls.BatchIterator:
        case = self.case
        return ls.BatchIterator(
            self.dataset(),
            case["batch_size"],
            last_batch="wrap",
            repeat=case["repeat"],
            order_sampler=None if case["orders"] is None else RecordedOrders(case["orders"]),
        )

    def build(self) -> ls.ParallelUpdater:
        case, batches = self.case, self.batches()
        options: dict[str, Any] = {
            "loss_fn": self.loss,
            "converter": self.convert,
            "loss_scale": case["loss_scale"],
            "reduction": "sum",
            "buffers": "first",
        }
        if case["updater"] == "StandardUpdater":
            return ls.StandardUpdater(batches, self.optimizer, self.model, **options)
        return ls.ParallelUpdater(
            batches, self.optimizer, self.model, devices=list(self.places().values()), split="strided", **options
        )

    def places(self) -> dict[str, str]:
        """Name the devices in no particular order: "main" is the main one wherever it stands."""
        names = self.case["models_in_order"]
        return dict.fromkeys([*names[1:2], names[0], *names[2:]], "cpu")

    def dataset(self) -> Any:
        data = self.case.shared[self.case["dataset"]]
        dtype = getattr(torch, self.case["dtype"])
        targets = tensor(data["t"])
        targets = targets.to(dtype) if targets.is_floating_point() else targets.long()
        tensors = TensorDataset(tensor(data["x"]).to(dtype), targets)
        return Dicts(tensors) if self.case["example_kind"] == "dict" else tensors

    def convert(self, samples: Sequence[Any], device: torch.device) -> Any:
        assert isinstance(samples, Samples)
        self.cut.append(list(samples.indices))
        return ls.collate(samples, device)

    def loss(self, model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if t.is_floating_point():
            return nn.functional.mse_loss(model(x), t)
        return nn.functional.cross_entropy(model(x), t)

    def step(self) -> dict[str, Any]:
        """Do one update and record it."""
        batch = list(self.updater.get_iterator().peek().indices)
        self.cut.clear()
        result = self.updater.update()
        names = self.case["models_in_order"]
        record: dict[str, Any] = {
            "iteration": self.updater.iteration,
            "batch": batch,
            "sub_batches": dict(zip(names, self.cut, strict=False)),
            "observation": {
                f"{name}/loss": report.loss.item() for name, report in zip(names, result.reports, strict=False)
            },
            "grad_seen_by_last_pre_hook": dict(self.recorder.seen),
            "param": {name: each.detach().clone() for name, each in self.model.named().items()},
            "t": self.optimizer.t,
            "optimizer_epoch": self.optimizer.epoch,
            "epoch": self.updater.epoch,
            "is_new_epoch": self.updater.is_new_epoch,
            "epoch_detail": self.updater.epoch_detail,
            "previous_epoch_detail": self.updater.previous_epoch_detail,
        }
        if self.case["updater"] == "ParallelUpdater":
            record["replicas_equal_main"] = self.replicas_equal_main()
        if self.model.bn is not None:
            record["bn_avg_mean"] = self.model.bn.running_mean.clone()
            record["bn_avg_var"] = self.model.bn.running_var.clone()
        return record

    def replicas_equal_main(self) -> bool:
        return all(
            torch.equal(copied, parameter)
            for replica in self.updater._engine.replicas.replicas
            for copied, parameter in zip(replica.parameters(), self.model.parameters(), strict=True)
        )

    def ended_by(self) -> dict[str, Any] | None:
        """Go on until the run ends of itself."""
        if self.case["ended_by"] is None:
            return None
        try:
            while True:
                self.updater.update()
        except StopIteration:
            return {"at_update": self.updater.iteration, "exception": "StopIteration"}


def replay(run: Run) -> None:
    case = run.case
    steps = [run.step() for _ in case["steps"]]
    ended_by = run.ended_by()
    run.updater.finalize()
    # Those of the trace's README.
    close = Tolerance(2e-4 if case["dtype"] == "float32" else 1e-10)
    fields = ("observation", "grad_seen_by_last_pre_hook", "param", "bn_avg")
    exact = {"steps.*.epoch_detail": Tolerance(0.0)}
    case.check({"steps": steps, "ended_by": ended_by}, {**exact, **{f"steps.*.{each}*": close for each in fields}})


@pytest.mark.parametrize("case", cases("chainer-cunn/parallel_updater.json", num_cases=27, given=GIVEN))
def test_replay(case: Case) -> None:
    replay(Run(case))
