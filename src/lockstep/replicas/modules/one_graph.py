"""Run shards on replicas within one autograd graph, so that gradients can be differentiated again.

Each shard computes with aliases of the parameters of the model instead of those of its replica, with copies of the
buffers that require a gradient and of inputs that every shard gets whole, and with views of the other inputs. Backward
is then run by autograd in one thread, and the gradients of aliases and copies are summed in the order of the tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils.stateless import _reparametrize_module

from lockstep.plan import Shard
from lockstep.replicas.batch.inputs import BatchDim, Inputs
from lockstep.replicas.buffers.buffer_refs import trained_buffers
from lockstep.replicas.modules.flat_parameters import FlattenedParameters
from lockstep.replicas.passes.forward_backward import Forward, ForwardBackward, shards_of_batch
from lockstep.state import temporarily
from lockstep.tree import PartialSum, total


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
            num_parameters: The number of parameters. The tensors that follow them are buffers and inputs, which are
                copied because a shard may write to them.
            *parameters: The parameters, buffers and inputs.
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
        passes: The object that runs shards on the replicas, whose other hooks run inside of these.
        devices: The device of each shard, by index.
        whole: The inputs that require a gradient and that every shard gets whole.
        flat: The flattened parameters whose gradients are kept end to end, or None.
    """

    def __init__(
        self,
        passes: ForwardBackward,
        devices: Mapping[int, torch.device],
        whole: Sequence[torch.Tensor],
        flat: FlattenedParameters | None,
    ) -> None:
        model, self._inner = passes.replicas.model, passes.shard_hooks
        parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        buffers = dict(trained_buffers(model).values())
        trained: dict[str, torch.Tensor] = {**parameters, **buffers}
        aliases: tuple[torch.Tensor, ...] = Aliases.apply(  # type: ignore[no-untyped-call]  # torch's gap
            list(devices.values()), flat, len(parameters), *trained.values(), *whole
        )
        size = len(trained) + len(whole)
        sets = {shard: aliases[number * size : (number + 1) * size] for number, shard in enumerate(devices)}
        self._buffers = list(buffers)
        self._aliases = {shard: dict(zip(trained, each, strict=False)) for shard, each in sets.items()}
        self.inputs = {shard: each[len(trained) :] for shard, each in sets.items()}
        """The copies of the whole inputs, by shard."""

    @contextmanager
    def forward(self, place: int, shard: Shard, replica: nn.Module) -> Iterator[None]:
        """Return a context manager that replaces the parameters of the replica by aliases.

        Args:
            place: The index of the device.
            shard: The shard.
            replica: The replica.
        """
        aliases = self._aliases[shard.index].copy()
        inner = nullcontext() if self._inner is None else self._inner.forward(place, shard, replica)
        with _reparametrize_module(replica, aliases, tie_weights=True), inner:
            yield
        for name in self._buffers:
            path, _, own = name.rpartition(".")
            # Torch has stored there what the shard left. Detached, because the graph of this shard must not become part
            # of that of the next one.
            replica.get_submodule(path)._buffers[own] = aliases[name].detach()

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
    *,
    num_shards: int | None,
    output_dim: BatchDim,
    flat: FlattenedParameters | None,
) -> Forward:
    """Run a forward whose outputs belong to the autograd graph of the caller.

    Args:
        passes: The object that runs shards on the replicas.
        inputs: The inputs to split.
        num_shards: The number of shards, or None for one per device.
        output_dim: The dimension that counts samples in the outputs.
        flat: The flattened parameters whose gradients are kept end to end, or None.
    """
    replicas = passes.replicas
    shards = shards_of_batch(inputs.num_samples, num_shards, tuple(replicas.workloads))
    devices = {shard.index: device for run, device in zip(shards, replicas.devices, strict=True) for shard in run}
    tensors = inputs.tensors
    whole = [index for index, dim in enumerate(inputs.dims) if dim is None and tensors[index].requires_grad]
    hooks = AliasHooks(passes, devices, [tensors[index] for index in whole], flat)
    by_shard = {shard.samples.start: tensors.copy() for shard in chain(*shards)}
    with temporarily(passes, shard_hooks=hooks):
        for shard in chain(*shards):
            for index, copied in zip(whole, hooks.inputs[shard.index], strict=True):
                by_shard[shard.samples.start][index] = copied
        attached = replace(inputs, attached=by_shard, requires_grad=[False] * len(inputs.tensors))
        return passes.forward(attached, num_shards=num_shards, output_dim=output_dim)
