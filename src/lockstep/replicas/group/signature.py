"""What a group's forward is called with: names, dimensions, and the shapes that are bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

import torch

from lockstep.errors import OrderError
from lockstep.replicas.batch import (
    BatchDim,
    InputModes,
    Inputs,
    as_call,
    named_inputs,
    positional_names,
    read_inputs,
    with_numbers,
)
from lockstep.replicas.group.binding import (
    Binding,
    Description,
    bind,
    check_names,
    check_same_inputs,
    read_descriptions,
)

PATH_OF: Final = itemgetter(0)


class Signature:
    """The inputs of a model, and the labels that belong to them.

    Args:
        forward: What is called; names the positions while nothing is bound.
        batch_dim: The dimension that counts samples.
        check: Called with shapes that are to be bound and those that are bound, before anything changes.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        batch_dim: BatchDim,
        check: Callable[[Binding, Binding | None], None],
    ) -> None:
        self._names = positional_names(forward)
        self._batch_dim = batch_dim
        self._check = check
        self.bound: Binding | None = None
        """The names and shapes that are bound."""

    def bind(self, data: Sequence[Description], labels: Sequence[Description] | None) -> None:
        """Fix names and shapes; see `ReplicaGroup.bind`."""
        if self.bound is not None:
            raise OrderError("Inputs are bound once; call reshape to change their shapes.")
        shapes = read_descriptions(data, labels)
        check_names([path for each in shapes for path in each], self._batch_dim, self._names)
        binding = bind(*shapes, self._batch_dim)
        self._check(binding, None)
        self.bound = binding

    def reshape(self, data: Sequence[Description], labels: Sequence[Description] | None) -> bool:
        """Change shapes; see `ReplicaGroup.reshape`."""
        if self.bound is None:
            raise OrderError("reshape must follow bind, which names the inputs.")
        shapes = read_descriptions(data, labels)
        check_same_inputs(self.bound, *shapes)
        binding = bind(*shapes, self._batch_dim)
        self._check(binding, self.bound)
        changed = binding != self.bound
        self.bound = binding
        return changed

    def read(self, batch: Any, modes: InputModes) -> Inputs:
        """Read the batch of a forward.

        Args:
            batch: A tuple or list by position, a dict by name, or the only argument.
            modes: What becomes of the gradients of inputs.

        Raises:
            ValueError: The batch is not what was bound, its dimensions do not fit, or `modes` names an input
                that there is not.
        """
        args, kwargs = as_call(batch)
        absent = [] if self.bound is None else self.bound.paths
        if self.bound is None:
            names = with_numbers(self._names, len(args))
        else:
            names = self.bound.arguments[: len(args)]
            if len(args) > len(names):
                rule = f"must hold the inputs that are bound ({len(names)})"
                raise ValueError(f"`batch` {rule}, got {len(args)}.")
            self.bound.check(named_inputs(args, kwargs, names))
        found = list(named_inputs(args, kwargs, names))
        words = modes.by_path(list(map(PATH_OF, found)), absent)

        def wanted(path: str, tensor: torch.Tensor) -> bool:
            numbers = tensor.is_floating_point() or tensor.is_complex()
            return numbers and words[path] != "null" and (self.bound is None or path in self.bound.data)

        return read_inputs(args, kwargs, found, self._batch_dim, wanted=wanted, absent=absent)

    def read_labels(self, labels: Any, num_samples: int) -> Inputs:
        """Read labels: along the dimensions of those that are bound, else along the first one.

        Raises:
            ValueError: They are not for that many samples.
        """
        args, kwargs = as_call(labels)
        bound = [] if self.bound is None else self.bound.label_arguments
        names = [*bound, *(f"labels[{index}]" for index in range(len(bound), len(args)))][: len(args)]
        read = read_inputs(
            args,
            kwargs,
            list(named_inputs(args, kwargs, names)),
            self._batch_dim if bound else 0,
            wanted=lambda *_: False,
            absent=[] if self.bound is None else self.bound.paths,
            argument="labels",
        )
        if read.num_samples != num_samples:
            raise ValueError(f"`labels` must be for the {num_samples} samples of the forward, got {read.num_samples}.")
        return read
