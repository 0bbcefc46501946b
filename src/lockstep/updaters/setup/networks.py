"""Several networks by name, held as one module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from lockstep.updaters.loss import BatchLoss, Loss, LossFunction
from lockstep.updaters.setup.names import MAIN, by_name


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

    def selector(self, name: str) -> Callable[[nn.Module], nn.Module]:
        """Return a function that finds a network in a replica of `module`.

        Args:
            name: The name of the network.
        """
        return partial(_select, name) if self.several else _itself

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


def _select(name: str, replica: nn.Module) -> nn.Module:
    return cast("Networks", replica).by_name[name]


def _itself(replica: nn.Module) -> nn.Module:
    return replica


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
