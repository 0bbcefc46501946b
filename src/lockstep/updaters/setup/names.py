"""Accept one object or several by name, check that they belong together, and hold several networks as one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lockstep.data import Iterator, Source, as_iterator
from lockstep.updaters.loss import BatchLoss, Loss, LossFunction

MAIN = "main"

Names = tuple[str, ...]
"""The names of the optimizers that a gradient is for."""

_LIGHTNING = (
    ' Of configured = model.configure_optimizers(), pass configured["optimizer"] here, and '
    'lockstep.extensions.StepScheduler(configured["lr_scheduler"]["scheduler"]) to trainer.extend.'
)


def by_name(argument: str, given: Any, kind: type[Any], what: str) -> dict[str, Any]:
    """Return objects by name, with a single object as "main".

    Args:
        argument: The name of the argument in errors.
        given: An object, or a mapping from names to objects.
        kind: The type that each object must have.
        what: The type in words, for errors.

    Raises:
        TypeError: If an object has another type.
        ValueError: If there is no object, if a name is empty or contains a dot, or if an object has two names.

    >>> by_name("model", 3, int, "an integer")
    {'main': 3}
    """
    if not isinstance(given, Mapping):
        if not isinstance(given, kind):
            raise TypeError(f"`{argument}` must be {what}, got {_kind_of(given)}.{_remedy(argument, given)}")
        return {MAIN: given}
    if not given:
        raise ValueError(f"`{argument}` must hold at least one object, got an empty mapping.")
    seen: dict[int, str] = {}
    for name, each in given.items():
        # Names are joined to parameter names by a dot, which must stay unambiguous.
        if not isinstance(name, str) or not name or "." in name:
            raise ValueError(f"The names of `{argument}` must be non-empty strings without dots, got {name!r}.")
        if not isinstance(each, kind):
            remedy = _LIGHTNING if (argument, name) == ("optimizer", "lr_scheduler") else ""
            raise TypeError(f"`{argument}[{name!r}]` must be {what}, got {_kind_of(each)}.{remedy}")
        if id(each) in seen:
            both = f"{seen[id(each)]!r} and {name!r}"
            raise ValueError(f"`{argument}` must hold different objects, got the same one under {both}.")
        seen[id(each)] = name
    return dict(given)


def _kind_of(given: object) -> str:
    """Return what an argument is, in words."""
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


def _remedy(argument: str, given: object) -> str:
    """Return what to write instead of an argument of another kind."""
    if isinstance(given, type):
        return f" Create one: {given.__name__}(...)."
    if argument == "optimizer" and isinstance(given, LRScheduler):
        return " Pass the optimizer here, and the scheduler as `scheduler`."
    if argument in ("optimizer", "model") and isinstance(given, nn.Module | Optimizer | Iterator):
        return " The order is (iterator, optimizer, model)."
    made_of = {"optimizer": "model.parameters()", "scheduler": "the optimizer"}
    return f" Create one from {made_of[argument]}." if argument in made_of else ""


def iterators_by_name(given: Iterator | Source | Mapping[str, Iterator | Source]) -> dict[str, Iterator]:
    """Return iterators by name, with a single source of batches as "main".

    Args:
        given: A source of batches, or a mapping from names to sources.

    Raises:
        TypeError: If an object is not a source of batches.
        ValueError: If names are refused by `by_name`, or if none is "main".
    """
    if isinstance(given, Mapping):
        adapted: Any = {name: as_iterator(each, name=f"iterator[{name!r}]") for name, each in given.items()}
    else:
        adapted = as_iterator(given)
    iterators: dict[str, Iterator] = by_name("iterator", adapted, Iterator, "a lockstep Iterator")
    if MAIN not in iterators:
        raise ValueError(f"`iterator` must contain the name 'main', got {sorted(iterators)}.")
    return iterators


def named_schedulers(given: Any, optimizers: Mapping[str, Optimizer]) -> dict[str, LRScheduler]:
    """Return schedulers by name: a single one as "main", those of a sequence by their positions.

    Args:
        given: A scheduler, a sequence or mapping of schedulers, or None.
        optimizers: The optimizers of the updater, by name.

    Raises:
        TypeError: If an object is not a scheduler, or is one that steps by a measured value.
        ValueError: If a scheduler belongs to an optimizer of another updater.
    """
    if given is None:
        return {}
    if isinstance(given, Sequence) and not isinstance(given, str):
        given = {str(index): scheduler for index, scheduler in enumerate(given)}
        if not given:
            return {}
    found = by_name("scheduler", given, LRScheduler, "a torch.optim.lr_scheduler.LRScheduler")
    own = {id(optimizer) for optimizer in optimizers.values()}
    for name, scheduler in found.items():
        if id(scheduler.optimizer) not in own:
            raise ValueError(
                f"`scheduler` must hold schedulers of the updater's optimizers, but {name!r} is not one: its "
                "optimizer is another object. Create the scheduler from the optimizer that the updater is given."
            )
        # Its `step()` requires a metric, which the updater does not have.
        if isinstance(scheduler, ReduceLROnPlateau):
            raise TypeError(
                f"`scheduler` must hold schedulers that step without a measured value, got {name!r}, a "
                "ReduceLROnPlateau. Step it by an extension of the trainer: trainer.extend(lockstep.extensions."
                'StepScheduler(scheduler, value="validation/main/loss")).'
            )
    return found


class Networks(nn.Module):
    """Several networks by name in one module, so that they are copied, observed and shared together.

    Args:
        networks: The networks by name.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # Not `add_module`, which refuses names such as "train" and "type" that are attributes of modules.
        self._modules.update(networks)

    @property
    def by_name(self) -> dict[str, nn.Module]:
        """The networks by name, in a new dict."""
        return {name: network for name, network in self._modules.items() if network is not None}


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """Calls a loss function with a dict of replicas by name."""

    loss_fn: LossFunction

    def __call__(self, model: Networks, /, *args: Any, **kwargs: Any) -> torch.Tensor | Loss:
        """Return what the loss function returns."""
        return self.loss_fn(model.by_name, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class NetworkSet:
    """The networks to train, by name.

    Attributes:
        modules: The networks by name; a single one is called "main".
        several: Whether loss functions receive a dict of the networks instead of one network.
    """

    modules: dict[str, nn.Module]
    several: bool

    @property
    def module(self) -> nn.Module:
        """The networks as one module."""
        return Networks(self.modules) if self.several else self.modules[MAIN]

    def loss_fn(self, loss_fn: LossFunction) -> LossFunction:
        """Convert a loss function of the user to one that receives `module`.

        Args:
            loss_fn: Called with one network, or with a dict of several by name.
        """
        if not self.several:
            return loss_fn
        if isinstance(loss_fn, BatchLoss):
            return replace(loss_fn, forward=NamedLoss(loss_fn.forward))
        return NamedLoss(loss_fn)


def parse_networks(model: object) -> NetworkSet:
    """Parse the argument `model`.

    Args:
        model: One module, or several by name.

    Raises:
        TypeError: If it is something else.
    """
    networks = by_name("model", model, nn.Module, "a torch.nn.Module")
    return NetworkSet(networks, several=networks.keys() != {MAIN})


def check_unnamed(devices: object, workloads: object) -> None:
    """Check that devices and workloads are not given by name.

    Args:
        devices: The argument of the updater.
        workloads: The argument of the updater.

    Raises:
        TypeError: If one of them is a mapping.
    """
    for argument, given in (("devices", devices), ("workloads", workloads)):
        if isinstance(given, Mapping):
            raise TypeError(
                f"`{argument}` must be a list with one entry per device, got a mapping. Devices by name, and replicas "
                "of one model by the same names, are for `lockstep.compat.chainer.ParallelUpdater`."
            )
