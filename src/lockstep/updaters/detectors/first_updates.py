"""Watch the first updates for what shards and steps should not do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Final

from torch import nn

from lockstep.plan import Shard
from lockstep.updaters.compute import PreparedModel
from lockstep.updaters.detectors.outside_state import StateDetector
from lockstep.updaters.detectors.random_detector import IN_SHARDS, IN_STEPS, RandomDetector
from lockstep.updaters.detectors.unrepeatable import UnrepeatableDetector

CHECKED_UPDATES: Final = 3
"""The number of updates that are checked after an updater was built or a state was loaded."""


class FirstUpdates:
    """Checks the first updates, and nothing after them, so that the checks cost nothing later."""

    def __init__(self) -> None:
        self._random = RandomDetector()
        self._state = StateDetector()
        self._unrepeatable = UnrepeatableDetector()
        self.start = self.end = 0
        """The number of done updates from which on nothing is checked."""

    @property
    def has_warned(self) -> bool:
        """Whether something was found that makes two computations of a shard differ."""
        return self._random.has_warned or self._state.has_warned

    def restart(self, update: int) -> None:
        """Check the next updates.

        Args:
            update: The number of updates that are done.
        """
        self.start, self.end = update, update + CHECKED_UPDATES

    @contextmanager
    def watching(
        self,
        loss_fn: Any,
        model: nn.Module,
        prepared: PreparedModel,
        device_shards: Iterable[Iterable[tuple[Shard, Any]]],
    ) -> Iterator[None]:
        """Check what happens while shards are computed, and warn once of each kind.

        Args:
            loss_fn: The loss function.
            model: The model.
            prepared: The model as it is run.
            device_shards: The shards of each device, with their tensors.

        Raises:
            ValueError: If a parameter of the model has changed.
        """
        replicas = [runner.replica for runner in prepared.runners]
        sizes = {len(shard.samples) for shards in device_shards for shard, _ in shards}
        with ExitStack() as stack:
            if not self._random.has_warned:
                stack.enter_context(self._random.watching(IN_SHARDS, [loss_fn], replicas))
            if not self._state.has_warned:
                stack.enter_context(self._state.watching(loss_fn, [model, *replicas], sizes))
            if not self._unrepeatable.has_warned:
                stack.enter_context(self._unrepeatable.watching())
            stack.enter_context(prepared.writes.watching())
            yield

    def watching_steps(self, update: int, functions: Iterable[Any]) -> AbstractContextManager[None]:
        """Check what optimizers and hooks draw from, and warn once.

        Args:
            update: The number of updates that are done.
            functions: The optimizers and hooks.
        """
        watched = update < self.end and not self._random.has_warned
        return self._random.watching(IN_STEPS, functions) if watched else nullcontext()
