"""Chainer's updater for several devices, which sums gradients over round-robin parts of a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from inspect import ismethod
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep import updaters
from lockstep.arguments import look_up
from lockstep.compat.chainer.optimizers import GradientMethod, Serializer, serialize
from lockstep.data import BatchIterator, Iterator, MapDataset, OrderSampler, Source, collate
from lockstep.optim import HookedOptimizer
from lockstep.updaters import MAIN, Converter, UpdateResult, by_name


def check_replicas(replicas: Mapping[str, nn.Module]) -> None:
    """Check that modules are copies of one model.

    Args:
        replicas: The modules by name, including "main".

    Raises:
        ValueError: If a module differs from the main one in a module, a parameter or a buffer.
    """
    expected = _structure(replicas[MAIN])
    for name, replica in replicas.items():
        found = _structure(replica)
        if found != expected:
            differing = sorted(dict(expected.items() ^ found.items()))
            raise ValueError(
                f"`models` must be replicas of one model, got {name!r} that differs from {MAIN!r} in {differing[0]!r}. "
                "To train several networks, each on all devices, use `lockstep.ParallelUpdater`."
            )


def _structure(model: nn.Module) -> dict[str, str]:
    """Return what copies of a model have in common: the types of modules, and the formats of parameters and buffers."""
    found = {f"{name}.": type(module).__name__ for name, module in model.named_modules()}
    for name, tensor in _tensors(model):
        shape = "unknown" if is_lazy(tensor) else tuple(tensor.shape)
        found[name] = f"{shape} {tensor.dtype}"
    return found


def _has_lazy_parameters(model: nn.Module) -> bool:
    """Return whether a model has parameters without a shape."""
    return any(map(is_lazy, model.parameters()))


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List the parameters and buffers of a model by name."""
    return [*model.named_parameters(), *model.named_buffers()]


Device: TypeAlias = "int | str | torch.device"


def concat_examples(batch: Any, device: Any = None, padding: Any = None) -> Any:
    """Stack samples into tensors, under Chainer's name for `lockstep.collate`.

    Args:
        batch: The samples, at least one.
        device: The device of the tensors; None leaves them where they are.
        padding: The value that extends samples of different shapes to a common shape.

    Raises:
        ValueError: If there is no sample, or samples differ in structure, dtype or shape.
    """
    return collate(batch, device, padding=padding)


class SerialIterator(BatchIterator):
    """A `lockstep.BatchIterator` with Chainer's arguments, whose last batch is completed from the next epoch.

    Args:
        dataset: The dataset, with ``len()`` and ``[index]``.
        batch_size: The number of samples per batch, at least 1.
        repeat: Whether epochs follow each other without end.
        shuffle: Whether each epoch has a random order. By default it has, unless `order_sampler` is given.
        order_sampler: A function ``order_sampler(order, position)`` that returns the order of an epoch.

    Raises:
        TypeError: As `lockstep.BatchIterator`.
        ValueError: As `lockstep.BatchIterator`.

    References: Chainer 7.8.1, ``chainer.iterators.SerialIterator``.

    >>> with SerialIterator("abc", 2, shuffle=False) as batches:
    ...     list(batches.next()), list(batches.next())
    (['a', 'b'], ['c', 'a'])
    """

    def __init__(
        self,
        dataset: MapDataset,
        batch_size: int,
        repeat: bool = True,
        shuffle: bool | None = None,
        order_sampler: OrderSampler | None = None,
    ) -> None:
        shuffled = order_sampler is None if shuffle is None else shuffle
        super().__init__(
            dataset, batch_size, repeat=repeat, shuffle=shuffled, order_sampler=order_sampler, last_batch="wrap"
        )

    next = BatchIterator.__next__

    def __enter__(self) -> SerialIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.finalize()

    def serialize(self, serializer: Serializer) -> None:
        """Save or load the position, see `ParallelUpdater.serialize`.

        Args:
            serializer: A `Serializer`, which is called with the key "iterator".

        Raises:
            StateError: If the loaded state does not fit.
        """
        serialize(self, "iterator", serializer)


class ParallelUpdater(updaters.ParallelUpdater):
    """Updates a model with the sum of the gradients of several devices, as Chainer does.

    Specific to Chainer, each by an option of `lockstep.ParallelUpdater`: device i of n gets the samples i, i + n,
    i + 2n …; the gradients of the devices' mean losses are **summed**, so that you divide the learning rate by the
    number of devices; buffers are those of the main device. An update whose gradient is not finite is skipped.

    Args:
        iterator: A lockstep iterator or any other source of batches, or a dict of several by name.
        optimizer: An optimizer of this package after `setup`, or any torch optimizer together with `models`, or a
            dict of several by name.
        converter: A function ``converter(samples, device)`` that stacks the samples of each device.
        models: Replicas of the model by name, including "main"; by default the optimizer's target.
        devices: The devices by the same names: a device name of torch or Chainer, the number of a GPU, or -1 for
            the CPU.
        loss_func: The loss function, called as ``loss_func(replica, *batch)``; a method of the model is called on
            the replica. By default the model itself returns the loss.
        loss_scale: The loss scale; by default that of the main optimizer, if it has one.
        auto_new_epoch: Whether `new_epoch` of optimizers is called when the iterator starts an epoch.

    Raises:
        ValueError: If neither `models` nor `devices` are given, or they do not match.
        KeyError: If one of them has no "main".
        TypeError: If an argument has another type.

    Determinism: as `lockstep.ParallelUpdater` with one shard per device: the bits depend on the number of devices.

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
        named_devices = _parse_devices(devices)
        replicas = _replicas(main, models, named_devices)
        super().__init__(
            iterator,
            optimizer,
            replicas[MAIN],
            devices=list(named_devices.values()),
            loss_fn=_on_replica(loss_func, replicas.values()),
            converter=converter,
            loss_scale=main.loss_scale if loss_scale is None and isinstance(main, HookedOptimizer) else loss_scale,
            auto_new_epoch=auto_new_epoch,
            split="strided",
            reduction="sum",
            buffers="first",
            on_overflow="skip",
            # Chainer calls the loss function once for each device.
            audit_every=0,
        )
        self._following = [replica for name, replica in replicas.items() if name != MAIN]

    def update(self) -> UpdateResult:
        """Run one update, then copy the weights to the replicas; see `lockstep.ParallelUpdater.update`."""
        result = super().update()
        self._update_following()
        return result

    def apply_gradients(self, optimizer: str | None = None) -> UpdateResult:
        """Run the second half of an update; see `lockstep.ParallelUpdater.apply_gradients`.

        Args:
            optimizer: The name of the optimizer to step.
        """
        result = super().apply_gradients(optimizer)
        # Within a step function, the weights may still be restored: they are final when the update is complete.
        if self._custom.state is None:
            self._update_following()
        return result

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved state, then copy the weights to the replicas; see `lockstep.ParallelUpdater.load_state_dict`."""
        super().load_state_dict(state)
        self._update_following()

    @torch.no_grad()
    def _update_following(self) -> None:
        """Copy the parameters and buffers of the main model to the other replicas that you have given.

        They do not compute, because the updater creates its own replicas. You can inspect or evaluate them: they have
        the weights of the last update.
        """
        main = self._training.models[MAIN]
        # Before the first batch, a lazy module has no weights to copy.
        if _has_lazy_parameters(main):
            return
        for module in self._following:
            # Loading a state gives lazy parameters their shapes.
            if _has_lazy_parameters(module):
                module.load_state_dict(main.state_dict())
            main_tensors = dict(_tensors(main))
            for name, tensor in _tensors(module):
                # The main module may have set a buffer to None in the meantime.
                if name in main_tensors:
                    tensor.copy_(main_tensors[name])

    def serialize(self, serializer: Serializer) -> None:
        """Save or load everything that the next update depends on.

        Args:
            serializer: A function of a key, which is "updater", and a value: ``state.setdefault`` of an empty dict to
                save, or of a filled one to load.

        Raises:
            StateError: If the loaded state does not fit; nothing has changed then.
        """
        serialize(self, "updater", serializer)


def _replicas(
    optimizer: Optimizer, models: Mapping[str, nn.Module] | None, devices: Mapping[str, object]
) -> dict[str, nn.Module]:
    """Return the replicas by name, or only the main one if the updater creates the others."""
    if models is not None:
        if models.keys() != devices.keys():
            raise ValueError(f"`models` must have the names of `devices` ({sorted(devices)}), got {sorted(models)}.")
        replicas = by_name("models", models, nn.Module, "a torch.nn.Module")
        check_replicas(replicas)
        return replicas
    if not isinstance(optimizer, GradientMethod) or optimizer.target is None:
        kind = type(optimizer).__name__
        raise ValueError(f"`models` must be given if the optimizer has no target, got a {kind} without one.")
    return {MAIN: optimizer.target}


def _parse_devices(devices: Mapping[str, Device] | None) -> dict[str, str | torch.device]:
    """Return the torch devices of Chainer's devices by name, after checking that there is a "main".

    >>> _parse_devices({"main": 0, "second": -1, "third": "@numpy", "fourth": "@cupy:1"})
    {'main': 'cuda:0', 'second': 'cpu', 'third': 'cpu', 'fourth': 'cuda:1'}
    """
    if devices is None:
        raise ValueError("`devices` must be given, a dict of devices by name with one named 'main', got None.")
    look_up(MAIN, devices)
    # The main device first, because `buffers="first"` takes the buffers of the first shard.
    return {name: _device(devices[name]) for name in sorted(devices, key=lambda name: name != MAIN)}


def _device(device: Device) -> str | torch.device:
    """Return the torch device of one of Chainer's devices."""
    if isinstance(device, int):
        return "cpu" if device < 0 else f"cuda:{device}"
    if isinstance(device, str):
        return "cpu" if device == "@numpy" else device.replace("@cupy", "cuda")
    return device


def _on_replica(loss_func: Callable[..., Any] | None, models: Collection[nn.Module]) -> Callable[..., Any] | None:
    """Return a loss function that calls a method on the replica instead of the given model; return others unchanged."""
    if not ismethod(loss_func) or not any(loss_func.__self__ is model for model in models):
        return loss_func
    name = loss_func.__name__
    return lambda replica, *batch, **named: getattr(replica, name)(*batch, **named)
