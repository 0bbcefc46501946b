"""Step all parameters of a group at once, by a rule that is written for lists of tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from lockstep.optim.hooked.optimizer import HookedOptimizer


class ForeachOptimizer(HookedOptimizer):
    """An optimizer whose rule takes lists: the weights, what is remembered of them, and the gradients.

    A subclass names in `_remembered` the tensors that are remembered for each parameter, and writes
    `_advance_lists`, the arithmetic.
    """

    _remembered: ClassVar[tuple[str, ...]] = ("velocity",)

    def state_keys(self, group: Mapping[str, Any]) -> frozenset[str]:  # noqa: ARG002 - the same in all groups
        """Name what is remembered for a parameter."""
        return frozenset(self._remembered)

    @torch.no_grad()
    def advance(self) -> None:
        """Move the weights one step by their gradients, and do nothing else: no hook, no count.

        What is remembered belongs to one parameter, so each `part` may advance in a thread of its own.
        """
        self.fill_missing_grads()
        for group in self.param_groups:
            weights: list[Tensor] = []
            grads: list[Tensor] = []
            remembered: list[list[Tensor]] = [[] for _ in self._remembered]
            self._init_group(group, weights, grads, *remembered)
            for lists in self._by_kind(weights, *remembered, grads):
                self._advance_lists(group, *lists)

    @abstractmethod
    def _advance_lists(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        """Move weights of one device and one dtype.

        Args:
            group: Whose options hold.
            *lists: The weights, a list for each name in `_remembered`, and the gradients.
        """

    def _init_group(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor], *remembered: list[Tensor]
    ) -> None:
        """Collect what moves, with its state; `torch.compile` runs a method of this name eagerly."""
        if group["frozen"]:
            return
        for weight in group["params"]:
            if weight.grad is not None:
                state = self.state[weight]
                if self._remembered[0] not in state:
                    self._begin(state, weight)
                weights.append(weight)
                grads.append(weight.grad)
                for name, tensors in zip(self._remembered, remembered, strict=True):
                    tensors.append(state[name])

    def _begin(self, state: dict[str, Any], weight: Tensor) -> None:
        """Make what is remembered of a parameter, before its first step."""
        state.update({name: torch.zeros_like(weight) for name in self._remembered})

    def _by_kind(self, *lists: list[Tensor]) -> list[list[list[Tensor]]]:
        """Sort parallel lists by device and dtype, as the multi-tensor kernels want them."""
        if not lists[0]:
            return []
        kinds = self._group_tensors_by_device_and_dtype(cast("list[list[Tensor | None]]", list(lists)))
        return cast("list[list[list[Tensor]]]", [tensors for tensors, _ in kinds.values()])
