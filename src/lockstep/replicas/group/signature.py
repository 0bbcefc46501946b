"""The inputs of a group: what a batch and its labels hold, and their names and shapes if these are bound.

Bound inputs are `Inputs` whose tensors lie on "meta", where they have a shape but no memory. Data comes before labels,
and is what a gradient may be wanted for. The shapes that a model returns for them are inferred without side effects: a
copy of the model is run on tensors that have shapes but no values, and random states are restored. This is inconclusive
if the model looks at values. The dtypes of the inputs are not known, so floating-point inputs are tried before integer
ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from operator import itemgetter
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.errors import OrderError
from lockstep.nest import call_arguments
from lockstep.replicas.batch.input_gradients import InputModes
from lockstep.replicas.batch.inputs import (
    BatchDim,
    Inputs,
    argument_of,
    named_inputs,
    number_positions,
    positional_names,
    read_inputs,
)
from lockstep.replicas.batch.outputs import named_outputs
from lockstep.replicas.modules.on_device import ModuleWrapper
from lockstep.replicas.pool.copies import HOOK_NAMES, copy_model
from lockstep.replicas.pool.probes import uncompiled
from lockstep.streams import restored_generators

MAX_MIXED_INPUTS: Final = 4
"""Up to this number of inputs, all mixtures of floating-point and integer inputs are tried. Beyond, all inputs have the
same dtype."""

META: Final = torch.device("meta")

Shapes: TypeAlias = "list[tuple[str, tuple[int, ...]]]"
"""The name and shape of each output for the whole batch."""


def infer_shapes(
    model: nn.Module, bound: Inputs, arguments: Sequence[str], *, training: bool
) -> tuple[Shapes | None, Exception | None]:
    """Infer the shapes of outputs.

    Args:
        model: The model. It is not modified, and its hooks are not called, except for those of torch that compute its
            weights.
        bound: The shapes of the inputs. Calls are tried with the labels as arguments, and without them.
        arguments: The names of the positional arguments of the model.
        training: Whether training mode is tried first.

    Returns:
        The shapes, or None if they cannot be inferred; and the error of the model if the shapes are the reason.
    """
    # A path leads into a nest of an unknown kind. A wrapper has devices of its own, and possibly threads. Lazy
    # parameters have no shapes yet.
    if (
        arguments_of(bound.names) != bound.names
        or any(isinstance(module, ModuleWrapper) for module in model.modules())
        or any(map(is_lazy, model.parameters()))
    ):
        return None, None
    copied = _without_own_hooks(copy_model(model, META, lambda _: False, {}))
    described, errors = dict(zip(bound.names, bound.tensors, strict=True)), list[Exception]()
    with uncompiled(), restored_generators(), torch.no_grad(), META:
        for mode, dtypes in product(dict.fromkeys((training, False)), _input_dtypes(model, bound)):
            if copied.training != mode:
                copied.train(mode)
            tensors = {path: described[path].to(dtype, copy=True) for path, dtype in dtypes.items()}
            try:
                by_name = tensors.keys() <= set(arguments)
                returned = copied(**tensors) if by_name else copied(*tensors.values())
            except Exception as error:  # noqa: BLE001 - errors of the user's code are the result
                errors.append(error)
            else:
                return [(name, tuple(tensor.shape)) for name, tensor in named_outputs(returned)], None
    # Whether the model would raise such an error for tensors with values, too, is not known.
    if any(isinstance(error, NotImplementedError) or "meta" in str(error).lower() for error in errors):
        return None, None
    # An error about a wrong dtype explains less than one about a shape.
    return None, next((error for error in errors if "scalar type" not in str(error)), errors[0])


def _input_dtypes(model: nn.Module, bound: Inputs) -> Iterator[dict[str, torch.dtype]]:
    """Yield the dtypes that inputs may have, by path, with the most common ones first."""
    model_dtypes = (each.dtype for each in model.parameters() if each.is_floating_point())
    both = (next(model_dtypes, torch.get_default_dtype()), torch.int64)
    data, every_label = data_and_labels(bound)
    for labels in (every_label, []) if every_label else ([],):
        # Labels are most often integers, so these come first.
        kinds = [both] * len(data) + [both[::-1]] * len(labels)
        for dtypes in product(*kinds) if len(kinds) <= MAX_MIXED_INPUTS else zip(*kinds, strict=True):
            yield dict(zip((*data, *labels), dtypes, strict=True))


def _without_own_hooks(model: nn.Module) -> nn.Module:
    """Remove the hooks of a model that do not come from torch, and return it."""
    for module in model.modules():
        for hooks in (vars(module)[name] for name in HOOK_NAMES):
            for key, hook in list(hooks.items()):
                if not type(hook).__module__.startswith("torch."):
                    del hooks[key]
    return model


Description: TypeAlias = "tuple[str, Sequence[int]]"
"""The name or path of an input, and its shape for the whole batch."""


def bound_inputs(
    data: Sequence[Description], labels: Sequence[Description] | None, batch_dim: BatchDim, before: Inputs | None = None
) -> Inputs:
    """Return bound inputs.

    Args:
        data: The descriptions of the inputs.
        labels: The descriptions of the labels, or None.
        batch_dim: The dimension that counts samples, for all inputs or by name.
        before: The inputs that are bound so far, of which only shapes may change and labels may come or go, or None.

    Raises:
        TypeError: If a description is not a pair of a name and a shape.
        ValueError: If there is no data, a name occurs twice, a shape has a negative length or lacks the dimension that
            counts samples, the numbers of samples differ, or there is none; or if an input has another name or number
            of dimensions than before.
    """
    if not data:
        raise ValueError("`data` must describe at least one input, got none.")
    described = [_read_description(each, "data") for each in data]
    found = described + [_read_description(each, "labels") for each in labels or ()]
    names = [path for path, _ in found]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"`data` and `labels` must name each input once, got {twice!r} twice.")
    if before is not None:
        _check_only_shapes_change(before, found, len(described))
    wanted = dict(described)
    return read_inputs((), {}, found, batch_dim, wanted=lambda path, _: path in wanted)


def _read_description(description: Description, argument: str) -> tuple[str, torch.Tensor]:
    """Return the name of one description, and a tensor of its shape."""
    try:
        name, shape = description
        sizes = tuple(shape)
    except (TypeError, ValueError):
        name, sizes = None, ()
    # `type(size) is int` also rejects booleans.
    if not isinstance(name, str) or not all(type(size) is int for size in sizes):
        raise TypeError(f"`{argument}` must hold pairs of a name and a shape, got {description!r}.")
    if min(sizes, default=0) < 0:
        raise ValueError(f"`{argument}` must hold lengths of at least 0, got {sizes} for {name!r}.")
    return name, torch.empty(sizes, device="meta")


def data_and_labels(bound: Inputs) -> tuple[list[str], list[str]]:
    """Return the paths of the data, and those of the labels.

    Args:
        bound: The bound inputs.
    """
    num_data = sum(bound.requires_grad)
    return bound.names[:num_data], bound.names[num_data:]


def arguments_of(paths: Iterable[str]) -> list[str]:
    """Return the names of the arguments that paths lead into.

    Args:
        paths: The paths of inputs.

    >>> arguments_of(["pair[0]", "pair[1]", "table.mask"])
    ['pair', 'table']
    """
    return list(dict.fromkeys(map(argument_of, paths)))


def sample_shapes(bound: Inputs) -> dict[str, list[int]]:
    """Return the shape of each bound input by path, without the dimension that counts samples.

    Args:
        bound: The bound inputs.
    """
    return {
        path: [size for index, size in enumerate(tensor.shape) if index != dim]
        for path, tensor, dim in zip(bound.names, bound.tensors, bound.dims, strict=True)
    }


def check_bound(bound: Inputs, found: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that inputs are the bound ones.

    Args:
        bound: The bound inputs.
        found: The inputs of a call with their paths.

    Raises:
        ValueError: If an input is unknown, has another shape, or is missing.
    """
    expected, given = dict(zip(bound.names, bound.tensors, strict=True)), dict(found)
    for path, tensor in given.items():
        if path not in expected:
            raise ValueError(f"`{path}` must be one of the inputs that are bound ({', '.join(expected)}).")
        if tensor.shape != expected[path].shape:
            raise ValueError(
                f"`{path}` must have the shape it was bound with, {tuple(expected[path].shape)}, got "
                f"{tuple(tensor.shape)}. Call `reshape` first to change shapes."
            )
    missing = [path for path in data_and_labels(bound)[0] if path not in given]
    if missing:
        raise ValueError(f"`batch` must hold the inputs that are bound, got none for {', '.join(missing)}.")


def _check_only_shapes_change(before: Inputs, found: Sequence[tuple[str, torch.Tensor]], num_data: int) -> None:
    """Check that described inputs, with data first, have the names and numbers of dimensions of the bound ones."""
    names = [path for path, _ in found]
    kinds = zip(("data", "labels"), data_and_labels(before), (names[:num_data], names[num_data:]), strict=True)
    for argument, old, new in kinds:
        # Labels may be left out of a call, and therefore of a description.
        if old != new and (argument == "data" or (old and new)):
            raise ValueError(f"`{argument}` must name the inputs that are bound, {old}, got {new}.")
    for (path, tensor), bound in zip(found, before.tensors, strict=False):
        if tensor.dim() != bound.dim():
            raise ValueError(
                f"`{path}` must keep its number of dimensions ({bound.dim()}), got shape {tuple(tensor.shape)}."
            )


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
