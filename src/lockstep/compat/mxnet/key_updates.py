"""What moves the values of MXNet's store: an optimizer for each key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.compat.mxnet.keys import Key
from lockstep.state import check_keys

Make: TypeAlias = "Callable[[list[nn.Parameter]], Optimizer]"
Update: TypeAlias = "Callable[[Key, Tensor, Tensor], object]"
"""Called with a key, the sum of what was pushed, and the value, which it changes in place."""


def become(key: Key, summed: Tensor, value: Tensor) -> None:
    """Make the value the sum."""
    del key
    value.copy_(summed)


class OptimizerPerKey:
    """Move each value by an optimizer of its own.

    Args:
        make: Makes one of a list of parameters, as torch's and lockstep's classes do.
        rescale_grad: Sums are multiplied by it first.

    Attributes:
        optimizers: By key.
    """

    def __init__(self, make: Make, rescale_grad: float) -> None:
        self._make = make
        self._rescale_grad = rescale_grad
        self.optimizers: dict[Key, Optimizer] = {}

    def add(self, key: Key, value: Tensor) -> None:
        """Take in a key, whose value becomes the optimizer's only parameter."""
        self.optimizers[key] = self._make([nn.Parameter(value)])

    def __call__(self, key: Key, summed: Tensor, value: Tensor) -> None:
        """Step by a gradient that lies in the memory of the sum."""
        del value  # the parameter is the same memory
        optimizer = self.optimizers[key]
        ((parameter,),) = (group["params"] for group in optimizer.param_groups)
        parameter.grad = summed.mul_(self._rescale_grad)
        optimizer.step()
        parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Give the state of each optimizer."""
        return {str(key): each.state_dict() for key, each in self.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from saved states of the same keys.

        Raises:
            StateError: Keys are missing or unknown.
        """
        check_keys(state, map(str, self.optimizers), of="a KVStore's optimizers")
        for key, each in self.optimizers.items():
            each.load_state_dict(state[str(key)])
