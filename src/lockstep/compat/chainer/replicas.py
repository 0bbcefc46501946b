"""Replicas of one model by the names of devices, as Chainer's updater accepts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.updaters import MAIN


class FollowingReplicas:
    """Modules that receive the weights and buffers of another module.

    They are not run; the updater makes replicas of its own. If you look at one or evaluate it, you find the
    weights of the last update.

    Args:
        main: The module that is trained.
        modules: Copies of it, on any devices.
    """

    def __init__(self, main: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._main = main
        self._modules = list(modules)

    @torch.no_grad()
    def update(self) -> None:
        """Copy the parameters and buffers of the main module to the others."""
        if _has_lazy_parameters(self._main):
            return
        for module in self._modules:
            if _has_lazy_parameters(module):
                module.load_state_dict(self._main.state_dict())  # which gives its parameters their shapes
            main_tensors = dict(_tensors(self._main))
            for name, tensor in _tensors(module):
                if name in main_tensors:  # the main module may have set a buffer to None since
                    tensor.copy_(main_tensors[name])


def main_first(names: Mapping[str, object]) -> list[str]:
    """List names with "main" first and the others in order.

    >>> main_first({"second": 1, "main": 0, "third": 2})
    ['main', 'second', 'third']
    """
    return sorted(names, key=lambda name: name != MAIN)


def check_replicas(replicas: Mapping[str, nn.Module]) -> None:
    """Refuse modules that are not copies of one model.

    Args:
        replicas: The modules by name, "main" among them.

    Raises:
        ValueError: If a module differs from the main one in a module, a parameter or a buffer.
    """
    expected = _structure(replicas[MAIN])
    for name, replica in replicas.items():
        found = _structure(replica)
        if found != expected:
            differing = sorted(dict(expected.items() ^ found.items()))
            raise ValueError(
                f"`models` must be replicas of one model, got {name!r} that differs from {MAIN!r} in {differing[0]!r}. "
                "To train several networks, each on all devices, use `lockstep.ParallelUpdater`."
            )


def _structure(model: nn.Module) -> dict[str, str]:
    """Describe what copies of a model have in common: modules, parameters and buffers."""
    found = {f"{name}.": type(module).__name__ for name, module in model.named_modules()}
    for name, tensor in _tensors(model):
        shape = "unknown" if is_lazy(tensor) else tuple(tensor.shape)
        found[name] = f"{shape} {tensor.dtype}"
    return found


def _has_lazy_parameters(model: nn.Module) -> bool:
    return any(map(is_lazy, model.parameters()))


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
