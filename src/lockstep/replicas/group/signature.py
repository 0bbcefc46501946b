"""Read the batch and the labels of a group's forward by the names and dimensions of the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, Final

import torch

from lockstep.nest import call_arguments
from lockstep.replicas.batch import (
    BatchDim,
    InputModes,
    Inputs,
    named_inputs,
    number_positions,
    read_inputs,
)
from lockstep.replicas.binding import BoundInputs

PATH_OF: Final = itemgetter(0)


class Signature:
    """The inputs of a model, and the labels that belong to them.

    Args:
        arguments: The names of the positional arguments of a call, unless other inputs are expected.
        batch_dim: The dimension that counts samples, for all inputs or by name.
    """

    def __init__(self, arguments: Sequence[str], batch_dim: BatchDim) -> None:
        self._names = arguments
        self._batch_dim = batch_dim

    def read_batch(self, batch: Any, modes: InputModes, expected: BoundInputs | None) -> Inputs:
        """Read the batch of a forward.

        Args:
            batch: A tuple or list of positional arguments, a dict of keyword arguments, or the only argument.
            modes: The gradient modes of the inputs.
            expected: The inputs that are bound, or None if none are.

        Raises:
            ValueError: If the batch differs from the bound inputs, its dimensions do not fit, or `modes` names an input
                that does not exist.
        """
        args, kwargs = call_arguments(batch)
        absent = [] if expected is None else expected.paths
        if expected is None:
            names = number_positions(self._names, len(args))
        else:
            names = expected.arguments[: len(args)]
            if len(args) > len(names):
                rule = f"must hold the inputs that are bound ({len(names)})"
                raise ValueError(f"`batch` {rule}, got {len(args)}.")
            expected.check(named_inputs(args, kwargs, names))
        found = list(named_inputs(args, kwargs, names))
        modes_by_path = modes.by_path(list(map(PATH_OF, found)), absent)

        def wanted(path: str, tensor: torch.Tensor) -> bool:
            # Integer tensors cannot require a gradient.
            numbers = tensor.is_floating_point() or tensor.is_complex()
            return numbers and modes_by_path[path] != "null" and (expected is None or path in expected.data)

        return read_inputs(args, kwargs, found, self._batch_dim, wanted=wanted, absent=absent)

    def read_labels(self, labels: Any, num_samples: int, expected: BoundInputs | None) -> Inputs:
        """Read labels along the dimensions of the bound labels, or else along the first dimension.

        Args:
            labels: A tuple or list of labels, a dict of labels by name, or the only label.
            num_samples: The number of samples of the forward.
            expected: The inputs that are bound, or None if none are.

        Raises:
            ValueError: If the labels are for another number of samples.
        """
        args, kwargs = call_arguments(labels)
        bound = [] if expected is None else expected.label_arguments
        names = [*bound, *(f"labels[{index}]" for index in range(len(bound), len(args)))][: len(args)]
        read = read_inputs(
            args,
            kwargs,
            list(named_inputs(args, kwargs, names)),
            self._batch_dim if bound else 0,
            wanted=lambda *_: False,
            absent=[] if expected is None else expected.paths,
            argument="labels",
        )
        if read.num_samples != num_samples:
            raise ValueError(f"`labels` must be for the {num_samples} samples of the forward, got {read.num_samples}.")
        return read
