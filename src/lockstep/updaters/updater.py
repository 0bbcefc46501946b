"""What a training loop needs from whoever makes the updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from lockstep.communicators import Communicator, LocalCommunicator
from lockstep.data import Iterator
from lockstep.metrics import Mean


class Result(Protocol):
    """What one call of `Updater.update` returns, as far as a training loop looks into it."""

    def observation(self) -> dict[str, Mean]:
        """Return what the update measured: ``"loss"`` and every metric of the loss function, by name.

        The numbers stay on their device until somebody reads them.
        """


class Updater(ABC):
    """Makes one update after another and counts them; a trainer decides when and what happens between.

    A subclass says what an update is. Everything below is asked between updates only, from the
    thread that calls `update`.
    """

    @abstractmethod
    def update(self) -> Result:
        """Consume one batch: change the weights, or give the batch up by the updater's own rules.

        Returns:
            What was done and measured.

        An exception leaves the state of the last update, and a later call goes on from it.
        """

    @property
    def communicator(self) -> Communicator:
        """What joins the processes of the run; unless a subclass says otherwise, this one is alone."""
        return LocalCommunicator()

    @property
    @abstractmethod
    def iteration(self) -> int:
        """How many updates were done, which is the number of batches consumed; 0 before the first."""

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self.get_iterator("main").epoch

    @property
    def epoch_detail(self) -> float:
        """How many epochs are done, with the fraction of the one under way."""
        return self.get_iterator("main").epoch_detail

    @property
    def previous_epoch_detail(self) -> float:
        """`epoch_detail` as it was before the last update; 0 before the first."""
        return self.get_iterator("main").previous_epoch_detail or 0.0

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last update completed an epoch."""
        return self.get_iterator("main").is_new_epoch

    @abstractmethod
    def get_iterator(self, name: str) -> Iterator:
        """Return the batch iterator of this name.

        Args:
            name: ``"main"`` where there is only one.

        Raises:
            KeyError: There is none of this name; the message lists those there are.
        """

    def get_optimizer(self, name: str) -> torch.optim.Optimizer:
        """Return the optimizer of this name.

        Args:
            name: ``"main"`` where there is only one.

        Raises:
            KeyError: There is none of this name; the message lists those there are.
        """
        optimizers = self.get_all_optimizers()
        if name not in optimizers:
            raise KeyError(f"`name` must be one of {sorted(optimizers)}, got {name!r}.")
        return optimizers[name]

    @abstractmethod
    def get_all_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return the optimizers by name, in a new dict."""

    @abstractmethod
    def get_all_models(self) -> dict[str, torch.nn.Module]:
        """Return the models by name, in a new dict: of each the one replica that holds the weights."""

    def connect_trainer(self, trainer: Any) -> None:  # noqa: B027 - optional; most updaters need no trainer
        """Get to know the trainer, at the end of its construction; nothing by default.

        Args:
            trainer: The `lockstep.Trainer`, whose type a part below it cannot name.
        """

    def finalize(self) -> None:  # noqa: B027 - optional; an updater may hold nothing
        """Release what is held between updates (threads, worker processes); nothing by default.

        The trainer calls it whenever a run ends, well or not, so it may be called again; and
        an update may follow, for which what was released is taken up again.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Return all that the next update depends on: counters, iterators, models, optimizers, streams.

        Values are numbers, text, None, tensors, and lists and dicts of these.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Args:
            state: What `state_dict` returned; left untouched.

        Raises:
            StateError: It does not fit; nothing has been changed.
        """
