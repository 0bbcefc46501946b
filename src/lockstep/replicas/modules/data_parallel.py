"""A module that computes its batch on several devices, for use anywhere in a network."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import nn

from lockstep.arguments import check_bool, check_integer
from lockstep.elsewhere import DATA_PARALLEL, names_ours
from lockstep.errors import OrderError
from lockstep.replicas.batch.input_gradients import InputGradients
from lockstep.replicas.batch.inputs import (
    BatchDim,
    DimNest,
    Inputs,
    argument_of,
    check_dims,
    dims_by_path,
    named_inputs,
    number_positions,
    parameters_of,
    positional_names,
    read_inputs,
)
from lockstep.replicas.buffers.buffer_refs import BufferRules, check_rules
from lockstep.replicas.modules.flat_parameters import FlatParameters, FlattenedParameters
from lockstep.replicas.modules.nccl import BroadcastingSet
from lockstep.replicas.modules.on_device import ModuleWrapper
from lockstep.replicas.modules.one_graph import attached_forward
from lockstep.replicas.monitor import Monitor
from lockstep.replicas.passes.forward_backward import Forward, ForwardBackward
from lockstep.replicas.passes.forward_check import warn_of_dependence
from lockstep.replicas.pool.devices import Devices, parse_device
from lockstep.replicas.pool.replica_set import ReplicaSet
from lockstep.replicas.pool.settings import CHECKPOINT, identity, module_of_hooks
from lockstep.replicas.pool.worker import Timeout
from lockstep.tree import Tensors


def input_dims(
    dim: DimNest, forward: Callable[..., Any], found: Sequence[tuple[str, torch.Tensor]], arguments: Sequence[str]
) -> BatchDim:
    """Return the dimension along which each input of a call is split, or None for an input that is given whole.

    A tensor without dimensions, or without elements along its dimension, is given whole.

    Args:
        dim: The dimension for all inputs, or one for each, as passed to `DataParallel`.
        forward: The forward method of the module.
        found: The inputs of the call with their paths.
        arguments: The names of the arguments that are passed.

    Raises:
        ValueError: If `dim` does not fit the inputs, or splits none of them.
    """
    if isinstance(dim, int):
        if all(_has_samples(tensor, dim) for _, tensor in found):
            return dim
        dims: list[int | None] = [dim] * len(found)
    else:
        paths = [path for path, _ in found]
        dims = dims_by_path(_dims_of_call(dim, forward, paths, arguments), paths, "dim")
    if found and all(each is None for each in dims):
        raise ValueError(f"`dim` must name the dimension that counts samples for at least one input, got {dim!r}.")
    split = [
        each if each is None or _has_samples(tensor, each) else None
        for (_, tensor), each in zip(found, dims, strict=True)
    ]
    # Without any input to split, the dimensions are kept, so that the error names them.
    chosen = dims if all(each is None for each in split) else split
    return {path: each for (path, _), each in zip(found, chosen, strict=True)}


@lru_cache(maxsize=64)
def names_of_arguments(forward: Callable[..., Any], num_args: int) -> list[str]:
    """Return the names of the positional arguments of a call. They are cached, because reading a signature is slow.

    Args:
        forward: The forward method of a module, with ``self``.
        num_args: The number of positional arguments, without ``self``.
    """
    return number_positions(positional_names(forward)[1:], num_args)


def _dims_of_call(
    dim: DimNest, forward: Callable[..., Any], paths: Sequence[str], arguments: Sequence[str]
) -> BatchDim:
    """Return dimensions by name, without those of arguments that the call leaves out or passes without a tensor.

    Raises:
        ValueError: If `dim` is a tuple or list without an entry for an argument.
    """
    if dim is None or isinstance(dim, int):
        return dim
    if not isinstance(dim, Mapping):
        by_name = dict(zip(names_of_arguments(forward, len(dim)), dim, strict=True))
        for name in arguments:
            if name not in by_name:
                raise ValueError(f"`dim` must have an entry for each argument, got {dim!r} without one for `{name}`.")
        dim = by_name
    passed, accepted = set(map(argument_of, paths)), _accepted_names(forward)
    return {name: dim[name] for name in dim if (root := argument_of(name)) in passed or root not in accepted}


@lru_cache(maxsize=64)
def _accepted_names(forward: Callable[..., Any]) -> frozenset[str]:
    """Return the names of all arguments of a function; none if it has no signature."""
    return frozenset(parameters_of(forward))


def _has_samples(tensor: torch.Tensor, dim: int) -> bool:
    """Return whether a tensor is to be split or rejected, and not given whole to every shard."""
    inside = -tensor.dim() <= dim < tensor.dim()
    return tensor.shape[dim] > 0 if inside else tensor.dim() > 0


@dataclass(frozen=True, slots=True)
class BackwardBridge:
    """The connection between a merged output and the shards that computed it.

    Attributes:
        passes: The object that runs backward.
        forward: The forward that was run.
        parameters: The parameters and buffers of the model that require a gradient, in the order of those of the
            forward.
        device: The device of the merged output.
        flat: The flattened parameters whose gradients are kept end to end, or None.
    """

    passes: ForwardBackward
    forward: Forward
    parameters: list[torch.Tensor]
    device: torch.device
    flat: FlattenedParameters | None

    def gradients(self, output_grads: Sequence[torch.Tensor | None], *, retain_graph: bool) -> Tensors:
        """Run backward, and return the gradient of every input followed by that of every parameter.

        Args:
            output_grads: The gradient of each merged output, or None.
            retain_graph: Whether backward can be run again.
        """
        if self.flat is not None:
            self.flat.gather_gradients()
        if self.forward.dependent:
            warn_of_dependence(
                self.forward.dependent,
                output_grads,
                "`module` must return one value for each sample or their mean, but it",
                "Compute the loss, and what else compares samples, outside of the DataParallel, or return one loss for "
                "each sample and reduce them there.",
            )
        backward = self.passes.backward(self.forward, output_grads, retain_graph=retain_graph)
        # `backward` is not used again, so its sums can be added to in place.
        totals = backward.total(keep=False) or [None] * len(self.parameters)
        inputs = InputGradients(self.forward.inputs, self.forward.shards, backward.input_gradients)
        return inputs.merged() + [
            None if gradient is None else gradient.to(parameter)
            for gradient, parameter in zip(totals, self.parameters, strict=True)
        ]


class MergedOutput(torch.autograd.Function):
    """A function of all inputs and parameters, whose value exists already and whose backward runs on the replicas."""

    @staticmethod
    def forward(ctx: Any, bridge: BackwardBridge, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the merged outputs.

        Args:
            ctx: The context of autograd.
            bridge: The connection to the shards.
            *tensors: The inputs and parameters, which autograd records as the arguments of this function.
        """
        del tensors
        ctx.bridge = bridge
        # None means that no gradient flows back, which zeros would not say.
        ctx.set_materialize_grads(False)
        merged = bridge.forward.outputs.merged(bridge.device)
        shards = [each.tensors for each in bridge.forward.outputs.results]
        differentiable = [any(tensor.requires_grad for tensor in each) for each in zip(*shards, strict=True)]
        ctx.mark_non_differentiable(*[out for out, yes in zip(merged, differentiable, strict=True) if not yes])
        return tuple(merged)

    @staticmethod
    def backward(ctx: Any, *output_grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Run backward on the replicas.

        Args:
            ctx: The context of autograd.
            *output_grads: The gradient of each output, or None.

        Raises:
            OrderError: If the gradient itself is to be differentiated, or the graph has been freed.
        """
        if torch.is_grad_enabled():
            raise OrderError(
                "The backward of a DataParallel must run without create_graph, because its gradients, computed by "
                "several threads, have no graph. Create it with parallel_backward=False to differentiate them."
            )
        if ctx.bridge is None:
            raise OrderError(
                "A second backward must follow one with retain_graph=True. The graphs of this output have been freed."
            )
        bridge: BackwardBridge = ctx.bridge
        keep = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001 - no other way to know
        if not keep:
            # As torch does for its own nodes, so that the memory is free before the next forward.
            ctx.bridge = None
        return None, *bridge.gradients(output_grads, retain_graph=keep)


class DataParallel(ModuleWrapper):
    """Split a batch over several devices, in the forward and in the backward of any surrounding network.

    The output is that of the whole batch, in the order of its samples, on `output_device`. It is differentiable with
    respect to inputs and parameters. Any criterion on it, over single samples or the batch as a whole, therefore gives
    the gradient that one device would give, for any split. Backward runs on all replicas at the same time, and
    gradients are summed over shards in the order of the tree.

    The module itself is never run. Its replicas are updated to it before each forward (`train`, `eval`, `apply`,
    `requires_grad_`, hooks, writes to parameters). Its buffers are combined over shards as in an update. Each shard
    draws from its own random stream, keyed by one draw from the default generator per forward. In a `ParallelUpdater`
    every replica has a `DataParallel` of its own, which splits the shard further. Use activation checkpointing inside
    of the module. Around this module it works too, but only the reentrant variant saves memory. If you apply
    `torch.compile` to a surrounding network, this module is not compiled; compile the module inside of it separately.

    Shapes: Every tensor of the inputs has length N along its dimension, and so has every tensor of the output. A tensor
    without dimensions is given whole to every shard, and so is one without elements along its dimension. An output
    without dimensions is one value for the batch: the mean over shards, weighted by their samples.

    Args:
        module: The module, which is moved to the first device and becomes the attribute ``module``.
        devices: ``"auto"`` for this rank's GPUs, or else its cores; a number of devices; or names, which may repeat.
            The first device is the main one.
        dim: The dimension that counts samples in the inputs, where a negative one counts from the end; or one for each
            input: a tuple or list by position, or a dict by the name of the argument or the path in it, such as
            ``"pair[0]"``. An argument that is a nest takes one dimension for all of its tensors, or a nest of them.
            None gives an input whole to every shard. Arguments that a dict does not name are split along dimension 0.
        output_dim: The same for the outputs: a nest like the one that the module returns, as ``(0, 1)`` for an LSTM
            with ``batch_first=True``, or a dict by key, or by path, such as ``"output[1]"``. None merges an output to
            the mean over shards, weighted by their samples. ``"dim"`` is `dim` if that is an integer, and otherwise 0.
        output_device: The device of the outputs, or None for the first of `devices`.
        num_shards: The number of shards that a batch is split into on any devices, or None for one per device.
        workloads: The relative speeds of the devices, by which shards are sized or assigned. They are equal by default.
        flatten_parameters: Whether to store the parameters end to end in one tensor from the first use on.
        use_nccl: Whether to send parameters to other GPUs in one message by NCCL. This requires `flatten_parameters`
            and has no effect with fewer than two GPUs. Gradients are summed in the order of the tree in any case.
        worker_init_fn: A function that is called as ``worker_init_fn(index)``, once in each thread that computes, with
            the index of its device, before its first work. The thread of the first device is the calling thread.
        parallel_backward: Whether to run backward on all replicas at the same time. If False, autograd runs it in one
            thread. It can then be differentiated again (``create_graph=True``), and its bits depend on the number of
            intra-op threads: with one thread they are the same as with True.
        buffers: The rules by which buffers are combined over shards, as for `ParallelUpdater`.
        timeout: The number of seconds after which a device that is still at work counts as hung. The first device then
            has a thread of its own too. ``"auto"`` is half an hour for the threads of the other devices, while the
            calling thread is not watched. None waits without limit.

    Raises:
        TypeError: If `module` is not a module, or cannot be copied, or a dimension is not an integer or None.
        ValueError: If a device, a number or a rule is out of range.

    Determinism: If `num_shards` is given, the bits of outputs, gradients and buffers depend only on the batch, the
    module, that number and the drawn key, and not on devices or workloads.

    References: Torch7's cunn ``DataParallelTable`` (2015), whose replicas drifted apart in their buffers.

    Example:
        >>> net = nn.Sequential(DataParallel(nn.Linear(2, 3), devices=["cpu", "cpu"]), nn.Linear(3, 1))
        >>> net(torch.ones(5, 2)).square().mean().backward()
        >>> list(net.state_dict())
        ['0.weight', '0.bias', '1.weight', '1.bias']
        >>> lstm = nn.LSTM(2, 3, batch_first=True)  # returns (output, (h, c)); the states count samples in dimension 1
        >>> output, (h, c) = DataParallel(lstm, devices=2, output_dim=(0, 1))(torch.ones(5, 4, 2))
        >>> output.shape, h.shape
        (torch.Size([5, 4, 3]), torch.Size([1, 5, 3]))
    """

    @names_ours(DATA_PARALLEL)
    def __init__(
        self,
        module: nn.Module,
        devices: Devices = "auto",
        *,
        dim: DimNest = 0,
        output_dim: DimNest | Literal["dim"] = "dim",
        output_device: str | torch.device | None = None,
        num_shards: int | None = None,
        workloads: Sequence[float] | None = None,
        flatten_parameters: bool = False,
        use_nccl: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        parallel_backward: bool = True,
        buffers: BufferRules = "mean",
        timeout: Timeout = "auto",
    ) -> None:
        super().__init__(module)
        if num_shards is not None:
            check_integer("num_shards", num_shards, minimum=1)
        switches = {"flatten_parameters": flatten_parameters, "use_nccl": use_nccl}
        for name, value in {**switches, "parallel_backward": parallel_backward}.items():
            check_bool(name, value)
        if worker_init_fn is not None and not callable(worker_init_fn):
            raise TypeError(f"`worker_init_fn` must be a function of the index of a device, got {worker_init_fn!r}.")
        if use_nccl and not flatten_parameters:
            raise ValueError("`flatten_parameters` must be True if `use_nccl` is, got False.")
        check_rules(buffers)
        check_dims(dim, "dim", by_position=True)
        if output_dim != "dim":
            check_dims(output_dim, "output_dim", by_position=True)
        self.dim = dim
        self.output_dim = output_dim
        self.output_device = None if output_device is None else parse_device(output_device, "output_device")
        self.num_shards = num_shards
        self.flatten_parameters = flatten_parameters
        self.use_nccl = use_nccl
        self.worker_init_fn = worker_init_fn
        self.parallel_backward = parallel_backward
        self.timeout = timeout
        self._buffer_rule: BufferRules = buffers
        self._passes: ForwardBackward | None = None
        self._prepared: threading.local | None = None
        self._flat: FlattenedParameters | None = None
        self._monitor: Monitor | None = None
        self.place_on(devices, workloads)

    def place_on(self, devices: Devices, workloads: Sequence[float] | None = None) -> DataParallel:
        """Compute on other devices from now on. The module is moved to the first of them.

        Args:
            devices: The devices, as in the constructor.
            workloads: The relative speeds of the devices, as in the constructor.

        Returns:
            This module.

        Raises:
            ValueError: If a device or a workload is out of range. Nothing has changed in that case.
        """
        replicas = ReplicaSet(self.module, devices, workloads=workloads, timeout=self.timeout)
        self.release()
        self.devices, self.workloads = replicas.devices, replicas.workloads
        self.module.to(self.devices[0])
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on the whole batch.

        Args:
            *args: Nests of tensors. Other values are passed to every shard unchanged.
            **kwargs: The same by name.

        Returns:
            The output of the module for the whole batch, with its tensors on `output_device`.

        Raises:
            ReplicaError: If the module raised in a shard, or a device hangs. The message names it.
            ReplicaInterrupt: If Ctrl-C was pressed while devices were at work. The message names them.
            TypeError: If the module returned a value that cannot be merged.
            ValueError: If inputs or outputs differ in length or do not fit their dimensions, or there is no sample.
        """
        if torch.compiler.is_compiling():
            # A compiled graph cannot contain threads, so only the surrounding network is compiled.
            return torch.compiler.disable(self._run)(args, kwargs)  # type: ignore[no-untyped-call]  # torch's gap
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module on the whole batch, outside of a compiled graph."""
        passes = self._prepare()
        inputs = self._read_inputs(args, kwargs)
        output_dim = self._output_dim()
        main = self.devices[0] if self.output_device is None else self.output_device
        if torch.is_grad_enabled() and not self.parallel_backward:
            forward = attached_forward(
                passes, inputs, num_shards=self.num_shards, output_dim=output_dim, flat=self._flat
            )
            return forward.outputs.unflatten(forward.outputs.merged(main, attached=True))
        with _without_checkpoint_hooks():
            forward = passes.forward(inputs, num_shards=self.num_shards, output_dim=output_dim)
        named = forward.trained_tensors if forward.has_graph else []
        if not named and not any(inputs.requires_grad):
            return forward.outputs.unflatten(forward.outputs.merged(main))
        bridge = BackwardBridge(passes, forward, [each for _, each in named], main, self._flat)
        merged = MergedOutput.apply(bridge, *inputs.tensors, *bridge.parameters)  # type: ignore[no-untyped-call]  # torch's gap
        return forward.outputs.unflatten(list(merged))

    @property
    def model(self) -> nn.Module:
        """The module that the replicas are copies of."""
        return self.module

    @property
    def replicas(self) -> list[nn.Module]:
        """The copies of the module, one per device."""
        return self._prepare().replicas.replicas

    def sync_parameters(self) -> None:
        """Copy the parameters to replicas with memory of their own, which every forward does by itself."""
        self._prepare().replicas.refresh()

    def flat_parameters(self) -> FlatParameters:
        """Store the parameters end to end in one tensor from now on, and return it.

        The parameters remain the same objects, and values that are written to the flat tensor are theirs at once. Their
        gradients are stored in the flat gradient, so a parameter without a gradient has zeros instead of None.

        Returns:
            The values and the gradients, which can be unpacked as ``values, gradients``. ``values`` is a parameter that
            can be passed to an optimizer. Call this again after a change of dtype or device.

        Raises:
            ValueError: If the parameters have several dtypes or devices.

        Determinism: Some kernels round depending on the alignment of their operands, so whether parameters are
        flattened is part of the recipe.
        """
        self.flatten_parameters = True
        flat = self._flatten()
        flat.gather_gradients()
        return flat.tensors

    def install_monitor(self, monitor: Monitor | None) -> None:
        """Install a monitor on the replicas, or remove it.

        Args:
            monitor: The monitor, or None to remove the current one.
        """
        self._monitor = monitor
        if monitor is not None:
            monitor.attach(self)
        if self._passes is not None:
            self._passes.shard_hooks = monitor

    def release(self) -> None:
        """Drop threads and replicas until the next forward."""
        passes, self._passes = self._passes, None
        if passes is not None:
            passes.release()
            passes.replicas.release()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without objects of this process: threads, replicas, and a monitor."""
        return {**self.__dict__, "_passes": None, "_prepared": None, "_flat": None, "_monitor": None}

    def extra_repr(self) -> str:
        """Return the names of the devices and the dimensions."""
        output_dim = "" if self.output_dim == "dim" else f", output_dim={self.output_dim}"
        return f"devices={[str(device) for device in self.devices]}, dim={self.dim}{output_dim}"

    def _prepare(self) -> ForwardBackward:
        """Flatten the parameters if requested, and return what runs the replicas, in threads that are ready."""
        if self.flatten_parameters:
            self._flatten()
        passes = self._passes
        # A forked process has none of the threads, and would wait forever for work that it hands to one.
        if passes is None or passes.replicas.model is not self.module or passes.replicas.is_forked:
            kind = BroadcastingSet if self.use_nccl else ReplicaSet
            replicas = kind(self.module, self.devices, workloads=self.workloads, timeout=self.timeout)
            self._passes = passes = ForwardBackward(replicas, buffers=self._buffer_rule)
            passes.shard_hooks = self._monitor
            self._prepared = threading.local()
        if self.worker_init_fn is not None and self._prepared is not None:
            passes.replicas.run(partial(self._prepare_thread, self.worker_init_fn, self._prepared))
        return passes

    @staticmethod
    def _prepare_thread(prepare: Callable[[int], None], prepared: threading.local, place: int) -> None:
        """Call the user's function in a thread in which it has not been called, before shards have streams."""
        # Thread-local, so that a thread that replaces an abandoned one is prepared too.
        if not vars(prepared):
            prepare(place)
            prepared.done = True

    def _flatten(self) -> FlattenedParameters:
        parameters = list(self.module.parameters())
        if self._flat is None or not self._flat.holds(parameters):
            self._flat = FlattenedParameters(parameters)
        return self._flat

    def _read_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return the inputs of a call, and which of them require a gradient."""
        names = names_of_arguments(type(self.module).forward, len(args))
        keeps_graph = torch.is_grad_enabled()
        found = list(named_inputs(args, kwargs, names))
        return read_inputs(
            args,
            kwargs,
            found,
            input_dims(self.dim, type(self.module).forward, found, [*names, *kwargs]),
            wanted=lambda _, tensor: keeps_graph and tensor.requires_grad,
        )

    def _output_dim(self) -> BatchDim:
        """Return the dimensions that count samples in the outputs, where a nest is named by its path."""
        if self.output_dim == "dim":
            return self.dim if isinstance(self.dim, int) else 0
        return {"output": self.output_dim} if isinstance(self.output_dim, tuple | list) else self.output_dim


def _without_checkpoint_hooks() -> AbstractContextManager[object]:
    """Return a context manager that removes the calling thread's saved tensor hooks of activation checkpointing.

    They would run the whole forward again in the middle of the backward of one shard.
    """
    if module_of_hooks() != CHECKPOINT:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(identity, identity)
