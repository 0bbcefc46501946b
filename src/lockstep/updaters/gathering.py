"""Gather the outputs of all shards, and compute a loss over the whole batch and the gradient that each shard needs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from weakref import ref

import torch
from torch import nn

from lockstep import nest
from lockstep.communicators import Communicator, refusing_collectives
from lockstep.digest import checksum
from lockstep.metrics import Observers, collecting
from lockstep.plan import Shard
from lockstep.precision import HALF_PRECISION
from lockstep.replicas import check_leaves, foreign_leaves
from lockstep.tree import Tensors
from lockstep.updaters.loss import BatchLoss, Loss, LossFunction, check_loss

_WHY = "It is given the outputs of all ranks, and its result counts once. Remove the call."
"""Why a criterion sends nothing itself."""


class GatheredBatch:
    """The outputs of all shards of a batch, with the loss of the whole batch and its gradient.

    First, `collect` is used as the loss function of each shard, then `differentiate` is called on every rank, and then
    `shard_loss` is used as the loss function of each shard.

    Args:
        loss: The loss of the whole batch.
        model: The model itself, whose parameters the criterion may use.
        compares: Whether to compare the outputs of both forwards.

    Attributes:
        differs: Whether they were compared and differ.
    """

    def __init__(self, loss: BatchLoss, model: nn.Module, *, compares: bool) -> None:
        self._compares, self.differs = compares, False
        self._loss = loss
        self._model = model
        self._parts: dict[int, tuple[range, Any, list[bool]]] = {}
        self._gradients: Tensors = []
        self._own_gradients: dict[int, torch.Tensor | None] = {}
        self._value = Loss(torch.zeros(()))

    def collect(self, shard: Shard) -> LossFunction:
        """Return a loss function that keeps the outputs of a shard, and takes no part in the gradient.

        Args:
            shard: The shard.
        """

        def loss_fn(model: Any, /, *args: Any, **kwargs: Any) -> Loss:
            # With a graph, although it is not used: without one, some modules compute by other kernels.
            outputs = self._loss.forward(model, *args, **kwargs)
            _check_outputs(outputs, shard)
            # What forward detaches, such as the keys of a queue, is detached for the criterion as well.
            attached = [tensor.requires_grad for tensor in nest.tensors(outputs)]
            self._parts[shard.index] = shard.samples, nest.map_tensors(_gatherable, outputs), attached
            return Loss(torch.zeros((), requires_grad=True), weight=0)

        return loss_fn

    def differentiate(self, communicator: Communicator, device: torch.device) -> None:
        """Gather the outputs of all ranks, and compute the loss and its gradient.

        The gradient is taken with respect to the outputs, and to the parameters of the model that the criterion uses.

        Args:
            communicator: The communicator of the run.
            device: The device to compute on.

        Raises:
            TypeError: If the criterion did not return a loss.
            ValueError: If shards returned outputs of different structures or shapes, the loss cannot be used, or the
                criterion has parameters that the model lacks.
            OrderError: If the criterion calls a collective.
        """
        parts = self._parts
        if communicator.size > 1:
            own = {
                index: (samples, nest.map_tensors(torch.Tensor.cpu, each), attached)
                for index, (samples, each, attached) in parts.items()
            }
            parts = {index: part for rank in communicator.gather_objects(own) for index, part in rank.items()}
        in_order = [parts[index] for index in sorted(parts)]
        merged = _merged([(samples, outputs) for samples, outputs, _ in in_order], device)
        leaves = [tensor.requires_grad_(is_used) for tensor, is_used in zip(merged, in_order[0][2], strict=True)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        sends = refusing_collectives("The criterion of a BatchLoss", _WHY) if communicator.size > 1 else nullcontext()
        reports = collecting(Observers({"": self._model}), sum(len(samples) for samples, *_ in in_order))
        with torch.enable_grad(), torch.autocast(device.type, enabled=False), sends, reports:
            # Not the leaves, which a criterion could not change in place.
            rest = iter([leaf.clone() for leaf in leaves])
            returned = self._loss.criterion(nest.map_tensors(lambda _: next(rest), in_order[0][1]))
        loss = check_loss(returned, training=bool(wanted))
        # What the criterion created is to end with its graph, below.
        del returned
        if loss.weight is not None:
            raise ValueError(f"`criterion` must return a Loss without a weight, got {loss.weight}.")
        gathered = {id(leaf) for leaf in leaves}
        foreign = [ref(each) for each in foreign_leaves([loss.value], self._model) if id(each) not in gathered]
        trained = {index: each for index, each in enumerate(self._model.parameters()) if each.requires_grad}
        every = [*wanted, *trained.values()]
        found = iter(torch.autograd.grad(loss.value, every, allow_unused=True) if loss.value.requires_grad else ())
        self._gradients = [next(found, None) if leaf.requires_grad else None for leaf in leaves]
        self._own_gradients = dict(zip(trained, found, strict=False))
        # The name "loss" belongs to the loss of the update.
        reports.pairs.pop("loss", None)
        self._value = Loss(loss.value.detach(), metrics={**reports.pairs, **loss.metrics})
        del loss
        check_leaves(foreign, "criterion", self._loss.criterion)

    def shard_loss(self, shard: Shard) -> LossFunction:
        """Return a loss function whose gradient is the part of a shard in the gradient of the whole batch.

        The values of all shards add up to the loss of the whole batch.

        Args:
            shard: The shard.
        """
        samples = shard.samples

        def loss_fn(model: Any, /, *args: Any, **kwargs: Any) -> Loss:
            product: Any = 0
            outputs = nest.tensors(self._loss.forward(model, *args, **kwargs))
            if self._compares and not self.differs and shard.index in self._parts:
                before = nest.tensors(self._parts[shard.index][1])
                self.differs = not all(map(_same, before, map(_gatherable, outputs)))
            pairs = [
                (tensor, None if gradient is None else gradient[samples.start : samples.stop : samples.step])
                for tensor, gradient in zip(outputs, self._gradients, strict=True)
            ]
            # The gradient of the parameters that the criterion uses counts once.
            if not shard.index and self._own_gradients:
                parameters = [*model.parameters()]
                pairs += [(parameters[index], gradient) for index, gradient in self._own_gradients.items()]
            for tensor, part in pairs:
                if part is not None and tensor.requires_grad:
                    product = product + (tensor.to(part.dtype) * part.to(tensor.device)).sum()
            if not isinstance(product, torch.Tensor):
                message = "`criterion` must depend on an output that requires a gradient, got outputs without one."
                raise ValueError(message)  # noqa: TRY004 - no argument has a wrong type
            # Zero with the gradient of the product; the first shard adds the loss, which is so reported as it is.
            zero = product - product.detach()
            if shard.index:
                return Loss(zero)
            return Loss(zero + self._value.value.reshape(()).to(zero.device), metrics=self._value.metrics)

        return loss_fn


def _gatherable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without its graph. Gradients in half precision, not scaled, could become zero."""
    tensor = tensor.detach()
    return tensor.float() if tensor.dtype in HALF_PRECISION else tensor.clone()


def _same(before: torch.Tensor, again: torch.Tensor) -> bool:
    return before.is_meta or checksum(before) == checksum(again)


def _check_outputs(outputs: Any, shard: Shard) -> None:
    """Check that outputs have the samples of their shard.

    Raises:
        TypeError: If there is no tensor.
        ValueError: If a tensor has another length.
    """
    found = list(nest.named_tensors(outputs, "output"))
    if not found:
        raise TypeError(f"`forward` of a BatchLoss must return tensors, got a {type(outputs).__name__}.")
    for name, tensor in found:
        if tensor.dim() == 0 or len(tensor) != len(shard.samples):
            raise ValueError(
                f"`{name}` of the `forward` of a BatchLoss must have the samples of its shard ({len(shard.samples)}) "
                f"along dimension 0, got shape {tuple(tensor.shape)}. Return `value.expand(len(x))` for one value, and "
                "two outputs for two views."
            )


def _plain_values(outputs: Any, name: str) -> list[tuple[str, Any]]:
    """List what is no tensor in outputs, with names."""
    parts = nest.named_parts(outputs, name)
    if parts is None:
        return [] if isinstance(outputs, torch.Tensor) else [(name, outputs)]
    return [found for path, part in parts for found in _plain_values(part, path)]


def _merged(parts: Sequence[tuple[range, Any]], device: torch.device) -> list[torch.Tensor]:
    """Return each output for all samples, in the order of the samples.

    Args:
        parts: For each shard its samples and its outputs.
        device: The device of the results.

    Raises:
        ValueError: If the outputs of shards differ in structure, shape or dtype.
    """
    num_samples = sum(len(samples) for samples, _ in parts)
    kinds: list[list[tuple[object, ...]]] = [
        [(name, tensor.shape[1:], tensor.dtype) for name, tensor in nest.named_tensors(outputs, "output")]
        for _, outputs in parts
    ]
    for (samples, outputs), kind in zip(parts, kinds, strict=True):
        for name, value in _plain_values(outputs, "output"):
            kind.append((name, value if isinstance(value, str | int | float) else type(value)))
            if type(value) is int and value == len(samples) != num_samples:
                raise ValueError(
                    f"`{name}` of the `forward` of a BatchLoss must hold for the whole batch of {num_samples} samples, "
                    f"got {value}, the number of those of a shard. Compute it in the criterion, by len(output)."
                )
        if kind != kinds[0]:
            raise ValueError(
                "`forward` of a BatchLoss must return the same structure for all shards, and a tensor for what differs "
                f"between samples, got {kinds[0]} and {kind}."
            )
    merged = [
        torch.empty((num_samples, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
        for tensor in nest.tensors(parts[0][1])
    ]
    for samples, outputs in parts:
        for whole, tensor in zip(merged, nest.tensors(outputs), strict=True):
            # With split="strided", the samples of a shard are not neighbors.
            whole[samples.start : samples.stop : samples.step] = tensor.to(device)
    return merged
