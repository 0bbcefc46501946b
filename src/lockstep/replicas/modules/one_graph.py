"""Run shards on replicas within one autograd graph, so that gradients can be differentiated again.

Each shard computes with aliases of the parameters of the model instead of those of its replica, with copies of the
buffers that require a gradient, and with views of the inputs. Backward is then run by autograd in one thread, and the
gradients of the aliases are summed in the order of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from lockstep import nest
from lockstep.plan import Shard
from lockstep.replicas.batch import BatchDim, Inputs, ShardInputs
from lockstep.replicas.buffers import TrainedBuffer, all_buffer_refs, buffer_refs
from lockstep.replicas.modules.flat_parameters import FlattenedParameters
from lockstep.replicas.passes import Forward, ForwardBackward, ShardHooks, shards_of_batch
from lockstep.tree import PartialSum, total


@dataclass(frozen=True, slots=True)
class DifferentiableInputs(Inputs):
    """Inputs whose parts belong to the graph of the caller."""

    attached: ClassVar[bool] = True

    @classmethod
    def of(cls, inputs: Inputs) -> DifferentiableInputs:
        """Return inputs as differentiable inputs.

        Args:
            inputs: Inputs whose parts are detached.
        """
        parts = (inputs.tensors, inputs.dims, inputs.requires_grad, inputs.num_samples)
        return cls(inputs.args, inputs.kwargs, inputs.names, *parts)

    def shard_inputs(self, samples: range, device: torch.device) -> ShardInputs:
        """Return the arguments for a run of samples, as views and copies that autograd records.

        Args:
            samples: The samples of the shard.
            device: The device of the shard.
        """
        inputs = iter(
            [
                (tensor if dim is None else tensor.narrow(dim, samples.start, len(samples))).to(device)
                for tensor, dim in zip(self.tensors, self.dims, strict=True)
            ]
        )
        args, kwargs = nest.map_tensors(lambda _: next(inputs), (self.args, self.kwargs))
        return ShardInputs(args, kwargs, [None] * len(self.tensors))


class Aliases(torch.autograd.Function):
    """A function that returns aliases of parameters, one set per shard, and sums their gradients by the tree."""

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[torch.device],
        flat: FlattenedParameters | None,
        num_parameters: int,
        *parameters: torch.Tensor,
    ) -> Any:
        """Return all aliases of the first shard, then those of the second and so on, each on the device of its shard.

        Args:
            ctx: The context of autograd.
            devices: The device of each shard.
            flat: The flattened parameters whose gradients are kept end to end, or None.
            num_parameters: The number of parameters. The tensors that follow them are buffers, which are copied because
                a shard may write to them.
            *parameters: The parameters and buffers.
        """
        ctx.set_materialize_grads(False)
        ctx.flat = flat
        ctx.devices = [parameter.device for parameter in parameters]
        copies = {device: [each.detach().to(device) for each in parameters] for device in set(devices)}
        return tuple(
            each.detach() if index < num_parameters else each.clone()
            for device in devices
            for index, each in enumerate(copies[device])
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Sum the gradients over shards.

        The additions are recorded if the sum is to be differentiated.

        Args:
            ctx: The context of autograd.
            *grads: The gradient of each alias, or None.
        """
        if ctx.flat is not None:
            ctx.flat.gather_gradients()
        size = len(ctx.devices)
        partials = [
            PartialSum(
                start // size,
                [
                    # Copied, because the sum adds in place and autograd may use a gradient elsewhere too.
                    None if grad is None else grad.to(device, copy=True)
                    for grad, device in zip(grads[start : start + size], ctx.devices, strict=True)
                ],
            )
            for start in range(0, len(grads), size)
        ]
        return None, None, None, *total(partials)


class AliasHooks:
    """A `ShardHooks` that makes shards compute with aliases of the parameters of the model.

    Args:
        parameters: The parameters of the model that require a gradient.
        buffers: The buffers of the model that require a gradient.
        devices: The device of each shard, by index.
        inner: Other hooks to run inside of this one, or None.
        flat: The flattened parameters whose gradients are kept end to end, or None.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[TrainedBuffer],
        devices: Mapping[int, torch.device],
        inner: ShardHooks | None,
        flat: FlattenedParameters | None,
    ) -> None:
        aliases: tuple[torch.Tensor, ...] = Aliases.apply(  # type: ignore[no-untyped-call]  # torch's gap
            list(devices.values()),
            flat,
            len(parameters),
            *parameters,
            *(buffer.tensor for buffer in buffers),
        )
        size = len(parameters) + len(buffers)
        self._buffers = [buffer.index for buffer in buffers]
        self._aliases = {shard: aliases[number * size : (number + 1) * size] for number, shard in enumerate(devices)}
        self._inner = inner

    @contextmanager
    def forward(self, place: int, shard: Shard, replica: nn.Module) -> Iterator[None]:
        """Return a context manager that replaces the parameters of the replica by aliases.

        Args:
            place: The index of the device.
            shard: The shard.
            replica: The replica.
        """
        own = [parameter for parameter in replica.parameters() if parameter.requires_grad]
        aliases = self._aliases[shard.index]
        alias_of = {id(each): alias for each, alias in zip(own, aliases[: len(own)], strict=True)}
        refs = [
            (module._parameters, name, parameter)
            for module in replica.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in alias_of
        ]
        with ExitStack() as stack:
            for parameters, name, parameter in refs:
                # Registered before the replacement, so that an error in between leaves no alias behind.
                stack.callback(parameters.__setitem__, name, parameter)
                parameters[name] = alias_of[id(parameter)]  # type: ignore[assignment]  # any tensor computes
            stack.enter_context(self._copied_buffers(replica, aliases[len(own) :]))
            if self._inner is not None:
                stack.enter_context(self._inner.forward(place, shard, replica))
            yield

    @contextmanager
    def _copied_buffers(self, replica: nn.Module, copies: Sequence[torch.Tensor]) -> Iterator[None]:
        """Return a context manager that replaces trained buffers by copies, and detaches what a shard leaves there."""
        refs = buffer_refs(replica) if copies else []
        copy_of = {id(refs[index].get()): each for index, each in zip(self._buffers, copies, strict=True)}
        replaced = [ref for ref in all_buffer_refs(replica) if id(ref.get()) in copy_of] if copies else []
        for ref in replaced:
            ref.set(copy_of[id(ref.get())])
        try:
            yield
        finally:
            for ref in replaced:
                # Detached, because the graph of this shard must not become part of the graph of the next shard.
                left = ref.get()
                ref.set(None if left is None else left.detach())

    def backward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Return a context manager without effect, because backward is run by autograd.

        Args:
            place: The index of the device.
            shard: The shard.
            replica: The replica.
        """
        del place, shard, replica
        return nullcontext()


def attached_forward(
    passes: ForwardBackward,
    inputs: Inputs,
    parameters: Sequence[nn.Parameter],
    buffers: Sequence[TrainedBuffer],
    *,
    num_shards: int | None,
    output_dim: BatchDim,
    flat: FlattenedParameters | None,
) -> Forward:
    """Run forward on all shards as a part of the graph of the caller.

    Args:
        passes: The object that runs forward.
        inputs: The batch.
        parameters: The parameters of the model that require a gradient.
        buffers: The buffers of the model that require a gradient.
        num_shards: The number of shards, or None for one per device.
        output_dim: The dimensions along which outputs are merged.
        flat: The flattened parameters whose gradients are kept end to end, or None.
    """
    replicas = passes.replicas
    shards = shards_of_batch(inputs.num_samples, num_shards, tuple(replicas.workloads))
    devices = {shard.index: device for run, device in zip(shards, replicas.devices, strict=True) for shard in run}
    inner = passes.shard_hooks
    passes.shard_hooks = AliasHooks(parameters, buffers, devices, inner, flat)
    try:
        return passes.forward(DifferentiableInputs.of(inputs), num_shards=num_shards, output_dim=output_dim)
    finally:
        passes.shard_hooks = inner
