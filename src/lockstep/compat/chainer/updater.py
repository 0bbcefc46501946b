"""Chainer's updater over several devices: gradients summed over round-robin parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import ismethod
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep import updaters
from lockstep.compat.chainer.optimizers import GradientMethod, Serializer
from lockstep.compat.chainer.replicas import FollowingReplicas, check_replicas, main_first
from lockstep.data import Iterator, Source, collate
from lockstep.optim import HookedOptimizer
from lockstep.precision import LossScale
from lockstep.updaters import MAIN, Converter, UpdateResult, by_name, look_up

Device: TypeAlias = "int | str | torch.device"


def concat_examples(batch: Any, device: Any = None, padding: Any = None) -> Any:
    """Stack samples into tensors; `lockstep.collate` by Chainer's name.

    Args:
        batch: At least one sample.
        device: Where to; None for where they are.
        padding: What fills up samples of different shapes.

    Raises:
        ValueError: There is no sample, or samples differ in structure, dtype or shape.
    """
    return collate(batch, device, padding=padding)


class ParallelUpdater(updaters.ParallelUpdater):
    """Update a model by the sum of the gradients of several devices, as Chainer did.

    Peculiar to Chainer, each by an option of `lockstep.ParallelUpdater`: device i of n has the samples i,
    i + n, i + 2n …; gradients of the devices' mean losses are **summed**, so that the learning rate is to be
    divided by the number of devices; buffers are those of the main device. An update whose gradient is not
    finite is left out.

    Args:
        iterator: A lockstep iterator or any source of batches it takes, or several by name.
        optimizer: An optimizer of this module after `setup`, any of torch's together with `models`, or
            several by name.
        converter: Called as ``converter(samples, device)`` for the samples of each device.
        models: Replicas of the model by name, "main" among them; by default the optimizer's target.
        devices: Places by the same names: a name of torch's or Chainer's, a GPU's number, or -1 for the CPU.
        loss_func: Called as ``loss_func(replica, *batch)``; a method of the model is called on its replica.
            By default the model itself returns the loss.
        loss_scale: The factor of the loss; by default that of the main optimizer, if it has one.
        auto_new_epoch: Whether optimizers are told when the iterator starts an epoch.

    Raises:
        ValueError: Neither `models` nor `devices` are given, or they do not fit together.
        KeyError: One of them has no "main".
        TypeError: An argument is of another kind.

    Determinism: as `lockstep.ParallelUpdater` with one shard a device: the bits depend on their number.

    References: Chainer 7.8.1, ``chainer.training.updaters.ParallelUpdater``.
    """

    def __init__(
        self,
        iterator: Iterator | Source | Mapping[str, Iterator | Source],
        optimizer: Optimizer | Mapping[str, Optimizer],
        converter: Converter = concat_examples,
        models: Mapping[str, nn.Module] | None = None,
        devices: Mapping[str, Device] | None = None,
        loss_func: Callable[..., Any] | None = None,
        loss_scale: float | None = None,
        auto_new_epoch: bool = True,
    ) -> None:
        main = look_up(MAIN, optimizer) if isinstance(optimizer, Mapping) else optimizer
        places = _places(devices)
        replicas = _replicas(main, models, places)
        super().__init__(
            iterator,
            optimizer,
            replicas[MAIN],
            devices=[places[name] for name in main_first(places)],
            loss_fn=_on_replica(loss_func, replicas.values()),
            converter=converter,
            loss_scale=_scale_of(main) if loss_scale is None else loss_scale,
            auto_new_epoch=auto_new_epoch,
            split="strided",
            reduction="sum",
            buffers="first",
            on_overflow="skip",
        )
        others = [replica for name, replica in replicas.items() if name != MAIN]
        self._following = FollowingReplicas(replicas[MAIN], others)

    def update(self) -> UpdateResult:
        """Run one update, then copy the weights to the replicas; see `lockstep.ParallelUpdater.update`."""
        result = super().update()
        self._following.update()
        return result

    def apply_gradients(self, optimizer: str | None = None) -> UpdateResult:
        """Run the second half of an update; see `lockstep.ParallelUpdater.apply_gradients`."""
        result = super().apply_gradients(optimizer)
        if self._custom.state is None:  # within a step function the weights count once the update is complete
            self._following.update()
        return result

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, then copy the weights to the replicas; see `lockstep.ParallelUpdater.load_state_dict`."""
        super().load_state_dict(state)
        self._following.update()

    def serialize(self, serializer: Serializer) -> None:
        """Save everything the next update depends on, or load it.

        Args:
            serializer: ``state.setdefault`` of a dict, empty to save, filled to load; the key is "updater".

        Raises:
            StateError: What was loaded does not fit; nothing has been changed.
        """
        state = self.state_dict()
        loaded = serializer("updater", state)
        if loaded is not state:
            self.load_state_dict(loaded)


def _replicas(
    optimizer: Optimizer, models: Mapping[str, nn.Module] | None, places: Mapping[str, object]
) -> dict[str, nn.Module]:
    """Return the replicas by name, or only the main one where the updater is to make the others."""
    if models is not None:
        if models.keys() != places.keys():
            raise ValueError(f"`models` must have the names of `devices` ({sorted(places)}), got {sorted(models)}.")
        replicas = by_name("models", models, nn.Module, "a torch.nn.Module")
        check_replicas(replicas)
        return replicas
    if not isinstance(optimizer, GradientMethod) or optimizer.target is None:
        kind = type(optimizer).__name__
        raise ValueError(f"`models` must be given where the optimizer has no target, got a {kind} without.")
    return {MAIN: optimizer.target}


def _places(devices: Mapping[str, Device] | None) -> dict[str, str | torch.device]:
    """Read Chainer's names of devices, "main" among them.

    >>> _places({"main": 0, "second": -1, "third": "@numpy", "fourth": "@cupy:1"})
    {'main': 'cuda:0', 'second': 'cpu', 'third': 'cpu', 'fourth': 'cuda:1'}
    """
    if devices is None:
        raise ValueError("`devices` must be given, a dict of devices by name with one named 'main', got None.")
    look_up(MAIN, devices)
    return {name: _device(device) for name, device in devices.items()}


def _device(device: Device) -> str | torch.device:
    if isinstance(device, int):
        return "cpu" if device < 0 else f"cuda:{device}"
    if isinstance(device, str):
        return "cpu" if device == "@numpy" else device.replace("@cupy", "cuda")
    return device


def _on_replica(loss_func: Callable[..., Any] | None, models: Collection[nn.Module]) -> Callable[..., Any] | None:
    """Return a loss function that calls a method of a given model on the replica instead; others as they are."""
    if not ismethod(loss_func) or not any(loss_func.__self__ is model for model in models):
        return loss_func
    name = loss_func.__name__
    return lambda replica, *batch, **named: getattr(replica, name)(*batch, **named)


def _scale_of(optimizer: Optimizer) -> LossScale | None:
    """Give the scale that was set on an optimizer by `loss_scaling`."""
    return optimizer.loss_scale if isinstance(optimizer, HookedOptimizer) else None
