"""How MXNet's store updates its values: by assignment, by a function, or with an optimizer per key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.compat.mxnet.keys import Key
from lockstep.state import check_keys

OptimizerFactory: TypeAlias = "Callable[[list[nn.Parameter]], Optimizer]"
UpdateFunction: TypeAlias = "Callable[[Key, Tensor, Tensor], object]"
"""A function of a key, the sum of the pushed tensors, and the value, which it changes in place."""


def assign_sum(key: Key, summed: Tensor, value: Tensor) -> None:
    """Set the value to the sum."""
    del key
    value.copy_(summed.to_dense())


class OptimizerPerKey:
    """Updates each value with its own optimizer.

    Args:
        make: A function that creates an optimizer for a list of parameters, such as the classes of torch and
            lockstep.
        rescale_grad: The factor that sums are multiplied by first.

    Attributes:
        optimizers: The optimizers by key.
    """

    def __init__(self, make: OptimizerFactory, rescale_grad: float) -> None:
        self._make = make
        self._rescale_grad = rescale_grad
        self.optimizers: dict[Key, Optimizer] = {}

    def add(self, key: Key, value: Tensor) -> None:
        """Add a key, whose value becomes the only parameter of its optimizer."""
        # The parameter shares the memory of the value, so that a step changes the value.
        self.optimizers[key] = self._make([nn.Parameter(value)])

    def __call__(self, key: Key, summed: Tensor, value: Tensor) -> None:
        """Apply a step with the sum as gradient; the sum is changed in place."""
        del value  # the parameter shares its memory
        optimizer = self.optimizers[key]
        ((parameter,),) = (group["params"] for group in optimizer.param_groups)
        parameter.grad = summed.mul_(self._rescale_grad)
        optimizer.step()
        # The sum would otherwise stay in memory until the next push.
        parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer."""
        return {str(key): each.state_dict() for key, each in self.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load saved states of the same keys.

        Raises:
            StateError: If keys are missing or unknown.
        """
        check_keys(state, map(str, self.optimizers), of="a KVStore's optimizers")
        for key, each in self.optimizers.items():
            each.load_state_dict(state[str(key)])
