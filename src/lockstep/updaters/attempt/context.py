"""The state of the calling thread during an update: the settings it computes under, and pending interrupts."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` wraps it in enums, at ten times the cost
from dataclasses import replace
from types import FrameType
from typing import Any

from lockstep.replicas import SINGLE_THREAD, ComputeMode, DeferredSigint, ReplicaSet, ThreadSettings
from lockstep.updaters.state.checkpoint import Savepoint


class UpdateSigint(DeferredSigint):
    """Records SIGINT during an update, and delivers it at points where nothing has changed yet.

    The first Ctrl-C asks the replicas to stop at their next shard. A second one, from a user who does not want to wait,
    is delivered at once, unless the weights are already moving. This only has an effect in the main thread; Python does
    not deliver signals to others.

    Args:
        replicas: The replicas that are asked to stop.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas
        self._committing = False

    def check(self) -> bool:
        """Deliver a pending interrupt; called where nothing has changed yet.

        Returns:
            Whether there was one and its handler returned. Shards may have been left out in that case.
        """
        # Cleared first, so that a handler that raises does not leave an interrupt to be delivered twice.
        came, self._pending = self._pending, False
        if came:
            # `progress` turns a KeyboardInterrupt of the handler into one that names the devices at work.
            with self._replicas.progress:
                self._handler(_signal.SIGINT, None)
        return came

    def hold(self) -> None:
        """Hold all interrupts until the end of the ``with`` block, including a pending one."""
        self._committing = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # The second Ctrl-C: its user does not want to wait for shards. While weights move it is held all the same.
        if self._pending and not self._committing:
            self._pending = False
            self._handler(number, frame)
            return
        self._pending = True
        self._replicas.stop()


class UpdateContext:
    """Holds Ctrl-C, and puts the calling thread into the settings under which all devices compute.

    Args:
        replicas: The replicas that an interrupt stops.
        training: Whether to record operations for backward.

    Attributes:
        interrupts: The interrupts that are held.
        settings: The settings of the calling thread.
        savepoint: The state that a failed step function returns to; None in an update without one.
    """

    __slots__ = ("_mode", "interrupts", "savepoint", "settings")

    def __init__(self, replicas: ReplicaSet, *, training: bool = True) -> None:
        self.interrupts = UpdateSigint(replicas)
        self.settings = SINGLE_THREAD
        if replicas.uses_threads:
            self.settings = ThreadSettings.capture(replicas.device_types, replicas.accelerators, training=True)
        if not training:
            self.settings = replace(self.settings, grad=False)
        self.savepoint: Savepoint | None = None
        self._mode = ComputeMode(self.settings)

    def __enter__(self) -> UpdateContext:
        # Interrupts first, so that Ctrl-C cannot arrive between the change of settings and its undoing.
        self.interrupts.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._mode.__exit__(*raised)
        self.interrupts.__exit__(*raised)
