"""Look into a model at work: a number for every output, parameter and gradient of every replica and shard."""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, Protocol, TextIO, TypeAlias

import torch
from torch import nn

from lockstep import nest
from lockstep.errors import OrderError
from lockstep.plan import Shard
from lockstep.replicas.batch import argument_names
from lockstep.state import check_keys

NOTHING: Final = nullcontext()

Statistic: TypeAlias = "Callable[[torch.Tensor], torch.Tensor | float]"
"""Makes one number of a tensor, on the tensor's device."""


def rms(tensor: torch.Tensor) -> torch.Tensor:
    """Give the root mean square, in float32 at least.

    >>> rms(torch.tensor([3.0, -3.0]))
    tensor(3.)
    """
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    norm: torch.Tensor = torch.linalg.vector_norm(wide)
    return norm / math.sqrt(max(tensor.numel(), 1))


@dataclass(frozen=True, slots=True)
class MonitorRow:
    """One number that a monitor has taken.

    Attributes:
        step: Which step it belongs to, counted from 1 by `Monitor.tic`.
        name: ``"fc1.output"`` for what a module returned, ``"fc1.weight"`` for a parameter or buffer,
            an argument's name for what was given to the model; with ``".grad"`` the gradient there. A nest
            is taken apart: ``"lstm.output[1][0]"``. The model's own output is ``"output"``.
        value: The statistic.
        nonfinite: How many elements are infinite or no number.
        replica: Which replica, in the order of devices; None for a buffer, which is the model's own.
        device: Where it was taken.
        shard: Which shard; None for parameters and buffers, which belong to none.
    """

    step: int
    name: str
    value: float
    nonfinite: int
    replica: int | None
    device: str
    shard: int | None

    def __str__(self) -> str:
        """Give the row as a line of a table."""
        where = [self.device]
        where += [] if self.replica is None else [f"replica {self.replica}"]
        where += [] if self.shard is None else [f"shard {self.shard}"]
        where += [f"{self.nonfinite} not finite"] if self.nonfinite else []
        return f"{self.step:>7}  {self.name:<32} {self.value:>13.6g}  {', '.join(where)}"


class Replicated(Protocol):
    """What has replicas of a model."""

    devices: list[torch.device]

    @property
    def model(self) -> nn.Module:
        """The original."""

    @property
    def replicas(self) -> list[nn.Module]:
        """One a device."""


@dataclass(frozen=True, slots=True)
class _Spot:
    """Which replica is at which shard."""

    replica: int
    shard: int


class _Phase(IntEnum):
    """The order of rows."""

    FORWARD = 0
    BACKWARD = 1
    STATE = 2


@dataclass(frozen=True, slots=True)
class _Taken:
    """What will be a row: the statistic and the count of what is not finite, still on the device."""

    phase: _Phase
    name: str
    replica: int | None
    device: torch.device
    shard: int | None
    numbers: torch.Tensor


class Monitor:
    """Take a statistic of what a model computes, every so many steps.

    Install it on a `ReplicaGroup` or a `DataParallel`, and put `tic` and `toc` around a step, which may hold
    several forwards and backwards. In a step that is watched, hooks are on the replicas while their shards
    are computed; statistics are taken on each device, and `toc` reads them, once a device. In all other
    steps, and where none is installed, nothing is done.

    Rows come in this order: what was given and computed in forward, by replica, shard and time; gradients in
    backward likewise; then parameters, by replica, and the model's buffers.

    Args:
        interval: Steps from one watched step to the next, at least 1; the first one is watched.
        stat: Makes one number of a tensor; must not draw random numbers, which would be the shard's. It is
            called by several threads at once.
        pattern: A regular expression that the beginning of a row's name must match.
        sort: Whether rows are sorted by name; those of one name stay in order.

    Raises:
        ValueError: The interval is no positive number, or the pattern no regular expression.

    Determinism: what is watched keeps its bits.

    References: MXNet 1.9, ``mxnet.monitor.Monitor``, which says neither the device nor the gradients' place.

    Example:
        >>> from lockstep.replicas import DataParallel
        >>> net = DataParallel(nn.Linear(2, 1), devices=["cpu", "cpu"])
        >>> monitor = Monitor(interval=10, pattern=".*weight")
        >>> net.install_monitor(monitor)
        >>> monitor.tic()
        >>> net(torch.ones(4, 2)).sum().backward()
        >>> [(row.name, row.value, row.replica, row.shard) for row in monitor.toc()][:2]
        [('weight.grad', 2.0, 0, 0), ('weight.grad', 2.0, 1, 1)]
    """

    def __init__(self, interval: int = 1, stat: Statistic = rms, pattern: str = ".*", *, sort: bool = False) -> None:
        if interval < 1:
            raise ValueError(f"`interval` must be at least 1, got {interval}.")
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`pattern` must be a regular expression, got {pattern!r}: {error}.") from error
        self.interval = interval
        self.stat = stat
        self.sort = sort
        self.step = 0
        """How many steps have begun."""
        self._sources: list[weakref.ref[Replicated]] = []
        self._taken: list[_Taken] | None = None

    @property
    def active(self) -> bool:
        """Whether the present step is watched."""
        return self._taken is not None

    def attach(self, source: Replicated) -> None:
        """Report the parameters and buffers of this source too; its owner calls this on installing."""
        if all(known() is not source for known in self._sources):
            self._sources.append(weakref.ref(source))

    def tic(self) -> None:
        """Begin a step, and watch it if its turn has come.

        Raises:
            OrderError: The step before is watched, and `toc` has not taken its rows.
        """
        if self._taken is not None:
            raise OrderError("The rows of a watched step must be taken by `toc` before the next `tic`.")
        if self.step % self.interval == 0:
            self._taken = []
        self.step += 1

    def toc(self) -> list[MonitorRow]:
        """End a step.

        Returns:
            The rows of the step; none where it was not watched.
        """
        if self._taken is None:
            return []
        taken, self._taken = self._taken, None
        taken = sorted(taken, key=lambda each: (each.phase, each.replica or 0, each.shard or 0))
        taken += [each for known in self._sources for each in self._state_of(known())]
        rows = self._read(taken)
        return sorted(rows, key=lambda row: row.name) if self.sort else rows

    def toc_print(self, file: TextIO | None = None) -> None:
        """End a step, and write its rows as lines.

        Args:
            file: Where to; None for the standard output.
        """
        out = sys.stdout if file is None else file
        out.writelines(f"{row}\n" for row in self.toc())
        out.flush()  # a pipe's reader watches the run while it goes on

    def state_dict(self) -> dict[str, Any]:
        """Give the count of steps."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting from a saved state.

        Raises:
            StateError: A key is missing or unknown.
        """
        check_keys(state, ["step"], of="a Monitor")
        self.step = state["step"]

    def forward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Watch the forward of one shard inside a ``with``; the thread that computes it calls this."""
        taken = self._taken
        return NOTHING if taken is None else self._forward(taken, _Spot(place, shard.index), replica)

    def backward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Watch the gradients that the backward of one shard gives to parameters, inside a ``with``."""
        taken = self._taken
        return NOTHING if taken is None else self._backward(taken, _Spot(place, shard.index), replica)

    @contextmanager
    def _forward(self, taken: list[_Taken], spot: _Spot, replica: nn.Module) -> Iterator[None]:
        def given(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            names = argument_names(replica.forward, len(args))
            for name, value in {**dict(zip(names, args, strict=True)), **kwargs}.items():
                self._look(taken, spot, name, value)

        def returned(name: str) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _module, _inputs, output: self._look(taken, spot, name, output)

        names = {module: f"{name}.output".lstrip(".") for name, module in replica.named_modules()}
        handles = [module.register_forward_hook(returned(name)) for module, name in names.items()]
        with _removing([replica.register_forward_pre_hook(given, with_kwargs=True), *handles]):
            yield

    @contextmanager
    def _backward(self, taken: list[_Taken], spot: _Spot, replica: nn.Module) -> Iterator[None]:
        trained = {name: each for name, each in replica.named_parameters() if each.requires_grad}
        with _removing(
            parameter.register_hook(self._gradient_hook(taken, spot, f"{name}.grad"))  # type: ignore[no-untyped-call]
            for name, parameter in trained.items()
            if self._pattern.match(f"{name}.grad")
        ):
            yield

    def _look(self, taken: list[_Taken], spot: _Spot, name: str, value: Any) -> None:
        """Take the numbers of every tensor of a nest now, and of its gradient when that comes."""
        for path, tensor in nest.named_tensors(value, name):
            self._take(taken, _Phase.FORWARD, spot, path, tensor)
            if tensor.requires_grad and self._pattern.match(f"{path}.grad"):
                tensor.register_hook(self._gradient_hook(taken, spot, f"{path}.grad"))  # type: ignore[no-untyped-call]

    def _gradient_hook(self, taken: list[_Taken], spot: _Spot, name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: self._take(taken, _Phase.BACKWARD, spot, name, gradient)

    def _take(self, taken: list[_Taken], phase: _Phase, spot: _Spot, name: str, tensor: torch.Tensor) -> None:
        """Take the numbers of one tensor, unless the step it belongs to is over."""
        if taken is self._taken and self._pattern.match(name):
            numbers = self._numbers(tensor)
            taken.append(_Taken(phase, name, spot.replica, tensor.device, spot.shard, numbers))

    def _state_of(self, source: Replicated | None) -> Iterator[_Taken]:
        """Take the numbers of all parameters, once for each device they are on, and of the buffers."""
        if source is None:
            return
        known: dict[tuple[str, torch.device], torch.Tensor] = {}
        for index, (device, replica) in enumerate(zip(source.devices, source.replicas, strict=True)):
            for name, parameter in replica.named_parameters():
                if self._pattern.match(name):
                    if (name, device) not in known:
                        known[name, device] = self._numbers(parameter)
                    yield _Taken(_Phase.STATE, name, index, device, None, known[name, device])
        for name, buffer in source.model.named_buffers():
            if self._pattern.match(name):
                yield _Taken(_Phase.STATE, name, None, buffer.device, None, self._numbers(buffer))

    @torch.no_grad()
    def _numbers(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the statistic and the count of what is not finite, on the tensor's device."""
        plain = tensor.detach()
        value = torch.as_tensor(self.stat(plain), device=plain.device)
        if value.numel() != 1:
            raise ValueError(f"`stat` must give one number for a tensor, got shape {tuple(value.shape)}.")
        count = plain.isfinite().logical_not().sum()
        return torch.stack([value.detach().reshape(()).double(), count.double()])

    def _read(self, taken: list[_Taken]) -> list[MonitorRow]:
        """Bring the numbers to this program, all of a device at once."""
        numbers: dict[int, list[float]] = {}
        for device in dict.fromkeys(each.device for each in taken):
            indices = [index for index, each in enumerate(taken) if each.device == device]
            read = torch.stack([taken[index].numbers for index in indices]).tolist()
            numbers.update(zip(indices, read, strict=True))
        return [
            MonitorRow(
                self.step,
                each.name,
                numbers[index][0],
                int(numbers[index][1]),
                each.replica,
                str(each.device),
                each.shard,
            )
            for index, each in enumerate(taken)
        ]


@contextmanager
def _removing(handles: Iterable[torch.utils.hooks.RemovableHandle]) -> Iterator[None]:
    """Take hooks away again at the end."""
    registered = list(handles)
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()
