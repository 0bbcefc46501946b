"""Give parameters their shapes by one dry forward of the first shard, in the same way everywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import UninitializedParameter, is_lazy

from lockstep.streams import INITIALISATION, DefaultStream, stream_seed, substream
from lockstep.updaters.state.savepoint import with_metadata


def is_uninitialised(model: nn.Module) -> bool:
    """Tell whether a parameter has no shape yet."""
    return any(is_lazy(parameter) for parameter in model.parameters())


def initialise(model: nn.Module, forward: Callable[[], object], *, device: torch.device, seed: int) -> None:
    """Run the model itself once, which gives its lazy modules their shapes and values; nothing else stays.

    Each lazy module draws its values from a stream of its own, keyed by the run's seed and the module's place
    in the model, so they depend neither on devices and shards nor on what else the forward draws.

    Args:
        model: Parameters keep their identity; buffers keep the values from before the forward.
        forward: Runs the model on the arrays of a shard.
        device: Where.
        seed: Of the run.
    """
    buffers = {buffer: buffer.clone() for buffer in model.buffers() if not is_lazy(buffer)}
    handles = []
    with DefaultStream(device) as stream, torch.no_grad():
        for index, module in enumerate(model.modules()):
            if isinstance(module, LazyModuleMixin):
                seeded = partial(_seed, stream, stream_seed(seed, substream(INITIALISATION) + index))
                # Before and after the hook of PyTorch's own that initialises the module.
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
    """Copy buffers that have only just come to be."""
    for buffer in module.buffers(recurse=False):
        if buffer not in buffers:
            buffers[buffer] = buffer.clone()


def state_of(model: nn.Module) -> dict[str, Any]:
    """Give a model's state; None stands for what has no shape yet."""
    state = model.state_dict()
    plain = {name: None if is_lazy(value) else value for name, value in state.items()}
    return with_metadata(plain, state)


def load_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Load what `state_of` gave.

    Raises:
        RuntimeError: PyTorch's, where names or shapes differ.
    """
    shaped = {name: UninitializedParameter() if value is None else value for name, value in state.items()}
    model.load_state_dict(with_metadata(shaped, state))
