"""Notice what optimizers and others remember outside of their state, which a resumed run does not get back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final, TypeVar

import torch
from torch.optim import Optimizer

from lockstep.digest import checksum
from lockstep.errors import DeterminismWarning, warn
from lockstep.nest import tensors

Owner = TypeVar("Owner")

MOST_LEVELS: Final = 4
"""The number of containers at most around a value that is looked at."""


class UnsavedState:
    """Compares what objects remember outside of their state with what they did at the beginning.

    Args:
        owners: The objects.
        remembered: Returns for one of them what stands for the values that no state holds, by name.
        rest: The end of the warning: what follows, and the cure.
    """

    def __init__(self, owners: Iterable[Owner], remembered: Callable[[Owner], Mapping[str, object]], rest: str) -> None:
        self._begun: list[tuple[Any, Mapping[str, object]]] = [(each, remembered(each)) for each in owners]
        self._remembered: Callable[[Any], Mapping[str, object]] = remembered
        self._rest = rest

    def check(self) -> None:
        """Warn once if one of them has values that have changed and are not saved."""
        for owner, before in self._begun:
            names = [name for name, value in self._remembered(owner).items() if value != before.get(name)]
            if names:
                self._begun = []
                warn(
                    f"The saved state lacks what {type(owner).__name__} remembers in {', '.join(map(repr, names))}, "
                    f"{self._rest}",
                    DeterminismWarning,
                )
                return


def of_optimizers(optimizers: Iterable[Optimizer]) -> UnsavedState:
    """Return a comparison of the attributes of optimizers that are neither PyTorch's nor lockstep's.

    An optimizer with a `state_dict` of its own is expected to save what it needs.

    Args:
        optimizers: The optimizers.
    """
    others = [
        each
        for each in optimizers
        if type(each).state_dict is Optimizer.state_dict
        and not type(each).__module__.startswith(("torch.", "lockstep."))
    ]
    rest = (
        "because its `state_dict` does not return it, so that a resumed run, or an update that is made again, may use "
        "other numbers. Keep it in `self.state` or in `param_groups`, or override `state_dict` and `load_state_dict`."
    )
    return UnsavedState(others, _remembered, rest)


def check_own_lists(optimizer: Optimizer) -> None:
    """Check that an optimizer whose parameters are replaced by master weights finds them in its groups.

    Args:
        optimizer: The optimizer.

    Raises:
        ValueError: If it has a list of its parameters of its own.
    """
    parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for name, value in vars(optimizer).items():
        if isinstance(value, list | tuple) and any(id(each) in parameters for each in value):
            raise ValueError(
                f"`precision` must not replace the parameters of {type(optimizer).__name__} by float32 master weights, "
                f"because it keeps a list of its own in {name!r}, by which it would step what has no gradient. Let its "
                "step read them from `self.param_groups`."
            )


def _remembered(optimizer: Optimizer) -> dict[str, Any]:
    """Return what stands for the numbers and tensors in the attributes of an optimizer, by name."""
    parameters = {id(each) for group in optimizer.param_groups for each in group["params"]}
    saved = set(map(id, tensors(list(dict.values(optimizer.state)))))
    own = {name: value for name, value in vars(optimizer).items() if name not in _of_every_optimizer()}
    found = {name: _sign(value, parameters | saved, MOST_LEVELS) for name, value in own.items()}
    return {name: sign for name, sign in found.items() if sign}


@cache
def _of_every_optimizer() -> frozenset[str]:
    """Return the attributes of every optimizer, among them what `state_dict` returns."""
    # Not at import: the first optimizer of a process imports much.
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)])))


def _sign(value: Any, known: set[int], levels: int) -> list[Any]:
    """Return a list that changes with the numbers and tensors in a value, without those that are known."""
    if isinstance(value, bool) or id(value) in known:
        return []
    if isinstance(value, int | float):
        return [value]
    if isinstance(value, torch.Tensor):
        return [checksum(value)]
    if isinstance(value, Optimizer):
        # A wrapper shares the groups of the optimizer inside, and often its state.
        value = value.state
    if not levels or not isinstance(value, Mapping | Sequence) or isinstance(value, str | bytes):
        return []
    parts = value.values() if isinstance(value, Mapping) else value
    return [sign for each in parts for sign in _sign(each, known, levels - 1)]
