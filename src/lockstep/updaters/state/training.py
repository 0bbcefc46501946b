"""What an update changes: networks, optimizers, iterators and schedulers by name, and the counters."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.data import Iterator
from lockstep.optim import HookedOptimizer
from lockstep.precision import LossScale, MasterWeights, MovingScale
from lockstep.replicas import ReplicaSet
from lockstep.updaters.setup import MAIN, Names, look_up
from lockstep.updaters.state.savepoint import Savepoint


@dataclass(slots=True)
class Training:
    """All that is trained, and how far it has come.

    Attributes:
        group: The replicas of all networks as one module, which is the one that holds the weights.
        models: By name.
        optimizers: By name.
        iterators: By name.
        schedulers: Stepped with applied updates.
        epoch_schedulers: Stepped with epochs.
        scale: The loss scale of the next try, wherever its numbers are.
        masters: What optimizers move in the place of parameters in half precision; by the optimizer's name.
        iteration: How many updates are done.
        applied: How many of those moved the weights; a tensor where only the device knows.
    """

    group: ReplicaSet
    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    iterators: dict[str, Iterator]
    schedulers: dict[str, LRScheduler]
    epoch_schedulers: dict[str, LRScheduler]
    scale: MovingScale
    masters: dict[str, MasterWeights] = field(default_factory=dict)
    iteration: int = 0
    applied: int | torch.Tensor = 0

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next try; waits for the device if it is there."""
        return self.scale.value

    @property
    def applied_updates(self) -> int:
        """How many updates moved the weights; waits for the device if they are counted there."""
        self.applied = int(self.applied)
        return self.applied

    @property
    def iterator(self) -> Iterator:
        """The one an update begins with."""
        return self.iterators[MAIN]

    def make_masters(self) -> None:
        """Give every optimizer float32 masters, its own where it can have some."""
        self.masters = {name: _masters_for(each) for name, each in self.optimizers.items()}

    def names_of(self, optimizer: str | None) -> Names:
        """Name the optimizers that a gradient is for: one, or all.

        Raises:
            KeyError: There is no optimizer of this name.
        """
        if optimizer is None:
            return tuple(self.optimizers)
        look_up(optimizer, self.optimizers)
        return (optimizer,)

    def parameters_of(self, optimizer: str) -> frozenset[int]:
        """Name an optimizer's parameters by ``id``."""
        groups = self.optimizers[optimizer].param_groups
        return frozenset(id(parameter) for group in groups for parameter in group["params"])

    def state_holders(self) -> dict[str, Optimizer | MasterWeights]:
        """Give what holds the state of each optimizer: itself, or the masters of one that knows of none."""
        return {
            name: each if isinstance(each, HookedOptimizer) else self.masters.get(name, each)
            for name, each in self.optimizers.items()
        }

    def master_weights(self, model: str) -> dict[str, torch.Tensor]:
        """Give the float32 masters of one model by the names of their parameters.

        Raises:
            KeyError: There is no model of this name.
        """
        network = look_up(model, self.models)
        return {name: value for each in self.masters.values() for name, value in each.named(network).items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name all tensors of the state: parameters, buffers, masters, and what optimizers remember."""
        found: dict[str, torch.Tensor] = {}
        names: dict[torch.Tensor, str] = {}
        for model, network in self.models.items():
            prefix = "" if len(self.models) == 1 else f"{model}."
            for name, tensor in [*network.named_parameters(), *network.named_buffers()]:
                if not is_lazy(tensor):
                    found[f"{prefix}{name}"] = tensor
                    names[tensor] = f"{prefix}{name}"
            for masters in self._held():
                for name, tensor in masters.named(network).items():
                    found[f"the master of {prefix}{name}"] = tensor
        for optimizer in self.optimizers.values():
            for parameter, remembered in optimizer.state.items():
                for key, value in remembered.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{key} of {names.get(parameter, 'a parameter')}"] = value
        # Threads may have made an optimizer's entries in any order.
        return {name: found[name] for name in sorted(found)}

    def _held(self) -> list[MasterWeights]:
        """List the masters of all optimizers, their own among them."""
        held = [self.masters.get(name) or _own_masters(each) for name, each in self.optimizers.items()]
        return [each for each in held if each is not None]

    def save(self) -> Savepoint:
        """Copy what steps may change."""
        schedulers = [*self.schedulers.values(), *self.epoch_schedulers.values()]
        return Savepoint(self.group.model, self.optimizers.values(), schedulers, self._held())


def _masters_for(optimizer: Optimizer) -> MasterWeights:
    if isinstance(optimizer, HookedOptimizer):
        optimizer.use_fp32_update()
    own = _own_masters(optimizer)
    return MasterWeights(optimizer) if own is None else own


def _own_masters(optimizer: Optimizer) -> MasterWeights | None:
    return optimizer.masters if isinstance(optimizer, HookedOptimizer) else None
