"""MXNet's key-value store, which sums what devices push and updates its values with the sums."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.arguments import check_choice, check_number
from lockstep.communicators import Communicator, LocalCommunicator, find_communicator
from lockstep.errors import DisagreementError, OrderError, StateError
from lockstep.state import check_keys
from lockstep.tree import PartialSum, total

Key: TypeAlias = "int | str"
Keys: TypeAlias = "Key | Sequence[Key]"
Values: TypeAlias = "Tensor | Sequence[Tensor] | Sequence[Sequence[Tensor]]"
"""A tensor, or one tensor per device; for several keys, one of these for each key."""


def group_by_key(key: Keys, tensors: Values, argument: str = "value") -> list[tuple[Key, list[Tensor]]]:
    """Pair each key with its tensors.

    Args:
        key: One key, or a list of keys.
        tensors: For each key a tensor, or one tensor per device.
        argument: The name of the tensors in error messages.

    Raises:
        ValueError: If the numbers of keys and values differ, or a key has no tensor.

    >>> import torch
    >>> [(name, len(parts)) for name, parts in group_by_key(["w", "b"], [torch.ones(1), [torch.ones(1)] * 2])]
    [('w', 1), ('b', 2)]
    """
    several = not isinstance(key, (int, str))
    keys = list(cast("Sequence[Key]", key)) if several else [cast("Key", key)]
    given = list(cast("Sequence[Tensor | Sequence[Tensor]]", tensors if several else [tensors]))
    if len(keys) != len(given):
        raise ValueError(f"`key` must hold as many keys as there are values ({len(given)}), got {len(keys)}.")
    paired = [(name, [one] if isinstance(one, Tensor) else list(one)) for name, one in zip(keys, given, strict=True)]
    empty = [name for name, parts in paired if not parts]
    if empty:
        raise ValueError(f"`{argument}` must hold a tensor for each key, and {empty[0]!r} has none.")
    return paired


OptimizerFactory: TypeAlias = "Callable[[list[nn.Parameter]], Optimizer]"
UpdateFunction: TypeAlias = "Callable[[Key, Tensor, Tensor], object]"
"""A function of a key, the sum of the pushed tensors, and the value, which it changes in place."""


def assign_sum(_: Key, summed: Tensor, value: Tensor) -> None:
    """Set the value to the sum."""
    value.copy_(summed.to_dense())


class OptimizerPerKey:
    """Updates each value with its own optimizer.

    Args:
        make: A function that creates an optimizer for a list of parameters, such as the classes of torch and
            lockstep.
        rescale_grad: The factor that sums are multiplied by first.

    Attributes:
        optimizers: The optimizers by key.
    """

    def __init__(self, make: OptimizerFactory, rescale_grad: float) -> None:
        self._make = make
        self._rescale_grad = rescale_grad
        self.optimizers: dict[Key, Optimizer] = {}

    def add(self, key: Key, value: Tensor) -> None:
        """Add a key, whose value becomes the only parameter of its optimizer."""
        # The parameter shares the memory of the value, so that a step changes the value.
        self.optimizers[key] = self._make([nn.Parameter(value)])

    def __call__(self, key: Key, summed: Tensor, _: Tensor) -> None:
        """Apply a step with the sum as gradient, which is changed in place, and so is the value, by the parameter."""
        optimizer = self.optimizers[key]
        ((parameter,),) = (group["params"] for group in optimizer.param_groups)
        parameter.grad = summed.mul_(self._rescale_grad)
        optimizer.step()
        # The sum would otherwise stay in memory until the next push.
        parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer."""
        return {str(key): each.state_dict() for key, each in self.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load saved states of the same keys.

        Raises:
            StateError: If keys are missing or unknown.
        """
        check_keys(state, map(str, self.optimizers), of="a KVStore's optimizers")
        for key, each in self.optimizers.items():
            each.load_state_dict(state[str(key)])


@dataclass(eq=False)
class TwoBitCompression:
    """Compress a gradient to the elements beyond a threshold, each sent as plus or minus the threshold.

    With gradient g, residual r, threshold t and the sent value s, elementwise::

        r ← r + g
        s = t where r ≥ t, -t where r ≤ -t, else 0
        r ← r - s

    Args:
        threshold: The threshold t, above 0.

    Attributes:
        residuals: The residual r of each sender, zeros before its first gradient.

    Raises:
        ValueError: If the threshold is out of range.

    References: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech
    2015, for the threshold and the residual.

    >>> compression = TwoBitCompression(0.5)
    >>> [compression.compress("w", torch.tensor([0.3])).item() for _ in range(4)]
    [0.0, 0.5, 0.0, 0.5]
    """

    threshold: float = 0.5
    residuals: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, above=0, finite=True)

    def compress(self, sender: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return the values that the receiver gets for a gradient, and keep the rest in the residual.

        Args:
            sender: The name of the sender, which has its own residual.
            gradient: The gradient; left untouched.
        """
        residual = self.residuals.setdefault(sender, torch.zeros_like(gradient)).add_(gradient)
        above, below = residual >= self.threshold, residual <= -self.threshold
        sent = (above.to(residual.dtype) - below.to(residual.dtype)) * self.threshold
        residual.sub_(sent)
        return sent

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the residuals."""
        return {sender: residual.clone() for sender, residual in self.residuals.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load saved residuals, of any senders: a residual is created when its sender sends first."""
        self.residuals = {sender: residual.clone() for sender, residual in state.items()}


SINGLE_PROCESS_STORES: Final = ("local", "device", "nccl")
"""The stores of one process. (In MXNet the first sums on the CPU, the others on a device.)"""
DISTRIBUTED_STORES: Final = ("dist_sync", "dist_device_sync", "dist_sync_device")
"""The stores of all processes of a run."""


class KVStore:
    """Values by key, which devices and processes push to and pull from.

    Specific to MXNet: without an updater, a value is **replaced** by the sum of the pushed tensors.
    `ParallelUpdater` does not need a store: it sums gradients and steps the optimizer itself.

    Args:
        name: One of `SINGLE_PROCESS_STORES`, or of `DISTRIBUTED_STORES` to sum over all processes of the run.
        communicator: The communicator of the processes; by default determined from the environment.

    Attributes:
        type: The name.

    Raises:
        ValueError: If there is no such store. (MXNet treats unknown names as "local".)

    Determinism: sums over devices, and then over processes, are computed in the order of `lockstep.tree`.

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
        check_choice("name", name, (*SINGLE_PROCESS_STORES, *DISTRIBUTED_STORES))
        self.type = name
        default = find_communicator if name in DISTRIBUTED_STORES else LocalCommunicator
        self._communicator = default() if communicator is None else communicator
        self._values: dict[Key, Tensor] = {}
        self._updater: UpdateFunction = assign_sum
        self._compression: TwoBitCompression | None = None

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self._communicator.rank

    @property
    def num_workers(self) -> int:
        """The number of processes."""
        return self._communicator.size

    @property
    def optimizers(self) -> Mapping[Key, Optimizer]:
        """The optimizer of each key, after `set_optimizer`."""
        return self._updater.optimizers if isinstance(self._updater, OptimizerPerKey) else {}

    def init(self, key: Keys, value: Values) -> None:
        """Set the initial values of new keys to those of rank 0.

        Args:
            key: One key, or a list of keys.
            value: For each key a tensor, or one tensor per device, of which the first is used.

        Raises:
            OrderError: If a key already has a value.
            TypeError: If some keys are integers and others are strings.
        """
        given = group_by_key(key, value)
        # All keys are checked before the first value is stored.
        names = list(self._values)
        for name, _ in given:
            if name in names:
                raise OrderError(f"`init` must be called once per key, got {name!r} again.")
            if any(isinstance(name, str) != isinstance(other, str) for other in names):
                raise TypeError(f"`key` must be all integers or all strings, got {name!r}.")
            names.append(name)
        for name, (first, *_) in given:
            self._values[name] = first.detach().to_dense().clone()
            self._communicator.broadcast([self._values[name]])
            if isinstance(self._updater, OptimizerPerKey):
                self._updater.add(name, self._values[name])

    def push(self, key: Keys, value: Values, priority: int = 0) -> None:  # noqa: ARG002 - nothing waits
        """Sum the tensors of all devices and processes, and update the values with the sums.

        Args:
            key: One key, or a list of keys; a key that occurs twice is pushed once, with the tensors of both.
            value: For each key a tensor, or one tensor per device, which may be sparse; left untouched. If all tensors
                of a key are sparse, so is their sum, and the optimizer of the key must accept sparse gradients.
            priority: Ignored, because all operations are synchronous.

        Raises:
            OrderError: If a key has no value yet.
            ValueError: If a shape differs from that of the value.
            DisagreementError: If the processes push other keys, or the same ones in another order.
        """
        pushed = self._checked(key, value, "value")
        keys = [name for name, _ in pushed]
        for rank, others in enumerate(self._communicator.exchange_json(keys)):
            if others != keys:
                raise DisagreementError(
                    f"All processes must push the same keys in the same order, got {keys} on rank {self.rank} and "
                    f"{others} on rank {rank}. Sort them if they come from a set.",
                    rank=rank,
                    subject="the pushed keys",
                )
        sums = [self._sum(name, parts) for name, parts in pushed]
        # One call for all keys, which sends fewer messages.
        self._communicator.all_reduce(sums)
        for (name, _), summed in zip(pushed, sums, strict=True):
            self._updater(name, summed, self._values[name])

    def pull(self, key: Keys, out: Values, priority: int = 0, ignore_sparse: bool = True) -> None:  # noqa: ARG002 - as above
        """Copy values to tensors.

        Args:
            key: One key, or a list of keys.
            out: For each key a tensor, or one tensor per device; changed in place.
            priority: Ignored, because all operations are synchronous.
            ignore_sparse: Ignored, because values are dense.

        Raises:
            OrderError: If a key has no value yet.
            ValueError: If a shape differs from that of the value, or a tensor is sparse.
        """
        for name, targets in self._checked(key, out, "out"):
            for target in targets:
                target.detach().copy_(self._values[name])

    def pushpull(self, key: Keys, value: Values, out: Values | None = None, priority: int = 0) -> None:
        """Push, then pull, by default to the pushed tensors.

        Args:
            key: One key, or a list of keys.
            value: For each key a tensor, or one tensor per device.
            out: The tensors to copy the values to; by default those of ``value``.
            priority: Ignored, because all operations are synchronous.
        """
        targets = value if out is None else out
        # Before anything is pushed.
        self._checked(key, targets, "out")
        self.push(key, value, priority)
        self.pull(key, targets, priority)

    def broadcast(self, key: Keys, value: Values, out: Values, priority: int = 0) -> None:
        """Set the initial values of new keys, and pull them.

        Args:
            key: One key, or a list of keys.
            value: The initial values, see `init`.
            out: For each key a tensor, or one tensor per device; changed in place.
            priority: Ignored, because all operations are synchronous.
        """
        self.init(key, value)
        self.pull(key, out, priority)

    def set_optimizer(self, optimizer: OptimizerFactory, *, rescale_grad: float = 1.0) -> None:
        """Update the values with an optimizer per key.

        Args:
            optimizer: A function that creates an optimizer for a list of parameters, such as the classes of torch
                and lockstep.
            rescale_grad: The factor that sums are multiplied by first: 1 / batch size for losses that are sums over
                samples.
        """
        updates = OptimizerPerKey(optimizer, rescale_grad)
        for name, value in self._values.items():
            updates.add(name, value)
        self._updater = updates

    def set_updater(self, updater: UpdateFunction) -> None:
        """Update the values with a function.

        Args:
            updater: A function ``updater(key, sum, value)`` that changes the value in place.
        """
        self._updater = updater

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress the tensors that are sent to two bits per element: those of each device, or of each process.

        Args:
            compression_params: A dict with "type", which must be "2bit", and "threshold", by default 0.5.

        Raises:
            ValueError: If there is no such compression, or the store is "local".
        """
        options = dict(compression_params)
        if options.pop("type", None) != "2bit" or self.type == "local" or options.keys() - {"threshold"}:
            raise ValueError(
                "`compression_params` must be of type '2bit' for a store that is not 'local', "
                f"with a 'threshold' at most, got {dict(compression_params)} for {self.type!r}."
            )
        self._compression = TwoBitCompression(**options)

    def state_dict(self) -> dict[str, Any]:
        """Return the values, the states of the optimizers, and the residuals of the compression."""
        updates, compression = self._updater, self._compression
        return {
            "values": {str(name): value.clone() for name, value in self._values.items()},
            "optimizers": updates.state_dict() if isinstance(updates, OptimizerPerKey) else None,
            "residuals": None if compression is None else compression.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state; the store must have the same keys, and optimizers and compression just as the state has.

        Raises:
            StateError: If keys are missing or unknown.
        """
        check_keys(state, ["values", "optimizers", "residuals"], of="a KVStore")
        check_keys(state["values"], map(str, self._values), of="a KVStore's values")
        parts = {"optimizers": self._updater, "residuals": self._compression}
        for what, part in parts.items():
            here, there = isinstance(part, OptimizerPerKey | TwoBitCompression), state[what] is not None
            if here != there:
                raise StateError(f"A KVStore must have {what} where its saved state has ({there}), got {here}.")
        # In place, because the parameters of the optimizers share this memory.
        for key, value in self._values.items():
            value.copy_(state["values"][str(key)])
        for what, part in parts.items():
            if isinstance(part, OptimizerPerKey | TwoBitCompression):
                part.load_state_dict(state[what])

    def _checked(self, key: Keys, tensors: Values, argument: str) -> list[tuple[Key, list[Tensor]]]:
        """Return the tensors of each key, after checking that the key has a value of their shape."""
        found: dict[Key, list[Tensor]] = {}
        for name, parts in group_by_key(key, tensors, argument):
            found.setdefault(name, []).extend(parts)
        for name, parts in found.items():
            if name not in self._values:
                raise OrderError(f"`init` must come before any other call for a key, and {name!r} has no value.")
            shape = self._values[name].shape
            others = [tuple(part.shape) for part in parts if part.shape != shape]
            if argument == "out" and any(part.layout is not torch.strided for part in parts):
                raise ValueError(f"`out` for {name!r} must be dense, got a sparse tensor. Pass a dense `out`.")
            if others:
                raise ValueError(f"`{argument}` for {name!r} must have the shape {tuple(shape)}, got {others[0]}.")
        return list(found.items())

    def _sum(self, name: Key, parts: list[Tensor]) -> Tensor:
        """Sum the tensors of the devices of this process."""
        value = self._values[name]
        # Only sparse tensors of one form can be added to each other, and only dense ones compressed.
        kinds = {part.sparse_dim() if part.layout is torch.sparse_coo else None for part in parts}
        if self._compression is not None or len(kinds) > 1 or None in kinds:
            parts = [part.to_dense() for part in parts]
        # Copies, because the sum is computed in place.
        addends = [part.detach().to(value.device, value.dtype, copy=True) for part in parts]
        # As in MXNet: compressed where tensors leave a device, or else where they leave the process.
        if self._compression is not None and self.type in SINGLE_PROCESS_STORES:
            addends = [self._compression.compress(f"{name}/{index}", part) for index, part in enumerate(addends)]
        total([PartialSum(index, [part]) for index, part in enumerate(addends)])
        summed = addends[0]  # which the others were added to
        if self._compression is not None and self.type in DISTRIBUTED_STORES:
            return self._compression.compress(f"{name}", summed)
        return summed


def create(name: str = "local") -> KVStore:
    """Create a store, like ``mxnet.kvstore.create``."""
    return KVStore(name)
