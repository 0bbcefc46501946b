"""Run shards on replicas within one autograd graph, whose gradients can be differentiated again.

Each shard computes with aliases of the model's parameters instead of its replica's own, and with views of the
inputs. Backward is then autograd's, in one thread; the sum over the aliases is ours, in the tree's order.
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
from lockstep.replicas.flat_parameters import Flattened
from lockstep.replicas.passes import Forward, Passes, schedule
from lockstep.replicas.replica_passes import ShardObserver
from lockstep.replicas.scatter import Inputs, Piece
from lockstep.tree import PartialSum, total


@dataclass(frozen=True, slots=True)
class AttachedInputs(Inputs):
    """Inputs whose pieces belong to the caller's graph."""

    attached: ClassVar[bool] = True

    @classmethod
    def of(cls, inputs: Inputs) -> AttachedInputs:
        """Make them of inputs whose pieces would not."""
        parts = (inputs.tensors, inputs.dims, inputs.wanted, inputs.num_samples)
        return cls(inputs.args, inputs.kwargs, inputs.names, *parts)

    def cut(self, samples: range, device: torch.device) -> Piece:
        """Give the arguments for a run of samples, as views and copies that autograd knows of."""
        pieces = iter(
            [
                (tensor if dim is None else tensor.narrow(dim, samples.start, len(samples))).to(device)
                for tensor, dim in zip(self.tensors, self.dims, strict=True)
            ]
        )
        args, kwargs = nest.map_tensors(lambda _: next(pieces), (self.args, self.kwargs))
        return Piece(args, kwargs, [None] * len(self.tensors))


class Aliases(torch.autograd.Function):
    """Aliases of parameters, one set a shard, whose gradients are summed in the tree's order."""

    @staticmethod
    def forward(
        ctx: Any,
        devices: Sequence[torch.device],
        flat: Flattened | None,
        *parameters: nn.Parameter,
    ) -> Any:
        """Give all aliases of the first shard, then of the second, each on its shard's device."""
        ctx.set_materialize_grads(False)
        ctx.flat = flat
        ctx.devices = [parameter.device for parameter in parameters]
        copies = {device: [each.detach().to(device) for each in parameters] for device in set(devices)}
        return tuple(each.detach() for device in devices for each in copies[device])

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
        return None, None, *total(partials)


class Attached:
    """A `ShardObserver` that lets shards compute with aliases of the model's parameters.

    Args:
        parameters: The model's, those that ask for a gradient.
        devices: Of each shard, by index.
        inner: Another watch, entered within; None for none.
        flat: Keeps the gradients end to end; None where they need not lie so.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        devices: Mapping[int, torch.device],
        inner: ShardObserver | None,
        flat: Flattened | None,
    ) -> None:
        aliases: tuple[torch.Tensor, ...] = Aliases.apply(  # type: ignore[no-untyped-call]  # torch's gap
            list(devices.values()), flat, *parameters
        )
        size = len(parameters)
        self._aliases = {
            shard: aliases[number * size : (number + 1) * size] for number, shard in enumerate(devices)
        }
        self._inner = inner

    @contextmanager
    def forward(self, place: int, shard: Shard, replica: nn.Module) -> Iterator[None]:
        """Put the aliases in the places of the replica's parameters for a while."""
        own = [parameter for parameter in replica.parameters() if parameter.requires_grad]
        alias_of = {id(each): alias for each, alias in zip(own, self._aliases[shard.index], strict=True)}
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
            if self._inner is not None:
                stack.enter_context(self._inner.forward(place, shard, replica))
            yield

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
    passes: Passes,
    inputs: Inputs,
    parameters: Sequence[nn.Parameter],
    placed: Placed,
    *,
    flat: Flattened | None,
) -> Forward:
    """Run forward on all shards as a part of the caller's graph.

    Args:
        passes: What runs it.
        inputs: The batch.
        parameters: The model's, those that ask for a gradient.
        placed: How and where it is run.
        flat: Keeps the gradients end to end; None where they need not lie so.
    """
    shards = schedule(inputs.num_samples, placed.num_shards, tuple(placed.workloads))
    devices = {
        shard.index: device for run, device in zip(shards, placed.devices, strict=True) for shard in run
    }
    inner = passes.watch
    passes.watch = Attached(parameters, devices, inner, flat)
    try:
        return passes.forward(AttachedInputs.of(inputs), num_shards=placed.num_shards, output_dim=placed.dim)
    finally:
        passes.watch = inner
