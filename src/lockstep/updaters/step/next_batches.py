"""Copy the batches of the next update to accelerators while these compute the current one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

from lockstep import nest
from lockstep.data import Iterator, Samples
from lockstep.errors import RandomStreamWarning, warn
from lockstep.replicas import CopyStreams, ReplicaSet
from lockstep.stopping import STOP
from lockstep.streams import DEFAULT_GENERATOR_LOCK, DefaultGeneratorGuard
from lockstep.updaters.compute.shares import RankShare
from lockstep.updaters.setup.batches import Conversion, DeviceShards, batch_size

CopyAhead: TypeAlias = "bool | Literal['auto']"
"""Whether batches are copied one update ahead; "auto" where that can change no result."""

LOG: Final = logging.getLogger("lockstep")

_VALUES: Final = (type(None), bool, int, float, complex, str, bytes)
"""The types of values in a shard that have no memory on a device."""


@dataclass(eq=False)
class NextBatches:
    """Converts the batches of the next update and copies them to the accelerators on streams of their own.

    The iterator is not advanced, so its state is the same whether or not a batch has been copied already. Batches that
    cannot be read or converted raise their error in the update that uses them.

    Args:
        iterator: The main iterator.
        replicas: The replicas, which know the devices.
        conversion: Creates the tensors of shards.
        share: Returns the shards of batches of these sizes that this process computes.
        always: Whether batches and converter depend on nothing that happens between two updates. Otherwise only batches
            that worker processes load in advance are copied, and samples only if they are converted by `collate`.
    """

    iterator: Iterator
    replicas: ReplicaSet
    conversion: Conversion
    share: Callable[[Sequence[int]], RankShare]
    always: bool

    def __post_init__(self) -> None:
        self._devices = self.replicas.devices
        # Converters that you write may depend on what happens between two updates.
        self._converts_early = self.always or not self.conversion.is_own
        self._streams = CopyStreams(self.replicas.accelerators)
        self._copied: tuple[object, Sequence[Any], DeviceShards] | None = None
        """What tensors are for, the batches as the iterator has returned them, and the tensors of their shards."""
        self._has_ended = False

    def take(self, batches: Sequence[Any], share: RankShare, first: int) -> DeviceShards | None:
        """Return the tensors of the shards of an update if they have been copied; the current streams may use them.

        Args:
            batches: The batches of the update.
            share: Their shards.
            first: The position of the random stream of shard 0.
        """
        copied, taken = self._copied, None
        if copied is not None and copied[0] == _purpose(batches, share, first):
            self._copied, (_, _, taken) = None, copied
            for shards, device in zip(taken, self._devices, strict=True):
                self._streams.hand_over(device, nest.tensors([tensors for _, tensors in shards]))
        self._streams.start()
        return taken

    def copy(self, skip: int, number: int, first: int) -> None:
        """Copy the batches of the next update, if that changes no result.

        Args:
            skip: The number of batches before them that the iterator has not passed yet.
            number: How many they are. If it turns out that the next update has another number of batches, they are
                converted again.
            first: The position of the random stream of shard 0 in that update.
        """
        # A run that is about to end needs no other batch, and must not wait for one.
        if self._has_ended or STOP.received:
            return
        # Other updaters seed the default generator for their shards while they hold this lock.
        with DEFAULT_GENERATOR_LOCK:
            self._copy(skip, number, first)

    def _copy(self, skip: int, number: int, first: int) -> None:
        """Read the next batches and convert them, unless their tensors are there already."""
        guard = DefaultGeneratorGuard()
        batches = self._read(range(skip, skip + number))
        if guard.moved():
            self._end("Reading", "The next numbers that you draw yourself differ from those")
            return
        if len(batches) < number:
            return
        try:
            share = self.share([batch_size(batch, self.conversion.batch_dim) for batch in batches])
            purpose = _purpose(batches, share, first)
            if self._copied is None or self._copied[0] != purpose:
                self._copied = None  # frees its memory first
                self._copied = purpose, batches, self._convert(batches, share, first)
        except Exception as error:  # noqa: BLE001 - raised in the update that converts the batches again
            LOG.debug("The batches of the next update were not copied ahead: %r", error)
        if guard.moved():
            guard.restore()
            self._copied = None
            self._end("Converting", "The results are those")

    def _read(self, positions: range) -> list[Any]:
        """Return the next batches up to the first that must not be read or converted early."""
        batches: list[Any] = []
        for ahead in positions:
            batch = self.iterator.peek_early(ahead, always=self.always)
            if batch is None or (type(batch) is Samples and not self._converts_early):
                break
            batches.append(batch)
        return batches

    def forget(self) -> None:
        """Free the tensors that have been copied."""
        self._copied = None

    def _convert(self, batches: Sequence[Any], share: RankShare, first: int) -> DeviceShards:
        """Return the tensors of shards, prepared on the copy streams of their devices."""
        device_shards: DeviceShards = []
        for run, device in zip(share.shards_by_device, self._devices, strict=True):
            with self._streams.preparing_on(device):
                device_shards += self.conversion.shards(batches, [run], [device], first)
        opaque = next((part for run in device_shards for _, each in run for part in _opaque(each)), None)
        if opaque is not None:
            self._has_ended = True
            raise TypeError(f"A {type(opaque).__name__} may hold tensors that a copy stream cannot be told of.")
        return device_shards

    def _end(self, what: str, consequence: str) -> None:
        """Copy no more batches ahead, and warn."""
        self._has_ended = True
        warn(
            f"{what} a batch draws from torch's default generator, so batches are not copied to the devices ahead any "
            f"more. {consequence} with copy_ahead=False, which avoids this warning.",
            RandomStreamWarning,
        )


def _purpose(batches: Sequence[Any], share: RankShare, first: int) -> object:
    """Return what the tensors of shards are for: some batches, devices and random streams."""
    # An iterator that has moved or was reset returns other objects.
    return list(map(id, batches)), share.shards_by_device, first


def _opaque(value: Any) -> list[Any]:
    """List the parts of a shard in which tensors cannot be found."""
    parts = nest.parts_of(value)
    if parts is not None:
        return [part for each in parts for part in _opaque(each)]
    return [] if isinstance(value, (*_VALUES, torch.Tensor)) else [value]
