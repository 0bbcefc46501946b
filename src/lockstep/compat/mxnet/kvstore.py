"""MXNet's store of values by key: it sums what devices push, and moves a value by the sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from lockstep.communicators import Communicator, LocalCommunicator, find_communicator
from lockstep.compat.mxnet.key_updates import Make, OptimizerPerKey, Update, become
from lockstep.compat.mxnet.keys import Key, Keys, Values, by_key
from lockstep.compat.mxnet.two_bits import TwoBits
from lockstep.errors import OrderError, StateError
from lockstep.state import check_keys
from lockstep.tree import PartialSum, total

ALONE: Final = ("local", "device", "nccl")
"""Stores of one process. (MXNet adds on the CPU in the first, on a device in the others.)"""
JOINED: Final = ("dist_sync", "dist_device_sync", "dist_sync_device")
"""Stores of all processes of a run."""


class KVStore:
    """Values by key, which devices and processes push to and pull from.

    Peculiar to MXNet: without an updater a value **becomes** the sum of what was pushed, whatever it was.
    A `ParallelUpdater` needs none of this: it sums and steps by itself.

    Args:
        name: One of `ALONE`, or of `JOINED` for the sum over all processes of the run.
        communicator: Joins the processes; by default found in the environment.

    Attributes:
        type: The name.

    Raises:
        ValueError: There is no such store. (The original takes another name for "local".)

    Determinism: sums over devices, and then over processes, are made in the order of `lockstep.tree`.

    References: Apache MXNet 1.9.1, ``mxnet.kvstore``.

    >>> import torch
    >>> store = KVStore("device")
    >>> store.init("w", torch.zeros(2))
    >>> store.set_optimizer(lambda parameters: torch.optim.SGD(parameters, lr=0.5))
    >>> store.push("w", [torch.ones(2), torch.ones(2)])
    >>> store.pull("w", out := torch.empty(2))
    >>> out
    tensor([-1., -1.])
    """

    def __init__(self, name: str = "local", *, communicator: Communicator | None = None) -> None:
        if name not in (*ALONE, *JOINED):
            raise ValueError(f"`name` must be one of {(*ALONE, *JOINED)}, got {name!r}.")
        self.type = name
        found = find_communicator if name in JOINED else LocalCommunicator
        self._communicator = found() if communicator is None else communicator
        self._values: dict[Key, Tensor] = {}
        self._updater: Update = become
        self._compression: TwoBits | None = None

    @property
    def rank(self) -> int:
        """This process's index."""
        return self._communicator.rank

    @property
    def num_workers(self) -> int:
        """How many processes there are."""
        return self._communicator.size

    @property
    def optimizers(self) -> Mapping[Key, Optimizer]:
        """The optimizer of each key, for its rates, after `set_optimizer`."""
        return self._updater.optimizers if isinstance(self._updater, OptimizerPerKey) else {}

    def init(self, key: Keys, value: Values) -> None:
        """Give new keys their first values, those of rank 0.

        Raises:
            OrderError: A key has a value already.
            TypeError: Some keys are numbers and some are words.
        """
        given = by_key(key, value)
        names = list(self._values)
        for name, _ in given:
            if name in names:
                raise OrderError(f"`init` must be called once a key, got {name!r} again.")
            if any(isinstance(name, str) != isinstance(other, str) for other in names):
                raise TypeError(f"`key` must be all numbers or all words, got {name!r}.")
            names.append(name)
        for name, (first, *_) in given:
            self._values[name] = first.detach().clone()
            self._communicator.broadcast([self._values[name]])
            if isinstance(self._updater, OptimizerPerKey):
                self._updater.add(name, self._values[name])

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:
        """Add up what the devices and all processes bring, and have the updater move the values by the sums.

        Args:
            key: One, or several; one that comes twice is pushed once, with the tensors of both.
            value: For each key a tensor, or one a device; left as they are.
            priority: Changes nothing, for all is done at once.

        Raises:
            OrderError: A key has no value yet.
            ValueError: A shape differs from the value's.
        """
        del priority
        pushed = self._checked(key, value, "value")
        sums = [self._sum(name, parts) for name, parts in pushed]
        self._communicator.all_reduce(sums)
        for (name, _), summed in zip(pushed, sums, strict=True):
            self._updater(name, summed, self._values[name])

    def pull(self, key: Keys, out: Values, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy values to tensors.

        Args:
            key: One, or several.
            out: For each key a tensor, or one a device.
            priority: Changes nothing.
            ignore_sparse: Changes nothing: values are dense.

        Raises:
            OrderError: A key has no value yet.
            ValueError: A shape differs from the value's.
        """
        del priority, ignore_sparse
        for name, targets in self._checked(key, out, "out"):
            for target in targets:
                target.detach().copy_(self._values[name])

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push, then pull; to what was pushed, where there is no other place."""
        self.push(key, value, priority)
        self.pull(key, value if out is None else out, priority)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Give new keys their first values, and pull them."""
        self.init(key, value)
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: Make, *, rescale_grad: float = 1.0) -> None:
        """Have an optimizer move the values, one of its own for each key.

        Args:
            optimizer: Makes one of a list of parameters, as torch's and lockstep's classes do.
            rescale_grad: Sums are multiplied by it first; 1 / batch size where losses are sums over samples.
        """
        updates = OptimizerPerKey(optimizer, rescale_grad)
        for name, value in self._values.items():
            updates.add(name, value)
        self._updater = updates

    def set_updater(self, updater: Update) -> None:
        """Have a function move the values.

        Args:
            updater: Called as ``updater(key, sum, value)``; changes the value in place.
        """
        self._updater = updater

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Round what travels to two bits: what each device pushes, or each process where there are several.

        Args:
            compression_params: "type", which is "2bit", and "threshold", by default 0.5.

        Raises:
            ValueError: There is no such compression, or the store is "local".
        """
        options = dict(compression_params)
        if options.pop("type", None) != "2bit" or self.type == "local" or options.keys() - {"threshold"}:
            raise ValueError(
                "`compression_params` must be of type '2bit' for a store that is not 'local', "
                f"with a 'threshold' at most, got {dict(compression_params)} for {self.type!r}."
            )
        self._compression = TwoBits(**options)

    def state_dict(self) -> dict[str, Any]:
        """Give the values, the optimizers' states, and what compression has kept back."""
        updates, compression = self._updater, self._compression
        return {
            "values": {str(name): value.clone() for name, value in self._values.items()},
            "optimizers": updates.state_dict() if isinstance(updates, OptimizerPerKey) else None,
            "residuals": None if compression is None else compression.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state, in a store with the same keys and the same optimizers.

        Raises:
            StateError: Keys are missing or unknown.
        """
        check_keys(state, ["values", "optimizers", "residuals"], of="a KVStore")
        check_keys(state["values"], map(str, self._values), of="a KVStore's values")
        parts = {"optimizers": self._updater, "residuals": self._compression}
        for what, part in parts.items():
            here, there = isinstance(part, OptimizerPerKey | TwoBits), state[what] is not None
            if here != there:
                raise StateError(f"A KVStore must have {what} where its saved state has ({there}), got {here}.")
        for key, value in self._values.items():
            value.copy_(state["values"][str(key)])
        for what, part in parts.items():
            if isinstance(part, OptimizerPerKey | TwoBits):
                part.load_state_dict(state[what])

    def _checked(self, key: Keys, tensors: Values, argument: str) -> list[tuple[Key, list[Tensor]]]:
        """Give the tensors of each key, which must have a value of their shape."""
        found: dict[Key, list[Tensor]] = {}
        for name, parts in by_key(key, tensors, argument):
            found.setdefault(name, []).extend(parts)
        for name, parts in found.items():
            if name not in self._values:
                raise OrderError(f"`init` must come before any other call for a key, and {name!r} has no value.")
            shape = self._values[name].shape
            strange = [tuple(part.shape) for part in parts if part.shape != shape]
            if strange:
                raise ValueError(f"`{argument}` for {name!r} must have the shape {tuple(shape)}, got {strange[0]}.")
        return list(found.items())

    def _sum(self, name: Key, parts: list[Tensor]) -> Tensor:
        """Add up what the devices of this process bring."""
        value = self._values[name]
        brought = [part.detach().to(value.device, value.dtype, copy=True) for part in parts]
        if self._compression is not None and self.type in ALONE:
            brought = [self._compression.sent(f"{name}/{place}", part) for place, part in enumerate(brought)]
        total([PartialSum(place, [part]) for place, part in enumerate(brought)])
        summed = brought[0]  # which the others were added to
        if self._compression is not None and self.type in JOINED:
            return self._compression.sent(f"{name}", summed)
        return summed


def create(name: str = "local") -> KVStore:
    """Make a store, as ``mxnet.kvstore.create`` does."""
    return KVStore(name)
