"""The training state: networks, optimizers, iterators and schedulers by name, and the counters.

What optimizers and others remember outside of their state is noticed, because a resumed run does not get it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.arguments import look_up
from lockstep.data import Iterator
from lockstep.digest import checksum
from lockstep.errors import DeterminismWarning, warn
from lockstep.nest import tensors
from lockstep.optim import HookedOptimizer, StatefulHook
from lockstep.precision import CurrentScale, LossScale, MasterWeights, parameters_of, to_device
from lockstep.replicas import ReplicaSet
from lockstep.updaters.setup.names import Names
from lockstep.updaters.state.carried import CarriedValues
from lockstep.updaters.state.sharding import ShardedState

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


@dataclass(slots=True)
class TrainingState:
    """Everything that is trained, and how far training has come.

    Attributes:
        replicas: The replicas of all networks as one module, which holds the weights.
        models: The networks by name.
        optimizers: The optimizers by name.
        iterators: The batch iterators by name.
        schedulers: The schedulers that step with applied updates.
        scale: The loss scale of the next attempt, with its numbers on the host or on a device.
        masters: The float32 master weights of parameters in half precision, by the name of their optimizer.
        iteration: The number of complete updates.
        num_applied: The number of updates that moved the weights; a tensor where only the device knows.
        carried: The values that are carried from batch to batch, if there are any.
        sharded: The parts of the state of optimizers that this rank holds where the ranks share it out, by name.
        mode_was_changed: Whether `ensure_training_mode` has warned.
        settings: What `settings_of` returned when the run was set up.
        unsaved: Warns of what optimizers remember and no state holds.
    """

    replicas: ReplicaSet
    models: dict[str, nn.Module]
    optimizers: dict[str, Optimizer]
    iterators: dict[str, Iterator]
    schedulers: dict[str, LRScheduler]
    scale: CurrentScale
    masters: dict[str, MasterWeights] = field(default_factory=dict)
    iteration: int = 0
    num_applied: int | torch.Tensor = 0
    carried: CarriedValues | None = None
    sharded: dict[str, ShardedState] = field(default_factory=dict)
    mode_was_changed: bool = False
    settings: dict[str, Any] = field(init=False)
    unsaved: UnsavedState = field(init=False)

    def __post_init__(self) -> None:
        self.unsaved = of_optimizers(self.optimizers.values())

    def ensure_training_mode(self) -> None:
        """Switch the networks to training mode if all of their modules are in evaluation mode, and warn of it once.

        Modules in evaluation mode below a root in training mode are frozen on purpose, and left alone.
        """
        for network in self.models.values():
            if network.training:
                return
        if any(module.training for network in self.models.values() for module in network.modules()):
            return
        for network in self.models.values():
            network.train()
        if not self.mode_was_changed:
            self.mode_was_changed = True
            warn(
                "The model was in evaluation mode, in which dropout is off and batch normalization does not learn. It "
                "is now in training mode. Call model.train() before training to avoid this warning. To train with "
                "some modules in evaluation mode, call model.train() first and then eval() on these modules."
            )

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale of the next attempt; waits for the device if it is there."""
        return self.scale.value

    @property
    def applied_updates(self) -> int:
        """The number of updates that moved the weights; waits for the device if they are counted there."""
        # Kept as a number, so that the next read does not wait again.
        self.num_applied = int(self.num_applied)
        return self.num_applied

    def keep_carried(self, new: Sequence[torch.Tensor] | None, *, unless: torch.Tensor | None) -> None:
        """Replace the values that are carried to the next batch.

        Args:
            new: The new values; None if nothing is carried.
            unless: A 0-d tensor. If it is above 0, the values stay as they are.
        """
        if self.carried is None or new is None:
            return
        if unless is not None:
            pairs = zip(self.carried.current, new, strict=True)
            new = [torch.where(to_device(unless, after.device) > 0, before, after) for before, after in pairs]
        self.carried.current = list(new)

    def create_master_weights(self) -> None:
        """Create float32 master weights for every optimizer; optimizers of lockstep have their own.

        Raises:
            ValueError: If an optimizer would step its parameters themselves.
        """
        for optimizer in self.optimizers.values():
            check_own_lists(optimizer)
        self.masters = {name: _masters_for(each) for name, each in self.optimizers.items()}

    def names_of(self, optimizer: str | None) -> Names:
        """Return the names of the optimizers that a gradient is for.

        Args:
            optimizer: The name of one optimizer; None for all.

        Raises:
            KeyError: If there is no optimizer of this name.
        """
        if optimizer is None:
            return tuple(self.optimizers)
        look_up(optimizer, self.optimizers, "optimizer")
        return (optimizer,)

    def parameters_of(self, optimizer: str) -> frozenset[int]:
        """Return the parameters of an optimizer, by ``id``."""
        return frozenset(map(id, parameters_of(self.optimizers[optimizer])))

    def state_holders(self) -> dict[str, Optimizer | MasterWeights]:
        """Return what holds the state of each optimizer: the optimizer itself, or the master weights made for it."""
        return {
            name: each if isinstance(each, HookedOptimizer) else self.masters.get(name, each)
            for name, each in self.optimizers.items()
        }

    def step_hooks(self) -> dict[str, StatefulHook]:
        """Return the hooks with a state that PyTorch calls in steps, by optimizer and position.

        The state of hooks that were added with `add_hook` is that of their optimizer.
        """
        found: dict[str, StatefulHook] = {}
        for name, each in self.optimizers.items():
            pre, post = each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks
            for index, hook in enumerate([*pre.values(), *post.values()]):
                if isinstance(hook, StatefulHook):
                    found[f"{name}/{index}"] = hook
        return found

    def master_weights(self, model: str) -> dict[str, torch.Tensor]:
        """Return the float32 master weights of one model, by the names of their parameters.

        Args:
            model: The name of the model.

        Raises:
            KeyError: If there is no model of this name.
        """
        network = look_up(model, self.models, "model")
        return {name: value for each in self.masters.values() for name, value in each.named(network).items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors of the state by name: parameters, buffers, master weights and optimizer state.

        State that is shared out over the ranks is left out, because no two ranks hold the same part.
        """
        found: dict[str, torch.Tensor] = {} if self.carried is None else self.carried.state_dict()
        names: dict[torch.Tensor, str] = {}
        model = self.replicas.model
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            # Parameters without a shape have no bits to compare yet.
            if not is_lazy(tensor):
                found[name] = tensor
                names[tensor] = name
        for masters in self.all_masters():
            found.update({f"the master of {name}": master for name, master in masters.named(model).items()})
        for optimizer in self.optimizers.values():
            state: dict[Any, Any] = optimizer.state
            for parameter, remembered in dict.items(state):
                # What belongs to no parameter has a name of the optimizer's own, and may be a single value.
                owner = names.get(parameter, "a parameter") if isinstance(parameter, torch.Tensor) else repr(parameter)
                values = remembered if isinstance(remembered, Mapping) else {"state": remembered}
                for key, value in values.items():
                    if isinstance(value, torch.Tensor):
                        found[f"{key} of {owner}"] = value
        # Sorted, because threads may have created an optimizer's entries in any order, and ranks compare tensors in
        # order.
        return {name: found[name] for name in sorted(found)}

    def all_masters(self) -> list[MasterWeights]:
        """List the master weights of all optimizers, including those that optimizers hold themselves."""
        held = [self.masters.get(name) or _own_masters(each) for name, each in self.optimizers.items()]
        return [each for each in held if each is not None]


def _masters_for(optimizer: Optimizer) -> MasterWeights:
    if isinstance(optimizer, HookedOptimizer):
        optimizer.use_fp32_update()
    own = _own_masters(optimizer)
    return MasterWeights(optimizer) if own is None else own


def _own_masters(optimizer: Optimizer) -> MasterWeights | None:
    return optimizer.masters if isinstance(optimizer, HookedOptimizer) else None
