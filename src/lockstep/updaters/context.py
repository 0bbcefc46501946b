"""The state of the calling thread while it makes an update."""

from __future__ import annotations

from types import TracebackType

from lockstep.replicas.replica_set import ReplicaSet
from lockstep.replicas.settings import SINGLE_THREAD, ComputeMode, ThreadSettings
from lockstep.updaters.interrupts import HeldInterrupts
from lockstep.updaters.savepoint import Savepoint


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
        self.interrupts = HeldInterrupts(replicas)
        self.settings = SINGLE_THREAD
        if replicas.carries:
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
