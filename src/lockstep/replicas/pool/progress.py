"""Track what each device is doing, so that errors can name an interrupted or hanging device.

Threads record what they do next by storing it in a list, which takes no noticeable time. The records are read only
after something has gone wrong.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from lockstep.errors import ReplicaError, ReplicaInterrupt
from lockstep.plan import Shard

STACK_DEPTH: Final = 12
"""The number of innermost calls of a thread that an error message shows."""


@dataclass(slots=True)
class DeviceStatus:
    """The current activity of one device.

    Attributes:
        thread: The identifier of the thread that works for the device.
        phase: The name of what is done with the shard, which is empty before the first shard.
        shard: The shard, or None before the first one.
    """

    thread: int
    phase: str = ""
    shard: Shard | None = None

    def __str__(self) -> str:
        if self.shard is None:
            return "its work"
        return f"the {self.phase} of shard {self.shard.index} ({samples_text(self.shard)})"


class DeviceProgress:
    """The current activities of the devices of a `ReplicaSet`.

    As a context manager, it replaces a KeyboardInterrupt by an error that names the devices at work. Each piece of work
    has an object of its own, so that a thread that was abandoned in the middle of earlier work does not count as being
    at work.

    Args:
        devices: The devices of the replicas.

    Attributes:
        stopping: Whether devices were asked to stop, or one has failed.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.stopping = False
        self._halted = False
        self._failed: list[int] = []
        self._devices = devices
        self._statuses: list[DeviceStatus | None] = [None] * len(devices)
        self._interrupted: list[tuple[int, DeviceStatus]] = []

    def start(self, place: int) -> None:
        """Record that a device starts to work, in the calling thread.

        Args:
            place: The index of the device.
        """
        self._statuses[place] = DeviceStatus(threading.get_ident())

    def enter_phase(self, place: int, phase: str, shard: Shard) -> bool:
        """Record what a device does next, and return whether to do it.

        The work is to be skipped if devices were asked to stop, or if the calling thread was abandoned in the middle of
        earlier work and no longer works for the device. After a failure only the devices before the one that failed go
        on, because their shards come first: the error that is raised is that of the lowest shard that fails.

        Args:
            place: The index of the device.
            phase: The name of what is done with the shard.
            shard: The shard.
        """
        status = self._statuses[place]
        # An abandoned thread must not overwrite the record of the thread that replaced it.
        if status is None or status.thread != threading.get_ident():
            return False
        status.phase, status.shard = phase, shard
        return not self.stopping or (not self._halted and place < min(self._failed, default=0))

    def finish(self, place: int) -> None:
        """Record that a device has finished.

        Args:
            place: The index of the device.
        """
        self._statuses[place] = None

    def record_failure(self, place: int, error: BaseException) -> None:
        """Record that a device has failed, and ask others to stop.

        Args:
            place: The index of the device.
            error: Its error. If it is an interrupt, the devices at work are recorded.
        """
        if isinstance(error, Exception):
            # Before `stopping`, so that no device stops that is to go on.
            self._failed.append(place)
            self.stopping = True
            return
        self.halt()
        if isinstance(error, KeyboardInterrupt):
            self.mark()

    def halt(self) -> None:
        """Ask all devices to stop at their next shard."""
        self.stopping = self._halted = True

    def mark(self) -> None:
        """Record the devices that are at work now, for an interrupt that is delivered later."""
        self._interrupted = self._interrupted or self._working()

    def __enter__(self) -> None:
        """Enter a section that an interrupt may end."""

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Replace a KeyboardInterrupt by an error that names the devices at work.

        A subclass of KeyboardInterrupt passes unchanged.

        Raises:
            ReplicaInterrupt: If a KeyboardInterrupt leaves the section while devices are at work.
        """
        if type(error) is not KeyboardInterrupt:
            return
        self.mark()
        if self._interrupted:
            activities = " and ".join(f"{status} on {self._name(place)}" for place, status in self._interrupted)
            raise ReplicaInterrupt(
                f"Interrupted during {activities}.",
                devices=[str(self._devices[place]) for place, _ in self._interrupted],
            ) from error

    def timeout_error(self, places: Sequence[int], seconds: float) -> ReplicaError:
        """Return the error that names devices whose threads have not finished, with the stacks of these threads.

        Args:
            places: The indices of the devices that were waited for.
            seconds: The number of seconds after which waiting ended.
        """
        statuses = dict(self._working())
        # A thread may have finished since the wait ended. Then the devices that are still at work are named instead.
        late = [place for place in places if place in statuses] or list(statuses) or list(places)
        activities = " and ".join(f"{statuses.get(place, 'its work')} on {self._name(place)}" for place in late)
        stacks = "".join(f"\n{self._name(place)} is at:\n{_stack(statuses.get(place))}" for place in late)
        first = statuses.get(late[0])
        return ReplicaError(
            f"{activities[0].upper()}{activities[1:]} did not finish within {seconds:g} seconds.{stacks.rstrip()}",
            device=str(self._devices[late[0]]),
            shard=None if first is None or first.shard is None else first.shard.index,
        )

    def _working(self) -> list[tuple[int, DeviceStatus]]:
        """List the devices at work with copies of their status, because other threads go on changing it."""
        return [
            (place, DeviceStatus(status.thread, status.phase, status.shard))
            for place, status in enumerate(self._statuses)
            if status is not None
        ]

    def _name(self, place: int) -> str:
        return f"{self._devices[place]} (device {place} of 0..{len(self._devices) - 1})"


def samples_text(shard: Shard) -> str:
    """Return a description of the samples of a shard for error messages.

    Args:
        shard: The shard.

    >>> samples_text(Shard(0, 0, range(4, 8))), samples_text(Shard(0, 0, range(0, 8, 2)))
    ('samples 4..7', 'samples 0..6 in steps of 2')
    """
    samples = shard.samples
    apart = f" in steps of {samples.step}" if samples.step > 1 else ""
    return f"samples {samples[0]}..{samples[-1]}{apart}"


def _stack(status: DeviceStatus | None) -> str:
    """Return the stack of a thread as text, with the innermost call last."""
    frame = None if status is None else sys._current_frames().get(status.thread)  # noqa: SLF001 - no other way to know
    return "" if frame is None else "".join(traceback.format_stack(frame, limit=STACK_DEPTH))
