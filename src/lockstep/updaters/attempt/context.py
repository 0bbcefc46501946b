"""The state of the calling thread while it makes an update: how it computes, and what becomes of Ctrl-C."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the module `signal` wraps it in enums, at ten times the cost
from types import FrameType, TracebackType

from lockstep.replicas import SINGLE_THREAD, ComputeMode, DeferredSigint, ReplicaSet, ThreadSettings
from lockstep.updaters.state import Savepoint


class UpdateSigint(DeferredSigint):
    """Take note of SIGINT during an update, and raise it where nothing has changed yet.

    The first Ctrl-C asks the replicas to stop at their next shard. A second one, given by somebody who
    does not want to wait for that, is raised at once, unless the weights are already moving. Works in the
    main thread only; elsewhere Python delivers no signals and this does nothing.

    Args:
        group: Asked to stop at the first Ctrl-C, and knows who was at work then.
    """

    def __init__(self, group: ReplicaSet) -> None:
        self._group = group
        self._committing = False

    def check(self) -> bool:
        """Deliver an interrupt that came since; called where nothing has changed yet.

        Returns:
            Whether one came whose handler lets the work go on; shards may have been left out by then.
        """
        came, self._pending = self._pending, False
        if came:
            with self._group.progress:
                self._handler(_signal.SIGINT, None)
        return came

    def commit(self) -> None:
        """Hold every interrupt from here to the end."""
        if self._pending:
            self.check()
        self._committing = True

    def hold(self) -> None:
        """Hold every interrupt from here to the end, one that came already among them."""
        self._committing = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pending and not self._committing:
            self._pending = False
            self._handler(number, frame)
            return
        self._pending = True
        self._group.stop()


class StepContext:
    """Hold Ctrl-C, and put the calling thread into the state in which all devices compute.

    Args:
        replicas: The replicas whose work an interrupt stops.

    Attributes:
        interrupts: Those held.
        settings: What the calling thread computes under.
        savepoint: What a step function goes back to when it fails; None in an update without one.
    """

    __slots__ = ("_mode", "interrupts", "savepoint", "settings")

    def __init__(self, replicas: ReplicaSet) -> None:
        self.interrupts = UpdateSigint(replicas)
        self.settings = SINGLE_THREAD
        if replicas.uses_threads:
            self.settings = ThreadSettings.capture(replicas.device_types, training=True)
        self.savepoint: Savepoint | None = None
        self._mode = ComputeMode(self.settings)

    def __enter__(self) -> StepContext:
        self.interrupts.__enter__()
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)
        self.interrupts.__exit__(kind, error, trace)
