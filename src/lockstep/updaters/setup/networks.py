"""Hold several networks as one module, and tell several networks from replicas of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lockstep.replicas import Devices
from lockstep.updaters.loss import Loss, LossFunction
from lockstep.updaters.setup.names import MAIN, by_name


class Networks(nn.Module):
    """Several networks by name, so that they are copied, watched and shared as one.

    Args:
        networks: By name.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        super().__init__()
        # Not `add_module`: a network may be called "train" or "type".
        self._modules.update(networks)

    @property
    def by_name(self) -> dict[str, nn.Module]:
        """The networks, in a new dict."""
        return {name: network for name, network in self._modules.items() if network is not None}


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """Call a loss function with a dict of replicas by name."""

    loss_fn: LossFunction

    def __call__(self, model: Networks, /, *args: Any, **kwargs: Any) -> torch.Tensor | Loss:
        """Return what the loss function does."""
        return self.loss_fn(model.by_name, *args, **kwargs)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What is trained, and where.

    Attributes:
        networks: By name; "main" where there is one.
        several: Whether a loss function gets a dict of them.
        devices: Of the places, the main one first.
        workloads: One a place, None where all are equal, or "auto".
        followers: Modules that were given as the replicas of the other places.
    """

    networks: dict[str, nn.Module]
    several: bool
    devices: Devices
    workloads: Sequence[float] | Literal["auto"] | None
    followers: tuple[nn.Module, ...] = ()

    @property
    def module(self) -> nn.Module:
        """The networks as one module."""
        return Networks(self.networks) if self.several else self.networks[MAIN]

    def loss_fn(self, loss_fn: LossFunction) -> LossFunction:
        """Make a loss function of that module of one that the user gave."""
        return NamedLoss(loss_fn) if self.several else loss_fn


def arrange(
    model: object,
    models: object,
    devices: Devices | Mapping[str, str | torch.device],
    workloads: Sequence[float] | Mapping[str, float] | Literal["auto"] | None,
) -> Arrangement:
    """Read what the user gave as models, devices and workloads.

    Args:
        model: A module, or several by name.
        models: The same by another word; one of the two is None.
        devices: Devices, or places by name.
        workloads: One a place, by name if the places have names.

    Raises:
        TypeError: Something is no module, or there is none.
        ValueError: Names or structures do not fit together.
    """
    if (model is None) == (models is None):
        raise TypeError("Either `model` or `models` must be given, got " + ("none." if model is None else "both."))
    given, argument = (models, "models") if model is None else (model, "model")
    networks = by_name(argument, given, nn.Module, "a torch.nn.Module")
    several = networks.keys() != {MAIN}
    if not isinstance(devices, Mapping):
        if isinstance(workloads, Mapping):
            raise TypeError("`workloads` must be by name only where `devices` are, got a mapping.")
        return Arrangement(networks, several, devices, workloads)
    places = _main_first(devices)
    if several and networks.keys() == places.keys():
        main = next(iter(places))
        _check_replicas(networks, main)
        followers = tuple(network for name, network in networks.items() if name != main)
        networks, several = {MAIN: networks[main]}, False
    else:
        followers = ()
    return Arrangement(networks, several, list(places.values()), _by_place(workloads, places), followers)


def _main_first(devices: Mapping[str, str | torch.device]) -> dict[str, str | torch.device]:
    """Put the place "main" first, where there is one; the others stay in order."""
    if not devices:
        raise ValueError("`devices` must name at least one place, got an empty mapping.")
    return {name: devices[name] for name in sorted(devices, key=lambda name: name != MAIN)}


def _by_place(
    workloads: Sequence[float] | Mapping[str, float] | Literal["auto"] | None, places: Mapping[str, object]
) -> Sequence[float] | Literal["auto"] | None:
    """Put workloads that have names into the order of the places."""
    if not isinstance(workloads, Mapping):
        return workloads
    if workloads.keys() != places.keys():
        raise ValueError(f"`workloads` must have the names of `devices` ({sorted(places)}), got {sorted(workloads)}.")
    return [workloads[name] for name in places]


def _check_replicas(replicas: Mapping[str, nn.Module], main: str) -> None:
    """Refuse modules that are no copies of one, though they are named like the places."""
    wanted = _structure(replicas[main])
    for name, replica in replicas.items():
        found = _structure(replica)
        if found != wanted:
            differing = sorted(dict(wanted.items() ^ found.items()))
            raise ValueError(
                f"`models` with the names of `devices` must be replicas of one model, got {name!r} that "
                f"differs from {main!r} in {differing[0]!r}. For several networks, each on all places, give "
                "`devices` as a list."
            )


def _structure(model: nn.Module) -> dict[str, str]:
    """Describe what copies of a model have in common: modules, parameters and buffers."""
    found = {f"{name}.": type(module).__name__ for name, module in model.named_modules()}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        shape = "unknown" if is_lazy(tensor) else tuple(tensor.shape)
        found[name] = f"{shape} {tensor.dtype}"
    return found
