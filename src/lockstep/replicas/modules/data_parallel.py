"""A module that computes its batch on several devices, anywhere in a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from lockstep import nest
from lockstep.integers import check_integer
from lockstep.replicas.batch import BatchDim, Inputs, argument_names, named_inputs, read_inputs
from lockstep.replicas.buffers import BufferRule, trained_buffers
from lockstep.replicas.modules.flat_parameters import FlatParameters, Flattened
from lockstep.replicas.modules.merged_output import BackwardBridge
from lockstep.replicas.modules.nccl import BroadcastingSet
from lockstep.replicas.modules.on_device import ModuleWrapper
from lockstep.replicas.modules.one_graph import attached_forward
from lockstep.replicas.monitor import Monitor
from lockstep.replicas.passes import ForwardBackward
from lockstep.replicas.pool import Devices, ReplicaSet, Timeout


class Prepared(threading.local):
    """Whether the calling thread has been prepared for its work."""

    done = False


@dataclass(frozen=True, slots=True)
class Running:
    """Replicas with their threads, and what runs shards on them."""

    replicas: ReplicaSet
    passes: ForwardBackward
    prepared: Prepared = field(default_factory=Prepared)


class DataParallel(ModuleWrapper):
    """Split the batch over several devices, in the forward and in the backward of any network around.

    The output is that of the whole batch, in the order of its samples, on the first device. It is
    differentiable by inputs and parameters, so any criterion on it, over single samples or the batch as a
    whole, gives the gradient that one device would give, for any split. Backward runs on all replicas at
    once, and gradients are summed over shards in the tree's order.

    The module itself is never run: its replicas follow it before each forward (`train`, `eval`, `apply`,
    `requires_grad_`, hooks, writes to parameters). Its buffers are combined over shards as in an update. Each
    shard draws from its own random stream, keyed by one draw from the default generator per forward. Under a
    `ParallelUpdater` every replica has a `DataParallel` of its own, which cuts the shard further. Activation
    checkpointing belongs into the module; around this one it works, but only the reentrant kind saves memory.
    Under `torch.compile` of a network around it this module runs as it is; compile the module in it beside.

    Shapes: every tensor of the inputs is N long along `dim`, and so is every tensor of the output. A tensor
    without dimensions is given whole to every shard, and so is one without elements along `dim`. An output
    without dimensions is one value for the batch: the mean over shards, weighted by samples.

    Args:
        module: Moved to the first device; ``module`` afterwards too.
        devices: ``"auto"`` for every GPU, else every core; or names, repeats allowed, the main one first.
        dim: The dimension that counts samples; negative ones count from the end.
        num_shards: How many shards a batch is cut into, whatever the devices; None for one a device.
        workloads: Relative speeds of the devices, by which shards are sized or assigned; equal by default.
        flatten_parameters: Lay the parameters end to end in one tensor at the first use, and keep them so.
        use_nccl: Send parameters to other GPUs by NCCL, in one message; asks for `flatten_parameters`. Of no
            effect where there are no two GPUs. Gradients are summed in the tree's order all the same.
        worker_init_fn: Called as ``worker_init_fn(index)``, once in each thread that computes, with the
            index of its device, before its first work. The first device's is the calling thread.
        parallel_backward: Run backward on the replicas at once. False leaves it to autograd in one thread,
            where it can be differentiated again (``create_graph=True``) and whose number of intra-op threads
            its bits depend on: with one they are the same both ways.
        buffers: How buffers are combined over shards, ``"mean"`` or ``"first"``.
        timeout: Seconds after which a device still at work counts as hung; the first one then has a thread of
            its own too. ``"auto"``: half an hour for the threads of the others, while the calling thread
            is not watched. None for never.

    Raises:
        TypeError: `module` is no module, or cannot be copied.
        ValueError: A device, a number or a rule is not what it must be.

    Determinism: with a number of shards the bits of outputs, gradients and buffers depend on the batch, the
    module, that number and the drawn key; not on devices or workloads.

    References: Torch7's cunn ``DataParallelTable`` (2015), whose replicas drifted apart in their buffers.

    Example:
        >>> net = nn.Sequential(DataParallel(nn.Linear(2, 3), devices=["cpu", "cpu"]), nn.Linear(3, 1))
        >>> net(torch.ones(5, 2)).square().mean().backward()
        >>> list(net.state_dict())
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """

    def __init__(
        self,
        module: nn.Module,
        devices: Devices = "auto",
        *,
        dim: int = 0,
        num_shards: int | None = None,
        workloads: Sequence[float] | None = None,
        flatten_parameters: bool = False,
        use_nccl: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        parallel_backward: bool = True,
        buffers: BufferRule = "mean",
        timeout: Timeout = "auto",
    ) -> None:
        super().__init__(module)
        if num_shards is not None:
            check_integer("num_shards", num_shards, minimum=1)
        if use_nccl and not flatten_parameters:
            raise ValueError("`flatten_parameters` must be True where `use_nccl` is, got False.")
        if buffers not in ("mean", "first"):
            raise ValueError(f"`buffers` must be 'mean' or 'first', got {buffers!r}.")
        self.dim = dim
        self.num_shards = num_shards
        self.flatten_parameters = flatten_parameters
        self.use_nccl = use_nccl
        self.worker_init_fn = worker_init_fn
        self.parallel_backward = parallel_backward
        self.timeout = timeout
        self._buffer_rule: BufferRule = buffers
        self._running: Running | None = None
        self._flat: Flattened | None = None
        self._monitor: Monitor | None = None
        self.place_on(devices, workloads)

    def place_on(self, devices: Devices, workloads: Sequence[float] | None = None) -> DataParallel:
        """Compute on other devices from now on; the module goes to the first of them.

        Args:
            devices: As in the constructor.
            workloads: As in the constructor.

        Returns:
            This module.

        Raises:
            ValueError: A device or a workload is not what it must be; nothing has changed.
        """
        replicas = ReplicaSet(self.module, devices, workloads=workloads, timeout=self.timeout)
        self.release()
        self.devices, self.workloads = replicas.devices, replicas.workloads
        self.module.to(self.devices[0])
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the whole batch.

        Args:
            *args: Nests of tensors; what is no tensor is given to every shard as it is.
            **kwargs: The same by name.

        Returns:
            What the module returns, each tensor that of the whole batch, on the first device.

        Raises:
            ReplicaError: The module raised in a shard, or a device hung; it is named.
            ReplicaInterrupt: Ctrl-C came while devices were at work; they are named.
            TypeError: The module returned something that cannot be put together.
            ValueError: The inputs or outputs are not as long as each other, or hold no sample.
        """
        if torch.compiler.is_compiling():
            # Threads have no place in a compiled graph: what surrounds this module is compiled, this is not.
            return torch.compiler.disable(self._run)(args, kwargs)  # type: ignore[no-untyped-call]  # torch's gap
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module on the whole batch."""
        running = self._follow()
        inputs = self._read(args, kwargs)
        main = self.devices[0]
        if torch.is_grad_enabled() and not self.parallel_backward:
            trained = [each for each in self.module.parameters() if each.requires_grad]
            buffers = trained_buffers(self.module)
            forward = attached_forward(running.passes, inputs, trained, buffers, self, flat=self._flat)
            return forward.outputs.nest(forward.outputs.merged(main, attached=True))
        with _own_saved_tensors():
            forward = running.passes.forward(inputs, num_shards=self.num_shards, output_dim=self.dim)
        named = forward.parameters if forward.has_graph else []
        if not named and not any(inputs.wanted):
            return forward.outputs.nest(forward.outputs.merged(main))
        return forward.outputs.nest(
            BackwardBridge(running.passes, forward, [each for _, each in named], main, self._flat).outputs()
        )

    @property
    def model(self) -> nn.Module:
        """The module, which the replicas follow."""
        return self.module

    @property
    def replicas(self) -> list[nn.Module]:
        """The module's copies, one a device."""
        return self._follow().replicas.replicas

    def sync_parameters(self) -> None:
        """Copy the parameters to replicas with memory of their own; every forward does it by itself."""
        self._follow().replicas.refresh()

    def flat_parameters(self) -> FlatParameters:
        """Lay the parameters end to end in one tensor, and keep them so from now on.

        The parameters stay the objects they are; what is written to the flat tensor is theirs at once. Their
        gradients lie in the flat gradient, so a parameter without one has zeros instead of None.

        Returns:
            The values and the gradients, unpacked as ``values, gradients``; ``values`` is a parameter that an
            optimizer takes. After a change of dtype or device, ask again.

        Raises:
            ValueError: The parameters are of several dtypes or on several devices.

        Determinism: some kernels round by where their operands lie in memory, so whether parameters are
        flattened is part of the recipe.
        """
        self.flatten_parameters = True
        flat = self._flatten()
        flat.gather_gradients()
        return flat.tensors

    def install_monitor(self, monitor: Monitor | None) -> None:
        """Let a monitor watch the replicas; None takes it away."""
        self._monitor = monitor
        if monitor is not None:
            monitor.attach(self)
        if self._running is not None:
            self._running.passes.watch = monitor

    def release(self) -> None:
        """Let go of threads and replicas until the next forward."""
        running, self._running = self._running, None
        if running is not None:
            running.passes.release()
            running.replicas.release()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process: threads, replicas, a monitor."""
        return {**self.__dict__, "_running": None, "_flat": None, "_monitor": None}

    def extra_repr(self) -> str:
        """Name the devices and the dimension."""
        return f"devices={[str(device) for device in self.devices]}, dim={self.dim}"

    def _follow(self) -> Running:
        """Make ready to run: parameters laid out, replicas and threads there."""
        if self.flatten_parameters:
            self._flatten()
        running = self._running
        # In a forked process the threads are gone, and a job that is handed to one would never be done.
        if running is None or running.replicas.model is not self.module or running.replicas.is_forked:
            self._running = running = self._start()
        self._prepare_threads(running)
        return running

    def _start(self) -> Running:
        """Begin anew with no replicas, which come with the first forward."""
        kind = BroadcastingSet if self.use_nccl else ReplicaSet
        replicas = kind(self.module, self.devices, workloads=self.workloads, timeout=self.timeout)
        passes = ForwardBackward(replicas, buffers=self._buffer_rule)
        passes.watch = self._monitor
        return Running(replicas, passes)

    def _flatten(self) -> Flattened:
        parameters = list(self.module.parameters())
        if self._flat is None or not self._flat.holds(parameters):
            self._flat = Flattened(parameters)
        return self._flat

    def _prepare_threads(self, running: Running) -> None:
        """Let the user's function prepare every thread that it has not seen; before shards have streams."""
        prepare = self.worker_init_fn
        if prepare is None:
            return

        def work(place: int) -> None:
            if not running.prepared.done:
                prepare(place)
                running.prepared.done = True

        running.replicas.run(work)

    def _read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Find the inputs, and which of them ask for a gradient."""
        names = _names(type(self.module).forward, len(args))
        keeps_graph = torch.is_grad_enabled()
        return read_inputs(
            args,
            kwargs,
            list(named_inputs(args, kwargs, names)),
            self._dims(names, args, kwargs),
            wanted=lambda _, tensor: keeps_graph and tensor.requires_grad,
        )

    def _dims(self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchDim:
        """Say for each input along which dimension it is cut."""
        if all(map(self._has_samples, nest.tensors((args, kwargs)))):
            return self.dim
        parts = {**dict(zip(names, args, strict=True)), **kwargs}
        found = [pair for name, part in parts.items() for pair in nest.named_tensors(part, name)]
        if not any(self._has_samples(tensor) for _, tensor in found):
            return self.dim  # to be refused
        return {path: self.dim if self._has_samples(tensor) else None for path, tensor in found}

    def _has_samples(self, tensor: torch.Tensor) -> bool:
        """Tell a tensor to be cut, or refused, from one without dimensions or elements to be cut."""
        inside = -tensor.dim() <= self.dim < tensor.dim()
        return tensor.shape[self.dim] > 0 if inside else tensor.dim() > 0


def _own_saved_tensors() -> AbstractContextManager[object]:
    """Keep the calling thread's hooks on saved tensors away from its shards; other threads' do not have them.

    Those of activation checkpointing would run the whole forward again in the middle of one shard's backward.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:  # noqa: SLF001 - no other way
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@lru_cache(maxsize=64)
def _names(forward: Callable[..., Any], num_args: int) -> list[str]:
    """Name the positions of a call of a module; remembered, because signatures are slow to read."""
    return argument_names(forward, num_args + 1)[1:]
