"""Know what each device of a group is doing, so that an interrupt or a thread that hangs can be named.

Threads note what they come to next: a store into a list, which costs nothing beside the work. The notes are
read only when something has gone wrong.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final

import torch

from lockstep.errors import ReplicaError, ReplicaInterrupt
from lockstep.plan import Shard

STACK_DEPTH: Final = 12
"""How many of the innermost calls of a thread are shown."""


@dataclass(slots=True)
class DeviceStatus:
    """What one device is doing.

    Attributes:
        thread: The thread that works for it.
        phase: What is done with the shard; empty before the first one.
        shard: Which one; None before the first one.
    """

    thread: int
    phase: str = ""
    shard: Shard | None = None

    def __str__(self) -> str:
        if self.shard is None:
            return "its work"
        return f"the {self.phase} of shard {self.shard.index} ({samples_text(self.shard)})"


class DeviceProgress:
    """Notes of what the devices of a group are doing; names them to interrupts that leave its context.

    Each piece of work has its own: a thread of the last one, given up in the middle of it, is not at work.

    Args:
        devices: By place.

    Attributes:
        stopping: Whether what devices come to next is to be left undone.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.stopping = False
        self._devices = devices
        self._notes: list[DeviceStatus | None] = [None] * len(devices)
        self._interrupted: list[tuple[int, DeviceStatus]] = []

    def begin(self, place: int) -> None:
        """Note that a device begins, in the calling thread."""
        self._notes[place] = DeviceStatus(threading.get_ident())

    def proceed(self, place: int, phase: str, shard: Shard) -> bool:
        """Note what a device does next, and tell whether it is to be done.

        It is not where devices were asked to stop, or where the calling thread was given up in the middle of
        earlier work and no longer works for the device.

        Args:
            place: The device's number.
            phase: What is done with the shard.
            shard: Which one.
        """
        note = self._notes[place]
        if note is None or note.thread != threading.get_ident():
            return False
        note.phase, note.shard = phase, shard
        return not self.stopping

    def end(self, place: int) -> None:
        """Note that a device is done."""
        self._notes[place] = None

    def failed(self, error: BaseException) -> None:
        """Ask all devices to stop, for one has failed; remember who is at work if that was an interrupt."""
        self.stopping = True
        if isinstance(error, KeyboardInterrupt):
            self.mark()

    def mark(self) -> None:
        """Remember who is at work at this moment, for an interrupt that is delivered later."""
        self._interrupted = self._interrupted or self._working()

    def __enter__(self) -> None:
        """Begin what an interrupt may end."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Name the devices at work to an interrupt that comes through; a user's own kind passes as it is.

        Raises:
            ReplicaInterrupt: In its place.
        """
        interrupt = None if error is None else self.interrupt(error)
        if interrupt is not None:
            raise interrupt from error

    def interrupt(self, error: BaseException) -> ReplicaInterrupt | None:
        """Return what names the devices at work to a KeyboardInterrupt; None for another error, and if none is."""
        if type(error) is not KeyboardInterrupt:
            return None
        self.mark()
        if not self._interrupted:
            return None
        whats = " and ".join(f"{note} on {self._name(place)}" for place, note in self._interrupted)
        return ReplicaInterrupt(
            f"Interrupted during {whats}.",
            devices=[str(self._devices[place]) for place, _ in self._interrupted],
        )

    def hung(self, places: Sequence[int], seconds: float) -> ReplicaError:
        """Give the error that names devices whose threads do not come to an end, and where they are."""
        notes = dict(self._working())
        late = [place for place in places if place in notes] or list(notes) or list(places)
        whats = " and ".join(f"{notes.get(place, 'its work')} on {self._name(place)}" for place in late)
        stacks = "".join(f"\n{self._name(place)} is at:\n{_stack(notes.get(place))}" for place in late)
        first = notes.get(late[0])
        return ReplicaError(
            f"{whats[0].upper()}{whats[1:]} was not done after {seconds:g} seconds.{stacks.rstrip()}",
            device=str(self._devices[late[0]]),
            shard=None if first is None or first.shard is None else first.shard.index,
        )

    def _working(self) -> list[tuple[int, DeviceStatus]]:
        """List the places at work with copies of their notes, which go on changing."""
        return [
            (place, DeviceStatus(note.thread, note.phase, note.shard))
            for place, note in enumerate(self._notes)
            if note is not None
        ]

    def _name(self, place: int) -> str:
        return f"{self._devices[place]} (device {place} of 0..{len(self._devices) - 1})"


def samples_text(shard: Shard) -> str:
    """Name the samples of a shard.

    >>> samples_text(Shard(0, 0, range(4, 8))), samples_text(Shard(0, 0, range(0, 8, 2)))
    ('samples 4..7', 'samples 0..6 in steps of 2')
    """
    samples = shard.samples
    apart = f" in steps of {samples.step}" if samples.step > 1 else ""
    return f"samples {samples[0]}..{samples[-1]}{apart}"


def _stack(note: DeviceStatus | None) -> str:
    """Show where a thread is, the innermost call last."""
    frame = None if note is None else sys._current_frames().get(note.thread)  # noqa: SLF001 - no other way to know
    return "" if frame is None else "".join(traceback.format_stack(frame, limit=STACK_DEPTH))
