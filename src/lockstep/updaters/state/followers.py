"""Keep modules that a user gave as replicas equal to the one that is trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lockstep.updaters.state import lazy


class Followers:
    """Modules that take over the weights and buffers of another after every update.

    They are not run: replicas are made by the updater. Who looks at one, or evaluates it, finds the weights
    of the last update in it.

    Args:
        main: The module that is trained.
        modules: Copies of it, on any devices.
    """

    def __init__(self, main: nn.Module, modules: Sequence[nn.Module]) -> None:
        self._main = main
        self.modules = list(modules)
        """Those that follow."""

    def follow(self) -> None:
        """Copy what the main one holds into the others."""
        if not lazy.is_uninitialised(self._main):
            self._copy()

    @torch.no_grad()
    def _copy(self) -> None:
        """Do so where there is something on both sides."""
        for module in self.modules:
            if lazy.is_uninitialised(module):
                module.load_state_dict(self._main.state_dict())  # which gives its parameters their shapes
            theirs = dict(_tensors(self._main))
            for name, own in _tensors(module):
                if name in theirs:  # a buffer may have been set to None since
                    own.copy_(theirs[name])


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
