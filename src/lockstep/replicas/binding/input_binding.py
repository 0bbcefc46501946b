"""The implementation of `ReplicaGroup.bind`, `reshape` and `output_shapes`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from lockstep.errors import OrderError
from lockstep.replicas.batch import BatchDim
from lockstep.replicas.binding.bound_inputs import (
    BoundInputs,
    Description,
    bound_inputs,
    check_names,
    check_same_inputs,
    read_descriptions,
)
from lockstep.replicas.binding.shape_inference import check_shapes, infer


class InputBinding:
    """The bound inputs of a model, if there are any.

    Args:
        model: The model that is called with the inputs. It is not modified.
        arguments: The names of the positional arguments of the model.
        batch_dim: The dimension that counts samples, for all inputs or by name.
        training: Whether shapes are tried in training mode first.
    """

    def __init__(self, model: nn.Module, arguments: Sequence[str], batch_dim: BatchDim, *, training: bool) -> None:
        self._model = model
        self._arguments = arguments
        self._batch_dim = batch_dim
        self._training = training
        self.bound: BoundInputs | None = None
        """The names and shapes that are bound, or None before `bind`."""

    def bind(self, data: Sequence[Description], labels: Sequence[Description] | None) -> None:
        """Fix names and shapes, as `ReplicaGroup.bind` describes.

        Args:
            data: The name and shape of each input.
            labels: The name and shape of each label, or None.
        """
        if self.bound is not None:
            raise OrderError("Inputs are bound once; call reshape to change their shapes.")
        shapes = read_descriptions(data, labels)
        check_names([path for each in shapes for path in each], self._batch_dim, self._arguments)
        bound = bound_inputs(*shapes, self._batch_dim)
        check_shapes(self._model, bound, None, training=self._training)
        self.bound = bound

    def reshape(self, data: Sequence[Description], labels: Sequence[Description] | None) -> bool:
        """Change shapes, as `ReplicaGroup.reshape` describes, and return whether one of them has changed.

        Args:
            data: The name and shape of each input.
            labels: The name and shape of each label, or None.
        """
        if self.bound is None:
            raise OrderError("reshape must follow bind, which names the inputs.")
        shapes = read_descriptions(data, labels)
        check_same_inputs(self.bound, *shapes)
        bound = bound_inputs(*shapes, self._batch_dim)
        check_shapes(self._model, bound, self.bound, training=self._training)
        changed = bound != self.bound
        # After all checks, so that an error changes nothing.
        self.bound = bound
        return changed

    def output_shapes(self) -> list[tuple[str, tuple[int, ...]]] | None:
        """Return the name and shape of each output for the bound inputs, or None if they cannot be inferred."""
        return None if self.bound is None else infer(self._model, self.bound, training=self._training).shapes
