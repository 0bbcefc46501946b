"""Find what shapes a model returns for inputs of given shapes, without a trace of having looked.

First with tensors that have shapes and no values (those of the device "meta"); where these cannot tell,
because the model looks at values, with zeros. Both run a copy of the model, and random numbers are put back.
What inputs hold is not known, so floating-point numbers are tried before whole ones.
"""

from __future__ import annotations

import ast
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.replicas.batch import named_outputs
from lockstep.replicas.binding.bound_inputs import BoundInputs
from lockstep.replicas.modules import ModuleWrapper
from lockstep.replicas.pool import HOOKS, copy_model

MOST_MIXED: Final = 3
"""Up to so many data, any mixture of whole and floating-point numbers is tried; of more, one kind for all."""


@dataclass(slots=True)
class Inferred:
    """What was found.

    Attributes:
        shapes: The name and shape of each output, for the whole batch; None where they cannot be known.
        errors: What the model raised, in order.
        refuses: Whether it raised because of the shapes alone, whatever the inputs hold.
    """

    shapes: list[tuple[str, tuple[int, ...]]] | None = None
    errors: list[Exception] = field(default_factory=list)
    refuses: bool = False


def infer(model: nn.Module, binding: BoundInputs, *, training: bool) -> Inferred:
    """Find the shapes of outputs.

    Args:
        model: Left untouched, and its hooks not called, but for those of torch that compute its weights.
        binding: The shapes of inputs. Labels are tried as arguments, and left out.
        training: Whether training mode is tried first.
    """
    if any("." in re.sub(r"\[.*?\]", "", path) for path in binding.paths):
        return Inferred()  # of a dataclass the fields are known, and not the class
    if any(isinstance(module, ModuleWrapper) for module in model.modules()):
        return Inferred()  # it has devices and threads of its own
    if any(map(is_lazy, model.parameters())):
        return Inferred()  # there are no shapes yet
    ways = [(mode, kinds) for mode in dict.fromkeys((training, False)) for kinds in _kinds(model, binding)]
    with _unseen():
        with torch.device("meta") as meta:
            without_values = _try(_copied(model, _without_memory), meta, binding, ways)
        if without_values.shapes is not None:
            return without_values
        with_zeros = _try(_copied(model, torch.Tensor.clone), _home(model), binding, ways)
    with_zeros.errors = without_values.errors + with_zeros.errors
    with_zeros.refuses &= without_values.refuses
    return with_zeros


def refuse_shapes(model: nn.Module, binding: BoundInputs, before: BoundInputs | None, *, training: bool) -> None:
    """Refuse inputs of shapes that the model cannot compute with, where that can be known.

    Args:
        model: Left untouched.
        binding: The new shapes.
        before: The old ones, which are right; None for none.
        training: Whether training mode is tried first.

    Raises:
        ValueError: It cannot; the inputs are named.
    """
    shapes = binding.data | binding.labels
    suspects = [path for path in shapes if before is None or binding.differs(before, path)]
    if not suspects:
        return
    found = infer(model, binding, training=training)
    if not found.refuses:
        return
    error = next((each for each in found.errors if "scalar type" not in str(each)), found.errors[0])
    got = ", ".join(f"{path} {shapes[path]}" for path in suspects)
    names = ", ".join(f"`{path}`" for path in suspects)
    raise ValueError(
        f"{names} must have a shape that the model can compute with, got {got}: {type(error).__name__}: {error}"
    ) from error


def _kinds(model: nn.Module, binding: BoundInputs) -> Iterator[dict[str, torch.dtype]]:
    """Say what inputs may be made of: all that are given, and the dtype of each."""
    dtypes_there = (each.dtype for each in model.parameters() if each.is_floating_point())
    both = (next(dtypes_there, torch.get_default_dtype()), torch.int64)
    count = len(binding.data)
    data = list(product(both, repeat=count)) if count <= MOST_MIXED else [(kind,) * count for kind in both]
    for label in reversed(both) if binding.labels else ():
        for dtypes in data:
            yield {**dict(zip(binding.data, dtypes, strict=True)), **dict.fromkeys(binding.labels, label)}
    for dtypes in data:
        yield dict(zip(binding.data, dtypes, strict=True))


@contextmanager
def _unseen() -> Iterator[None]:
    """Compute without gradients and without torch's compiler, and put random numbers back."""
    state = random.getstate()
    # torch's compiler is slow to import, so that is left to those who use it.
    compiles = "torch._dynamo" in sys.modules
    try:
        eager = torch.compiler.set_stance("force_eager") if compiles else nullcontext()
        with eager, torch.random.fork_rng(), torch.no_grad():
            yield
    finally:
        random.setstate(state)


def _copied(model: nn.Module, convert: Callable[[torch.Tensor], Any]) -> nn.Module:
    """Copy a model with converted parameters and buffers, without the user's hooks."""
    copied = copy_model(model, _home(model))
    for module in copied.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                tensors[name] = None if tensor is None else convert(tensor)
        for hooks in (vars(module)[name] for name in HOOKS):
            for key, hook in list(hooks.items()):
                if not type(hook).__module__.startswith("torch."):
                    del hooks[key]
    return copied


def _home(model: nn.Module) -> torch.device:
    """Say where a model lives."""
    return next((each.device for each in model.parameters()), torch.device("cpu"))


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def _try(
    model: nn.Module,
    device: torch.device,
    binding: BoundInputs,
    ways: Sequence[tuple[bool, Mapping[str, torch.dtype]]],
) -> Inferred:
    """Call a copy in one way after another until one goes through."""
    found = Inferred(refuses=True)
    for training, kinds in ways:
        if model.training != training:
            model.train(training)
        shapes = binding.data | binding.labels
        tensors = {path: torch.zeros(shapes[path], dtype=kind, device=device) for path, kind in kinds.items()}
        try:
            args, kwargs = _as_call(model, tensors)
            returned = model(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - what the user's code raises is what is asked for
            found.errors.append(error)
            found.refuses &= not _tells_nothing(error)
        else:
            found.refuses = False
            found.shapes = [(name, tuple(tensor.shape)) for name, tensor in named_outputs(returned)]
            return found
    return found


def _tells_nothing(error: Exception) -> bool:
    """Tell whether an error is about tensors without values, and not about shapes."""
    return isinstance(error, NotImplementedError) or "meta" in str(error).lower()


def _as_call(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make the arguments of a call: by name where the model has such names, else by position."""
    arguments = _nested(tensors)
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if arguments.keys() <= {each.name for each in parameters if each.kind in kinds}:
        return (), arguments
    return tuple(arguments.values()), {}


def _nested(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Build the containers that paths speak of.

    >>> _nested({"x": 1, "pair[0]": 2, "pair[1]['mask']": 3})
    {'x': 1, 'pair': (2, {'mask': 3})}
    """
    root: dict[Any, Any] = {}
    for path, tensor in tensors.items():
        name, *keys = [step for step in re.split(r"\[(.+?)\]", path) if step]
        *steps, last = (name, *map(ast.literal_eval, keys))
        inner = root
        for step in steps:
            inner = inner.setdefault(step, {})
        inner[last] = tensor
    return {name: _sealed(part) for name, part in root.items()}


def _sealed(part: Any) -> Any:
    """Turn dicts that are counted through into tuples."""
    if not isinstance(part, dict):
        return part
    parts = {key: _sealed(each) for key, each in part.items()}
    return tuple(parts.values()) if all(type(key) is int for key in parts) else parts
