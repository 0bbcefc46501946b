"""The interface that a training loop needs of an updater."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from lockstep.arguments import look_up
from lockstep.communicators import Communicator, LocalCommunicator
from lockstep.data import Iterator
from lockstep.elsewhere import UPDATER_NAMES, KnowsOthers
from lockstep.metrics import Mean
from lockstep.updaters.result import SkippedUpdate


class Result(Protocol):
    """What `Updater.update` returns, as far as a training loop reads it."""

    def observation(self) -> dict[str, Mean]:
        """Return what the update measured: ``"loss"`` and the metrics of the loss function, by name.

        The numbers stay on their device until they are read.
        """


class Updater(KnowsOthers, ABC):
    """Makes one update after another and counts them; a trainer decides when, and what happens in between.

    A subclass defines what an update is. Everything else in this interface is called between updates, from the thread
    that calls `update`.
    """

    _others = UPDATER_NAMES

    @abstractmethod
    def update(self) -> Result:
        """Consume one batch: change the weights, or skip the batch by the rules of the updater.

        Returns:
            What the update did and measured.

        An exception leaves the state as it was after the previous update, and you can call `update` again.
        """

    def last_skipped(self) -> SkippedUpdate | None:
        """Return the last update that was skipped because its gradient was not finite; None if there was none.

        Checks that are still on a device are read. A log calls this at the end of each interval. By default, updates
        are not skipped.

        Raises:
            NonFiniteError: If so many updates in a row were skipped that the run should end.
        """
        return None

    @property
    def communicator(self) -> Communicator:
        """The communicator of the run; by default that of a single process."""
        return LocalCommunicator()

    @property
    @abstractmethod
    def iteration(self) -> int:
        """The number of complete updates, 0 before the first."""

    @property
    def epoch(self) -> int:
        """The number of complete epochs."""
        return self.get_iterator("main").epoch

    @property
    def epoch_detail(self) -> float:
        """The number of epochs, including the fraction of the current one."""
        return self.get_iterator("main").epoch_detail

    @property
    def previous_epoch_detail(self) -> float:
        """The value of `epoch_detail` before the last update; 0 before the first."""
        return self.get_iterator("main").previous_epoch_detail or 0.0

    @property
    def is_new_epoch(self) -> bool:
        """Whether the last update completed an epoch."""
        return self.get_iterator("main").is_new_epoch

    @abstractmethod
    def get_iterator(self, name: str) -> Iterator:
        """Return the batch iterator of a name.

        Args:
            name: The name; ``"main"`` if there is only one iterator.

        Raises:
            KeyError: If there is no iterator of this name; the message lists the names.
        """

    def get_optimizer(self, name: str) -> torch.optim.Optimizer:
        """Return the optimizer of a name.

        Args:
            name: The name; ``"main"`` if there is only one optimizer.

        Raises:
            KeyError: If there is no optimizer of this name; the message lists the names.
        """
        return look_up(name, self.get_all_optimizers())

    @abstractmethod
    def get_all_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Return all optimizers by name, in a new dict."""

    @abstractmethod
    def get_all_models(self) -> dict[str, torch.nn.Module]:
        """Return all models by name, in a new dict; of each the one that holds the weights."""

    def get_all_schedulers(self) -> dict[str, torch.optim.lr_scheduler.LRScheduler]:
        """Return the learning-rate schedulers that it steps, by the names in its state; by default none."""
        return {}

    def connect_trainer(self, trainer: Any) -> None:
        """Receive the trainer at the end of its construction; by default, do nothing.

        Args:
            trainer: The `lockstep.Trainer`. Its type is not named here, because trainers depend on updaters.
        """

    def finalize(self) -> None:
        """Release what is held between updates, such as threads and worker processes; by default, do nothing.

        The trainer calls this at the end of every run, also after an error, so it may be called repeatedly. If another
        update follows, it acquires what it needs again.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, object]:
        """Return everything the next update depends on: counters, iterators, models, optimizers, random streams.

        Values are numbers, strings, None, tensors, and lists and dicts of these.
        """

    def live_state(self) -> dict[str, object]:
        """Return the state as `state_dict` does, but with the tensors that are being trained where it copies them.

        Read it before the next update. By default it is `state_dict`.
        """
        return self.state_dict()

    def recipe_fields(self) -> dict[str, object]:
        """Return what the result depends on besides the state, as JSON values by name; by default nothing.

        A snapshot contains them, and a run resumes from it only if its own are equal.
        """
        return {}

    @property
    def shares_state(self) -> bool:
        """Whether no process holds the whole state, so that all must call `state_dict` and `live_state` together."""
        return False

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The devices on which this process computes; by default the CPU."""
        return (torch.device("cpu"),)

    @property
    def samples_passed(self) -> int | None:
        """The number of samples of the main iterator before its next batch, over all epochs; None if it cannot tell."""
        return self.get_iterator("main").samples_passed

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state.

        Args:
            state: What `state_dict` returned; left unchanged.

        Raises:
            StateError: If the state does not fit; nothing has changed in that case.
        """
