"""Run shards on replicas within one autograd graph, whose gradients can be differentiated again.

Each shard computes with aliases of the model's parameters instead of its replica's own, with copies of the
buffers that require a gradient, and with views of the inputs. Backward is then autograd's, in one thread; the
sum over the aliases is ours, in the tree's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from lockstep import nest
from lockstep.plan import Shard
from lockstep.replicas.batch import Inputs, ShardInputs
from lockstep.replicas.buffers import TrainedBuffer, all_buffer_refs, buffer_refs
from lockstep.replicas.modules.flat_parameters import Flattened
from lockstep.replicas.passes import Forward, ForwardBackward, ShardObserver, schedule
from lockstep.tree import PartialSum, total


@dataclass(frozen=True, slots=True)
class DifferentiableInputs(Inputs):
    """Inputs whose pieces belong to the caller's graph."""

    attached: ClassVar[bool] = True

    @classmethod
    def of(cls, inputs: Inputs) -> DifferentiableInputs:
        """Make them of inputs whose pieces would not."""
        parts = (inputs.tensors, inputs.dims, inputs.wanted, inputs.num_samples)
        return cls(inputs.args, inputs.kwargs, inputs.names, *parts)

    def cut(self, samples: range, device: torch.device) -> ShardInputs:
        """Give the arguments for a run of samples, as views and copies that autograd knows of."""
        pieces = iter(
            [
                (tensor if dim is None else tensor.narrow(dim, samples.start, len(samples))).to(device)
                for tensor, dim in zip(self.tensors, self.dims, strict=True)
            ]
        )
        args, kwargs = nest.map_tensors(lambda _: next(pieces), (self.args, self.kwargs))
        return ShardInputs(args, kwargs, [None] * len(self.tensors))


class Aliases(torch.autograd.Function):
    """Aliases of parameters, one set a shard, whose gradients are summed in the tree's order."""

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[torch.device],
        flat: Flattened | None,
        num_parameters: int,
        *parameters: torch.Tensor,
    ) -> Any:
        """Give all aliases of the first shard, then of the second, each on its shard's device.

        What comes after so many parameters is a buffer, to which a shard may write: it is copied.
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
        """Sum over shards; where that is to be differentiated, its additions are recorded."""
        if ctx.flat is not None:
            ctx.flat.gather_gradients()
        size = len(ctx.devices)
        partials = [
            PartialSum(
                start // size,
                [
                    None if grad is None else grad.to(device, copy=True)
                    for grad, device in zip(grads[start : start + size], ctx.devices, strict=True)
                ],
            )
            for start in range(0, len(grads), size)
        ]
        return None, None, None, *total(partials)


class AliasObserver:
    """A `ShardObserver` that lets shards compute with aliases of the model's parameters.

    Args:
        parameters: The model's, those that ask for a gradient.
        buffers: Likewise.
        devices: Of each shard, by index.
        inner: Another watch, entered within; None for none.
        flat: Keeps the gradients end to end; None where they need not lie so.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buffers: Sequence[TrainedBuffer],
        devices: Mapping[int, torch.device],
        inner: ShardObserver | None,
        flat: Flattened | None,
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
        """Put the aliases in the places of the replica's parameters for a while."""
        own = [parameter for parameter in replica.parameters() if parameter.requires_grad]
        aliases = self._aliases[shard.index]
        alias_of = {id(each): alias for each, alias in zip(own, aliases[: len(own)], strict=True)}
        slots = [
            (module._parameters, name, parameter)
            for module in replica.modules()
            for name, parameter in module._parameters.items()
            if id(parameter) in alias_of
        ]
        with ExitStack() as stack:
            for parameters, name, parameter in slots:
                stack.callback(parameters.__setitem__, name, parameter)
                parameters[name] = alias_of[id(parameter)]  # type: ignore[assignment]  # any tensor computes
            stack.enter_context(self._copied_buffers(replica, aliases[len(own) :]))
            if self._inner is not None:
                stack.enter_context(self._inner.forward(place, shard, replica))
            yield

    @contextmanager
    def _copied_buffers(self, replica: nn.Module, copies: Sequence[torch.Tensor]) -> Iterator[None]:
        """Put copies of trained buffers in their places; what a shard leaves there loses its graph."""
        slots = buffer_refs(replica) if copies else []
        copy_of = {id(slots[index].get()): each for index, each in zip(self._buffers, copies, strict=True)}
        replaced = [slot for slot in all_buffer_refs(replica) if id(slot.get()) in copy_of] if copies else []
        for slot in replaced:
            slot.set(copy_of[id(slot.get())])
        try:
            yield
        finally:
            for slot in replaced:
                left = slot.get()
                slot.set(None if left is None else left.detach())

    def backward(self, place: int, shard: Shard, replica: nn.Module) -> AbstractContextManager[object]:
        """Do nothing: backward is autograd's own."""
        del place, shard, replica
        return nullcontext()


class Placed(Protocol):
    """What says how a batch is cut and put together, and where."""

    devices: list[torch.device]
    workloads: list[float]
    num_shards: int | None
    dim: int


def attached_forward(
    passes: ForwardBackward,
    inputs: Inputs,
    parameters: Sequence[nn.Parameter],
    buffers: Sequence[TrainedBuffer],
    placed: Placed,
    *,
    flat: Flattened | None,
) -> Forward:
    """Run forward on all shards as a part of the caller's graph.

    Args:
        passes: What runs it.
        inputs: The batch.
        parameters: The model's, those that ask for a gradient.
        buffers: Likewise.
        placed: How and where it is run.
        flat: Keeps the gradients end to end; None where they need not lie so.
    """
    shards = schedule(inputs.num_samples, placed.num_shards, tuple(placed.workloads))
    devices = {shard.index: device for run, device in zip(shards, placed.devices, strict=True) for shard in run}
    inner = passes.watch
    passes.watch = AliasObserver(parameters, buffers, devices, inner, flat)
    try:
        return passes.forward(DifferentiableInputs.of(inputs), num_shards=placed.num_shards, output_dim=placed.dim)
    finally:
        passes.watch = inner
