"""The inputs of a group: what a batch and its labels hold, and their names and shapes if these are bound."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final, Literal

import torch
from torch import nn

from lockstep.errors import OrderError
from lockstep.nest import call_arguments
from lockstep.replicas.batch.input_gradients import InputModes
from lockstep.replicas.batch.inputs import (
    BatchDim,
    Inputs,
    named_inputs,
    number_positions,
    positional_names,
    read_inputs,
)
from lockstep.replicas.group.bound_inputs import (
    Description,
    arguments_of,
    bound_inputs,
    check_bound,
    data_and_labels,
    sample_shapes,
)
from lockstep.replicas.group.shape_inference import Shapes, infer_shapes

PATH_OF: Final = itemgetter(0)


class Signature:
    """The inputs of a model, and the labels that belong to them.

    Args:
        model: The model that is called with the inputs. It is not modified.
        batch_dim: The dimension that counts samples, for all inputs or by name.
        training: Whether shapes are tried in training mode first.
    """

    def __init__(self, model: nn.Module, batch_dim: BatchDim, *, training: bool) -> None:
        self._model = model
        self._arguments = positional_names(model.forward)
        self._batch_dim = batch_dim
        self._training = training
        self.bound: Inputs | None = None
        """The names and shapes that are bound, or None before `bind`."""

    def bind(self, data: Sequence[Description], labels: Sequence[Description] | None) -> None:
        """Fix names and shapes, as `ReplicaGroup.bind` describes.

        Args:
            data: The name and shape of each input.
            labels: The name and shape of each label, or None.
        """
        if self.bound is not None:
            raise OrderError("Inputs are bound once; call reshape to change their shapes.")
        bound = bound_inputs(data, labels, self._batch_dim)
        self._check_shapes(bound, bound.names)
        self.bound = bound

    def reshape(
        self, data: Sequence[Description], labels: Sequence[Description] | None, batch_dim: BatchDim | Literal["same"]
    ) -> bool:
        """Change shapes, as `ReplicaGroup.reshape` describes, and return whether one of them has changed.

        Args:
            data: The name and shape of each input.
            labels: The name and shape of each label, or None.
            batch_dim: The dimension that counts samples, or ``"same"`` for the previous one.
        """
        before = self.bound
        if before is None:
            raise OrderError("reshape must follow bind, which names the inputs.")
        dims = self._batch_dim if batch_dim == "same" else batch_dim
        bound = bound_inputs(data, labels, dims, before)
        old = sample_shapes(before)
        self._check_shapes(bound, [path for path, shape in sample_shapes(bound).items() if shape != old.get(path)])
        # After all checks, so that an error changes nothing.
        self.bound, self._batch_dim = bound, dims
        shapes = [[each.shape for each in inputs.tensors] for inputs in (before, bound)]
        return shapes[0] != shapes[1] or before.dims != bound.dims

    def _check_shapes(self, bound: Inputs, suspects: Sequence[str]) -> None:
        error = infer_shapes(self._model, bound, self._arguments, training=self._training)[1] if suspects else None
        if error is not None:
            shapes = {path: tuple(tensor.shape) for path, tensor in zip(bound.names, bound.tensors, strict=True)}
            got = ", ".join(f"{path} {shapes[path]}" for path in suspects)
            names = ", ".join(f"`{path}`" for path in suspects)
            raise ValueError(
                f"{names} must have a shape that the model can compute with, got {got}: {type(error).__name__}: {error}"
            ) from error

    def output_shapes(self) -> Shapes | None:
        """Return the name and shape of each output for the bound inputs, or None if they cannot be inferred."""
        if self.bound is None:
            return None
        return infer_shapes(self._model, self.bound, self._arguments, training=self._training)[0]

    def read_batch(self, batch: Any, modes: InputModes) -> Inputs:
        """Read the batch of a forward.

        Args:
            batch: A tuple or list of positional arguments, a dict of keyword arguments, or the only argument.
            modes: The gradient modes of the inputs.

        Raises:
            ValueError: If the batch differs from the bound inputs, its dimensions do not fit, or `modes` names an input
                that does not exist.
        """
        args, kwargs = call_arguments(batch)
        expected = self.bound
        absent = [] if expected is None else expected.names
        if expected is None:
            names = number_positions(self._arguments, len(args))
        else:
            names = arguments_of(expected.names)[: len(args)]
            if len(args) > len(names):
                rule = f"must hold the inputs that are bound ({len(names)})"
                raise ValueError(f"`batch` {rule}, got {len(args)}.")
            check_bound(expected, named_inputs(args, kwargs, names))
        found = list(named_inputs(args, kwargs, names))
        modes_by_path = modes.by_path(list(map(PATH_OF, found)), absent)
        data = None if expected is None else data_and_labels(expected)[0]

        def wanted(path: str, tensor: torch.Tensor) -> bool:
            # Integer tensors cannot require a gradient.
            numbers = tensor.is_floating_point() or tensor.is_complex()
            return numbers and modes_by_path[path] != "null" and (data is None or path in data)

        return read_inputs(args, kwargs, found, self._batch_dim, wanted=wanted, absent=absent)

    def read_labels(self, labels: Any, num_samples: int) -> Inputs:
        """Read labels along the dimensions of the bound labels, or else along the first dimension.

        Args:
            labels: A tuple or list of labels, a dict of labels by name, or the only label.
            num_samples: The number of samples of the forward.

        Raises:
            ValueError: If the labels are for another number of samples.
        """
        args, kwargs = call_arguments(labels)
        bound = [] if self.bound is None else arguments_of(data_and_labels(self.bound)[1])
        names = [*bound, *(f"labels[{index}]" for index in range(len(bound), len(args)))][: len(args)]
        read = read_inputs(
            args,
            kwargs,
            list(named_inputs(args, kwargs, names)),
            self._batch_dim if bound else 0,
            wanted=lambda *_: False,
            absent=[] if self.bound is None else self.bound.names,
            argument="labels",
            num_samples=num_samples,
        )
        if read.num_samples != num_samples:
            raise ValueError(f"`labels` must be for the {num_samples} samples of the forward, got {read.num_samples}.")
        return read
