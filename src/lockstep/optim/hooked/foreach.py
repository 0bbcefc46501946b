"""Update all parameters of a group at once, by a rule that is written for lists of tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from lockstep.optim.hooked.optimizer import HookedOptimizer


class ForeachOptimizer(HookedOptimizer):
    """An optimizer whose rule works on lists: the weights, the tensors of their state, and the gradients.

    A subclass lists in `_state_names` the tensors that it keeps for each parameter, and implements the
    arithmetic in `_advance_lists`.
    """

    _state_names: ClassVar[tuple[str, ...]] = ("velocity",)

    def state_keys(self, group: Mapping[str, Any]) -> frozenset[str]:  # noqa: ARG002 - the same in all groups
        """Return the keys of a parameter's state."""
        return frozenset(self._state_names)

    @torch.no_grad()
    def advance(self) -> None:
        """Apply one step to the weights; no hook is called and nothing is counted.

        The state belongs to single parameters, so each `part` may advance in a thread of its own.
        """
        self.fill_missing_grads()
        for group in self.param_groups:
            weights: list[Tensor] = []
            grads: list[Tensor] = []
            states: list[list[Tensor]] = [[] for _ in self._state_names]
            self._init_group(group, weights, grads, *states)
            for lists in self._group_by_device_and_dtype(weights, *states, grads):
                self._advance_lists(group, *lists)

    @abstractmethod
    def _advance_lists(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        """Apply a step to weights of one device and one dtype.

        Args:
            group: The parameter group whose options apply.
            *lists: The weights, one list for each name in `_state_names`, and the gradients.
        """

    def _init_group(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor], *states: list[Tensor]
    ) -> None:
        """Collect the parameters to update with their state.

        `torch.compile` looks for a method of this name, and runs it eagerly.
        """
        if group["frozen"]:
            return
        for weight in group["params"]:
            if weight.grad is not None:
                state = self.state[weight]
                if self._state_names[0] not in state:
                    self._init_state(state, weight)
                weights.append(weight)
                grads.append(weight.grad)
                for name, tensors in zip(self._state_names, states, strict=True):
                    tensors.append(state[name])

    def _init_state(self, state: dict[str, Any], weight: Tensor) -> None:
        """Create the state of a parameter, before its first step."""
        # `zeros_like` keeps the strides of the weight, without which the kernels lose their fast path.
        state.update({name: torch.zeros_like(weight) for name in self._state_names})

    def _group_by_device_and_dtype(self, *lists: list[Tensor]) -> list[list[list[Tensor]]]:
        """Group parallel lists by device and dtype, as the multi-tensor kernels require."""
        if not lists[0]:
            return []
        kinds = self._group_tensors_by_device_and_dtype(cast("list[list[Tensor | None]]", list(lists)))
        return cast("list[list[list[Tensor]]]", [tensors for tensors, _ in kinds.values()])
