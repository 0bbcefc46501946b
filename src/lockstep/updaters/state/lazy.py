"""Initialise lazy parameters by one forward of the first shard, in the same way on every device and rank."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

from lockstep.streams import INITIALISATION, DefaultStream, stream_seed, substream


def is_uninitialised(model: nn.Module) -> bool:
    """Check whether a model has parameters without a shape."""
    return any(is_lazy(parameter) for parameter in model.parameters())


def initialise(model: nn.Module, forward: Callable[[], object], *, device: torch.device, seed: int) -> None:
    """Run the model once, which gives its lazy modules their shapes and values; nothing else changes.

    Each lazy module draws its values from its own random stream, keyed by the run's seed and the module's position in
    the model. They depend neither on devices and shards nor on other random numbers of the forward.

    Args:
        model: The model. Its parameters keep their identity, its buffers their values from before the forward.
        forward: Runs the model on the tensors of a shard.
        device: The device to run on.
        seed: The seed of the run.
    """
    # The forward updates running statistics, which would then count this batch twice.
    buffers = {buffer: buffer.clone() for buffer in model.buffers() if not is_lazy(buffer)}
    handles = []
    with DefaultStream(device) as stream, torch.no_grad():
        for index, module in enumerate(model.modules()):
            if isinstance(module, LazyModuleMixin):
                seeded = partial(_seed, stream, stream_seed(seed, substream(INITIALISATION) + index))
                # PyTorch's hook that initialises the module runs between these two: the first seeds the stream it draws
                # from, the second copies the buffers it has created.
                handles.append(module.register_forward_pre_hook(seeded, prepend=True))
                handles.append(module.register_forward_pre_hook(partial(_keep_buffers, buffers)))
        try:
            forward()
        finally:
            for handle in handles:
                handle.remove()
            for buffer, before in buffers.items():
                buffer.copy_(before)


def _seed(stream: DefaultStream, seed: int, *_: Any) -> None:
    stream.seed(seed)


def _keep_buffers(buffers: dict[torch.Tensor, torch.Tensor], module: nn.Module, *_: Any) -> None:
    """Copy buffers that were created by the initialisation."""
    for buffer in module.buffers(recurse=False):
        if buffer not in buffers:
            buffers[buffer] = buffer.clone()


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return the state of a model, with its own tensors, and None for parameters that have no shape yet.

    Args:
        model: The model.
    """
    state: dict[str, Any] = model.state_dict()
    # In place, because PyTorch attaches the versions of modules to this dict.
    state.update({name: None for name, value in state.items() if is_lazy(value)})
    return state


def load_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Load what `state_of` returned.

    Args:
        model: The model, changed in place.
        state: The state to load.

    Raises:
        RuntimeError: If names or shapes differ; raised by PyTorch.
    """
    shaped = {name: UninitializedParameter() if value is None else value for name, value in state.items()}
    model.load_state_dict(with_metadata(shaped, state))


def with_metadata(state: dict[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Add the module versions of another state to a state; modules use them to migrate old states.

    Args:
        state: The state without versions.
        source: The state with versions, which `state_dict` has returned.
    """
    # PyTorch stores the versions in an attribute of what `state_dict` returns.
    metadata = getattr(source, "_metadata", None)
    if metadata is None:
        return state
    named = OrderedDict(state)
    named._metadata = copy.deepcopy(metadata)  # type: ignore[attr-defined]  # noqa: SLF001
    return named
