"""Two updaters small enough to see through: one only counts, one is a plain loop on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.metrics import Mean, Observed
from lockstep.updaters import Updater


@dataclass(frozen=True)
class Measured:
    values: Mapping[str, Any]

    def observation(self) -> dict[str, Mean]:
        return dict(self.values)


class CountingUpdater(Updater):
    """Counts; an epoch has ``per_epoch`` updates, the n-th update measures the n-th of ``losses``."""

    def __init__(
        self,
        per_epoch: float = 4,
        losses: Sequence[Observed | None] = (),
        fail_at: int | None = None,
        error: BaseException | None = None,
    ) -> None:
        self.per_epoch = per_epoch
        self.losses = losses
        self.fail_at = fail_at
        self.error = error or RuntimeError("boom")
        self.num_done = 0
        self.num_finalized = 0

    def update(self) -> Measured:
        if self.num_done == self.fail_at:
            self.fail_at = None
            raise self.error
        self.num_done += 1
        loss = self.losses[self.num_done - 1] if self.num_done <= len(self.losses) else None
        return Measured({} if loss is None else {"loss": loss})

    @property
    def iteration(self) -> int:
        return self.num_done

    @property
    def epoch(self) -> int:
        return int(self.epoch_detail)

    @property
    def epoch_detail(self) -> float:
        return self.num_done / self.per_epoch

    @property
    def previous_epoch_detail(self) -> float:
        return max(0, self.num_done - 1) / self.per_epoch

    @property
    def is_new_epoch(self) -> bool:
        return int(self.epoch_detail) != int(self.previous_epoch_detail)

    def get_iterator(self, name: str) -> Iterator[Any]:
        raise KeyError(name)

    def get_all_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {}

    def get_all_models(self) -> dict[str, torch.nn.Module]:
        return {}

    def finalize(self) -> None:
        self.num_finalized += 1

    def state_dict(self) -> dict[str, object]:
        return {"num_done": self.num_done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_done = state["num_done"]


class LoopUpdater(CountingUpdater):
    """The plain loop: batches in order, cross entropy, SGD with momentum."""

    def __init__(self, model: torch.nn.Module, x: torch.Tensor, t: torch.Tensor, batch_size: int) -> None:
        super().__init__(per_epoch=len(x) / batch_size)
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        self.x, self.t, self.batch_size = x, t, batch_size

    def update(self) -> Measured:
        rows = torch.arange(self.num_done * self.batch_size, (self.num_done + 1) * self.batch_size) % len(self.x)
        output = self.model(self.x[rows])
        loss = torch.nn.functional.cross_entropy(output, self.t[rows])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.num_done += 1
        right = (output.argmax(1) == self.t[rows]).sum()
        weight = len(rows)
        return Measured({"loss": Mean(loss.detach() * weight, weight), "accuracy": Mean(right, weight)})

    def get_all_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {"main": self.optimizer}

    def get_all_models(self) -> dict[str, torch.nn.Module]:
        return {"main": self.model}

    def state_dict(self) -> dict[str, object]:
        weights = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        return {"num_done": self.num_done, "model": weights, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_done = state["num_done"]


@dataclass
class Place:
    """Where a run stands, for triggers that are asked without a trainer."""

    updater: CountingUpdater
    observation: Mapping[str, Observed]
    elapsed_time: float = 0.0

    def advance(self, observation: Mapping[str, Observed] | None = None) -> None:
        self.updater.num_done += 1
        self.observation = observation or {}
