"""Replicas of one model by the names of devices, as Chainer's updater accepts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.updaters import MAIN


class FollowingReplicas:
    """Modules that receive the weights and buffers of another module.

    They do not compute, because the updater creates its own replicas. You can inspect or evaluate them: they have the
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
        # Before the first batch, a lazy module has no weights to copy.
        if _has_lazy_parameters(self._main):
            return
        for module in self._modules:
            # Loading a state gives lazy parameters their shapes.
            if _has_lazy_parameters(module):
                module.load_state_dict(self._main.state_dict())
            main_tensors = dict(_tensors(self._main))
            for name, tensor in _tensors(module):
                # The main module may have set a buffer to None in the meantime.
                if name in main_tensors:
                    tensor.copy_(main_tensors[name])


def main_first(names: Mapping[str, object]) -> list[str]:
    """Return names in their order, but with "main" first.

    >>> main_first({"second": 1, "main": 0, "third": 2})
    ['main', 'second', 'third']
    """
    return sorted(names, key=lambda name: name != MAIN)


def check_replicas(replicas: Mapping[str, nn.Module]) -> None:
    """Check that modules are copies of one model.

    Args:
        replicas: The modules by name, including "main".

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
    """Return what copies of a model have in common: the types of modules, and the formats of parameters and buffers."""
    found = {f"{name}.": type(module).__name__ for name, module in model.named_modules()}
    for name, tensor in _tensors(model):
        shape = "unknown" if is_lazy(tensor) else tuple(tensor.shape)
        found[name] = f"{shape} {tensor.dtype}"
    return found


def _has_lazy_parameters(model: nn.Module) -> bool:
    """Return whether a model has parameters without a shape."""
    return any(map(is_lazy, model.parameters()))


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List the parameters and buffers of a model by name."""
    return [*model.named_parameters(), *model.named_buffers()]
