"""Say how far a training has come, and by which names its parts go."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.data import Iterator
from lockstep.precision import LossScale
from lockstep.updaters.names import MAIN, look_up
from lockstep.updaters.training import Training
from lockstep.updaters.updater import Updater


class TrainingUpdater(Updater):
    """An updater of what a `Training` holds; a subclass says what an update is.

    Args:
        training: What is trained.
    """

    def __init__(self, training: Training) -> None:
        self._training = training

    @property
    def iteration(self) -> int:
        """How many updates are done: batches, or groups of accumulated ones, applied or given up."""
        return self._training.iteration

    @property
    def applied_updates(self) -> int:
        """How many of them moved the weights."""
        return self._training.applied.count

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next try."""
        return self._training.loss_scale

    @property
    def epoch(self) -> int:
        """How many epochs the iterator has finished."""
        return self._training.iterator.epoch

    @property
    def epoch_detail(self) -> float:
        """How many epochs the iterator has gone through, with the fraction of the one it is in."""
        return self._training.iterator.epoch_detail

    @property
    def previous_epoch_detail(self) -> float:
        """`epoch_detail` before the last update; 0 before the first."""
        return self._training.iterator.previous_epoch_detail or 0.0

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last update finished an epoch."""
        return self._training.iterator.is_new_epoch

    def get_iterator(self, name: str = MAIN) -> Iterator:
        """Give the iterator of this name.

        Raises:
            KeyError: There is none of this name; the message lists those there are.
        """
        return look_up(name, self._training.iterators)

    def get_all_optimizers(self) -> dict[str, Optimizer]:
        """Give all optimizers by name."""
        return dict(self._training.optimizers)

    def get_all_models(self) -> dict[str, nn.Module]:
        """Give all models by name."""
        return dict(self._training.models)

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Where this process's replicas are, one entry each: what ``"auto"`` came to."""
        return tuple(self._training.group.devices)

    def master_weights(self, model: str = MAIN) -> dict[str, torch.Tensor]:
        """Give the float32 masters by the names of their parameters; none without a true half precision.

        Args:
            model: The name of the model.

        Raises:
            KeyError: There is no model of this name.
        """
        return self._training.master_weights(model)
