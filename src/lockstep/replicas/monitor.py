"""Statistics of a model at work: of every output, parameter and gradient of every replica and shard."""

from __future__ import annotations

import math
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Protocol, TextIO, TypeAlias

import torch
from torch import nn

from lockstep import nest
from lockstep.arguments import check_number
from lockstep.errors import OrderError
from lockstep.plan import Shard
from lockstep.replicas.batch.inputs import number_positions, positional_names
from lockstep.replicas.pool.devices import NULL_CONTEXT
from lockstep.state import check_keys

Statistic: TypeAlias = "Callable[[torch.Tensor], torch.Tensor | float]"
"""A function that reduces a tensor to one number, on the device of the tensor."""

_Place: TypeAlias = "tuple[int, int]"
"""The index of a replica, and the number of the shard that it computes."""

_NAME_OF: Final = attrgetter("name")


def rms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the root mean square of a tensor, computed in float32 or a wider dtype.

    Args:
        tensor: The tensor. Of an empty one the result is 0.

    >>> rms(torch.tensor([3.0, -3.0]))
    tensor(3.)
    """
    wide = tensor if tensor.dtype in (torch.float32, torch.float64) else tensor.float()
    norm: torch.Tensor = torch.linalg.vector_norm(wide)
    return norm / math.sqrt(max(tensor.numel(), 1))


@dataclass(frozen=True, slots=True)
class MonitorRow:
    """One number that a monitor has recorded.

    Attributes:
        step: The step in which it was recorded, counted from 1 by `Monitor.tic`.
        name: ``"fc1.output"`` for the output of a module, ``"fc1.weight"`` for a parameter or buffer, the name of an
            argument for an input of the model, and ``".grad"`` added to it for the gradient there. Tensors in a nest
            are named by their path, such as ``"lstm.output[1][0]"``. The output of the model itself is ``"output"``.
        value: The statistic.
        nonfinite: The number of elements that are infinite or NaN.
        replica: The index of the replica, or None for a buffer, which belongs to the model itself.
        device: The device on which it was computed.
        shard: The number of the shard, or None for a parameter or buffer, which belongs to no shard.
    """

    step: int
    name: str
    value: float
    nonfinite: int
    replica: int | None
    device: str
    shard: int | None

    def __str__(self) -> str:
        """Return the row as one line of a table."""
        where = [self.device]
        where += [] if self.replica is None else [f"replica {self.replica}"]
        where += [] if self.shard is None else [f"shard {self.shard}"]
        where += [f"{self.nonfinite} not finite"] if self.nonfinite else []
        return f"{self.step:>7}  {self.name:<32} {self.value:>13.6g}  {', '.join(where)}"


class Replicated(Protocol):
    """An object that has replicas of a model."""

    @property
    def model(self) -> nn.Module:
        """The original model."""

    @property
    def replicas(self) -> list[nn.Module]:
        """The replicas, one per device."""


_Step: TypeAlias = "list[tuple[bool, MonitorRow]]"
"""The rows of a monitored step, which the threads of several devices append, each with whether it is of a backward."""


class Monitor:
    """A monitor that records a statistic of what a model computes, at an interval of steps.

    Install it on a `ReplicaGroup` or a `DataParallel`, and call `tic` before and `toc` after each step, which may have
    several forwards and backwards. In a monitored step, the replicas have hooks while their shards are computed.
    Statistics are computed on each device, and the host waits for each of them. In all other steps, and if no monitor
    is installed, nothing is done.

    Rows are in this order: inputs and outputs of the forward, by replica, shard and time; then gradients of the
    backward in the same order; then parameters, by replica; then the buffers of the model.

    Args:
        interval: The number of steps from one monitored step to the next, at least 1. The first step is monitored.
        stat: A function that reduces a tensor to one number. It must not draw random numbers, which would come from the
            stream of the shard, and several threads may call it at the same time.
        pattern: A regular expression that must match the beginning of the name of a row.
        sort: Whether rows are sorted by name. Rows of the same name keep their order.

    Raises:
        ValueError: If the interval is less than 1, or the pattern is not a regular expression.

    Determinism: Monitoring does not change the bits of what is monitored.

    References: MXNet 1.9, ``mxnet.monitor.Monitor``, which reports neither the device nor where a gradient is.

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
        check_number("interval", interval, least=1)
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(f"`pattern` must be a regular expression, got {pattern!r}: {error}.") from error
        self.interval = interval
        self.stat = stat
        self.sort = sort
        self.step = 0
        """The number of steps that have begun."""
        self._sources: list[weakref.ref[Replicated]] = []
        self._rows: _Step | None = None

    @property
    def active(self) -> bool:
        """Whether the current step is monitored."""
        return self._rows is not None

    def attach(self, source: Replicated) -> None:
        """Report the parameters and buffers of an object, which calls this when the monitor is installed on it.

        Args:
            source: The object with replicas. The monitor does not keep it alive.
        """
        if all(reference() is not source for reference in self._sources):
            self._sources.append(weakref.ref(source))

    def tic(self) -> None:
        """Begin a step, and monitor it if the interval has passed.

        Raises:
            OrderError: If the previous step is monitored and `toc` has not been called.
        """
        if self._rows is not None:
            raise OrderError("The rows of a monitored step must be read by `toc` before the next `tic`.")
        if self.step % self.interval == 0:
            self._rows = []
        self.step += 1

    def toc(self) -> list[MonitorRow]:
        """End a step.

        Returns:
            The rows of the step, or an empty list if it was not monitored.
        """
        if self._rows is None:
            return []
        step, self._rows = self._rows, None
        # Threads append in an order that varies. Within a replica and shard the order is that of time, since sorting is
        # stable.
        rows = [row for _, row in sorted(step, key=lambda each: (each[0], each[1].replica, each[1].shard))]
        rows += [row for reference in self._sources for row in self._state_of(reference())]
        return sorted(rows, key=_NAME_OF) if self.sort else rows

    def toc_print(self, file: TextIO | None = None) -> None:
        """End a step, and write its rows as lines.

        Args:
            file: The file to write to, or None for standard output.
        """
        out = sys.stdout if file is None else file
        out.writelines(f"{row}\n" for row in self.toc())
        # A pipe is buffered, and its reader may follow the run while it goes on.
        out.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a saved state.

        Args:
            state: A state that `state_dict` returned.

        Raises:
            StateError: If a key is missing or unknown.
        """
        check_keys(state, ["step"], of="a Monitor")
        self.step = state["step"]

    def forward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Return a context manager that monitors the forward of one shard, entered by the thread that computes it.

        Args:
            place: The index of the replica.
            shard: The shard.
            replica: The replica.
        """
        step = self._rows
        return NULL_CONTEXT if step is None else self._forward(step, (place, shard.index), replica)

    def backward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Return a context manager that monitors the gradients of parameters in the backward of one shard.

        Args:
            place: The index of the replica.
            shard: The shard.
            replica: The replica.
        """
        step = self._rows
        return NULL_CONTEXT if step is None else self._backward(step, (place, shard.index), replica)

    @contextmanager
    def _forward(self, step: _Step, at: _Place, replica: nn.Module) -> Iterator[None]:
        def measure(name: str, value: Any) -> None:
            for path, tensor in nest.named_tensors(value, name):
                self._measure(step, at, path, tensor)
                if tensor.requires_grad and self._pattern.match(f"{path}.grad"):
                    tensor.register_hook(self._gradient_hook(step, at, path))  # type: ignore[no-untyped-call]

        def measure_inputs(_module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            names = number_positions(positional_names(replica.forward), len(args))
            for name, value in {**dict(zip(names, args, strict=True)), **kwargs}.items():
                measure(name, value)

        def measure_output(name: str) -> Callable[[nn.Module, Any, Any], None]:
            return lambda _module, _inputs, output: measure(name, output)

        names = {module: f"{name}.output".lstrip(".") for name, module in replica.named_modules()}
        with ExitStack() as hooks:
            hooks.callback(replica.register_forward_pre_hook(measure_inputs, with_kwargs=True).remove)
            for module, name in names.items():
                hooks.callback(module.register_forward_hook(measure_output(name)).remove)
            yield

    @contextmanager
    def _backward(self, step: _Step, at: _Place, replica: nn.Module) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, parameter in replica.named_parameters():
                if parameter.requires_grad and self._pattern.match(f"{name}.grad"):
                    hook = parameter.register_hook(self._gradient_hook(step, at, name))  # type: ignore[no-untyped-call]
                    hooks.callback(hook.remove)
            yield

    def _gradient_hook(self, step: _Step, at: _Place, name: str) -> Callable[[torch.Tensor], None]:
        return lambda gradient: self._measure(step, at, f"{name}.grad", gradient, backward=True)

    def _measure(self, step: _Step, at: _Place, name: str, tensor: torch.Tensor, *, backward: bool = False) -> None:
        """Measure one tensor, unless the step that it belongs to is over."""
        # A backward may run after `toc`, or in a later step.
        if step is self._rows and self._pattern.match(name):
            step.append((backward, self._row(name, tensor, *at)))

    def _state_of(self, source: Replicated | None) -> Iterator[MonitorRow]:
        """Measure the parameters of every replica, and the buffers."""
        if source is None:
            return
        for index, replica in enumerate(source.replicas):
            for name, parameter in replica.named_parameters():
                if self._pattern.match(name):
                    yield self._row(name, parameter, index)
        for name, buffer in source.model.named_buffers():
            if self._pattern.match(name):
                yield self._row(name, buffer)

    @torch.no_grad()
    def _row(self, name: str, tensor: torch.Tensor, replica: int | None = None, shard: int | None = None) -> MonitorRow:
        # Detached, so that a statistic neither records a graph nor changes the tensor's own.
        plain = tensor.detach()
        value = torch.as_tensor(self.stat(plain))
        if value.numel() != 1:
            raise ValueError(f"`stat` must return one number for a tensor, got shape {tuple(value.shape)}.")
        nonfinite = int(plain.isfinite().logical_not().sum())
        return MonitorRow(self.step, name, float(value), nonfinite, replica, str(plain.device), shard)
