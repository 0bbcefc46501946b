"""Write down the bits of every update: of its shards, of what is trained, and of its loss."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from lockstep.digest import tensor_digest


class Local(threading.local):
    """State of one thread.

    Attributes:
        shard: The shard that the thread computes, as (computation, shard); None outside of shards.
        experiment: Whether the shard is computed once more, to find out what it depends on.
        now: The time that the thread's user code sees; None for the real one.
        streams: The random streams of the shards that the thread computes.
        owner: The updater whose update runs.
        modes: The dispatch modes of a step.
        modules: The names of the modules whose forward runs, the innermost last.
    """

    shard: tuple[int, int] | None = None
    experiment: bool = False
    now: float | None = None
    streams: Any = None
    owner: Any = None
    modes: Any = None
    modules: tuple[str, ...] = ()


LOCAL = Local()


DIGITS: Final = 16
"""Hexadecimal digits of the hashes in a record."""


class UpdatesMade(BaseException):
    """Ends the script after the last update that is compared. It is no `Exception`, which a script may catch."""


def bits(tensor: torch.Tensor) -> str:
    """Return a hash of the bits of a tensor.

    Args:
        tensor: The tensor. One whose bits cannot be read, such as a tensor on the meta device, counts as its type.
    """
    try:
        return tensor_digest(tensor.detach())[:DIGITS]
    except (TypeError, RuntimeError, NotImplementedError):
        return str(type(tensor))


class Recorder:
    """Collects what the shards of an update compute, and writes one line per update.

    Args:
        path: The file to write.
        updates: The number of updates of an updater after which the script ends.

    Attributes:
        computation: The number of gradients computed since the last update.
        inside: How many calls of ``update`` are running: those of updaters may be nested.
        names: The names of the parameters of models, by ``id``.
    """

    def __init__(self, path: Path, updates: int) -> None:
        self._file = path.open("w", encoding="utf-8")
        self._updates = updates
        self._lock = threading.Lock()
        self._sources: dict[int, int] = {}
        self._kept: list[object] = []
        self._made: dict[int, int] = {}
        self._shards: dict[str, dict[str, Any]] = {}
        self.computation = 0
        self.inside = 0
        self.names: dict[int, str] = {}

    def source(self, owner: object) -> int:
        """Return the number of an updater or optimizer, in the order in which they began."""
        if id(owner) not in self._sources:
            self._kept.append(owner)
            self._sources[id(owner)] = len(self._sources)
        return self._sources[id(owner)]

    def updates_of(self, source: int) -> int:
        """Return how many updates the updater or optimizer of a number has made."""
        return self._made.get(source, 0)

    def count(self, owner: object, made: int) -> None:
        """Set the number of updates that an updater has made, some of them perhaps in an earlier process."""
        self._made[self.source(owner)] = made

    def shard(self, computation: int, shard: int, **measured: Any) -> None:
        """Add what was measured of a shard.

        Args:
            computation: The number of the gradient since the last update.
            shard: The index of the shard.
            **measured: Hashes by name, or dicts of them.
        """
        with self._lock:
            self._shards.setdefault(f"{computation}/{shard}", {}).update(measured)

    def take_shards(self) -> dict[str, dict[str, Any]]:
        """Return the shards since the last update, and forget them."""
        with self._lock:
            shards, self._shards, self.computation = self._shards, {}, 0
        return shards

    def update(
        self,
        owner: object,
        kind: str,
        tensors: Mapping[str, torch.Tensor],
        loss: Any = None,
        rates: Sequence[float] = (),
    ) -> None:
        """Write the line of an update, and end the script after the last one.

        Args:
            owner: The updater or optimizer.
            kind: "updater" or "optimizer".
            tensors: What is trained, by name.
            loss: The loss of the update, if it is known.
            rates: The learning rates of the update.

        Raises:
            UpdatesMade: If every updater and optimizer that has begun has made its updates.
        """
        source = self.source(owner)
        number = self._made[source] = self._made.get(source, 0) + 1
        self.write(
            {
                "source": source,
                "kind": kind,
                "update": number,
                "loss": None if loss is None else float(loss).hex(),
                "tensors": {name: bits(tensor) for name, tensor in tensors.items()},
                "shards": self.take_shards(),
                "rates": list(rates),
            }
        )
        most = max(self._made.values())
        if min(self._made.values()) >= self._updates or most >= 3 * self._updates:
            raise UpdatesMade

    def write(self, line: Mapping[str, Any]) -> None:
        """Write one line, and hand it to the system, which keeps it if the process is killed."""
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def of_parameters(
    replica: nn.Module, parameters: Iterable[nn.Parameter], gradients: Iterable[torch.Tensor | None]
) -> dict[str, str]:
    """Return the hashes of gradients by the names of their parameters.

    Args:
        replica: The replica that computed them.
        parameters: The parameters that were trained when the updater was created, some of which may be frozen for now.
        gradients: Their gradients; None where there is none.
    """
    names = {id(parameter): name for name, parameter in replica.named_parameters()}
    return {
        names[id(parameter)]: "none" if gradient is None else bits(gradient)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    }
