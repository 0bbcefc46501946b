"""The options that momentum optimizers share with torch's SGD, and the conversion of its saved state."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from lockstep.optim.hooked import HookedOptimizer, unknown_options

TORCH_OPTIONS: Final = {"dampening": 0.0, "nesterov": False, "maximize": False}
"""The options of ``torch.optim.SGD`` beside those that every momentum optimizer has, with their defaults."""

_KEPT: Final = ("missing_grad", "frozen", "correction")
"""Options that torch's SGD does not have, which keep their values when its state is loaded."""


class MomentumOptimizer(HookedOptimizer):
    """A momentum optimizer with the options ``dampening``, ``nesterov`` and ``maximize`` of torch's SGD.

    A subclass implements the arithmetic in `_advance_rows`, and `_velocity` if its velocity is not torch's.
    """

    is_elementwise = True

    # Set before the velocities of a step exist: the first gradient enters a velocity undampened, as in torch.
    _fresh: frozenset[int] = frozenset()

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        dampening = options.get("dampening", 0)
        if not 0 <= dampening <= 1:
            raise ValueError(f"`dampening` must lie in [0, 1], got {dampening}.")
        if options.get("nesterov") and (options["momentum"] == 0 or dampening != 0):
            raise ValueError(
                "`nesterov` must be used with a momentum above 0 and without dampening, got "
                f"momentum={options['momentum']} and dampening={dampening}."
            )

    def advance(self) -> None:
        """Apply one step to the weights; see `HookedOptimizer.advance`."""
        for group in self.param_groups:
            if group.get("dampening"):
                self._advance_eagerly()
                return
        super().advance()

    # The compiler calls `_init_group` only when it compiles: what is fresh in that step would be so in all later ones.
    # `torch.compiler.disable` would load the compiler when lockstep is imported; this form, which torch's own
    # optimizers use, loads it at the first call.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _advance_eagerly(self) -> None:
        super().advance()

    def _init_group(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor], *states: list[Tensor]
    ) -> None:
        if group.get("dampening"):
            first = [each for each in group["params"] if "velocity" not in self.state.get(each, {})]
            self._fresh = frozenset(map(id, first))
        super()._init_group(group, weights, grads, *states)

    def _advance_lists(self, group: dict[str, Any], *lists: list[Tensor]) -> None:
        weights, velocities, grads = lists
        if group.get("maximize"):
            grads = [-grad for grad in grads]
        # As in torch, dampening has no effect without momentum.
        dampening = group.get("dampening", 0.0) if group["momentum"] else 0.0
        if not dampening:
            self._advance_rows(group, weights, velocities, grads, dampening=0.0)
            return
        rows = list(zip(weights, velocities, grads, strict=True))
        for some, factor in (
            ([row for row in rows if id(row[0]) in self._fresh], 0.0),
            ([row for row in rows if id(row[0]) not in self._fresh], dampening),
        ):
            if some:
                columns = [list(column) for column in zip(*some, strict=True)]
                self._advance_rows(group, *columns, dampening=factor)

    @abstractmethod
    def _advance_rows(self, group: dict[str, Any], *lists: list[Tensor], dampening: float) -> None:
        """Apply a step.

        Args:
            group: The parameter group whose options apply.
            *lists: The weights, the velocities, and the gradients, which are negated for maximization.
            dampening: The dampening of these velocities.
        """

    def _velocity(self, buffer: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - see subclasses
        """Return the state of a parameter, given the momentum buffer of torch's SGD and the options of its group."""
        return {"velocity": buffer.clone()}

    def _converted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the state of this optimizer for one of torch's SGD, and any other with the options that it lacks."""
        # The group comes first as well, so that its keys keep their order.
        saved = state_dict["param_groups"] if state_dict.keys() >= {"state", "param_groups"} else []
        groups = [{**group, **TORCH_OPTIONS, **group} for group in saved]
        if "t" in state_dict or not groups or not all({"foreach", "dampening"} <= group.keys() for group in saved):
            # A state that was saved before these options existed was saved by a run with their defaults.
            return {**state_dict, "param_groups": groups} if groups else state_dict
        options_of: dict[int, Mapping[str, Any]] = {}
        for own, group in zip(self.param_groups, groups, strict=False):
            group.update({name: own[name] for name in _KEPT if name in own})
            if "fused" in group:
                group["fused"] = bool(group["fused"])
            for option in unknown_options(group, self.defaults):
                del group[option]
            options_of.update(dict.fromkeys(group["params"], group))
        buffers = {index: each.get("momentum_buffer") for index, each in state_dict["state"].items()}
        warnings.warn(
            f"The loaded state is that of torch.optim.SGD. Its momentum buffers become the velocities of this "
            f"{type(self).__name__}; hooks, counters and the loss scale keep their state.",
            stacklevel=3,
        )
        return {
            **self.state_dict(),
            "param_groups": groups,
            "state": {
                index: self._velocity(buffer, options_of[index])
                for index, buffer in buffers.items()
                if buffer is not None and index in options_of
            },
        }
