"""A pass over data: its batches, in the form that is cut into shards, and what runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lockstep import nest
from lockstep.data import Samples
from lockstep.metrics import Observers
from lockstep.precision import Precision
from lockstep.prediction.evaluation_mode import evaluation_mode
from lockstep.prediction.rank_exchange import RankExchange
from lockstep.updaters import (
    Converter,
    InferenceRunner,
    ParallelUpdater,
    ShardFunction,
    ShardResult,
    Updater,
    batch_size,
)


def as_cuttable(batch: Any, converter: Converter | None, device: torch.device, *, name: str) -> Any:
    """Return a batch in the form that is cut into shards: `Samples`, or tensors.

    Args:
        batch: The batch.
        converter: Converts samples to tensors; None if batches must be tensors or `Samples`.
        device: The device to convert samples on that are not a sequence.
        name: The name of the source of the batch in error messages.

    Raises:
        TypeError: If the batch is something else, and there is no converter.
    """
    if isinstance(batch, Samples) or consists_of_tensors(batch, lists=converter is None):
        return batch
    # Strings and other values beside tensors are cut as those of a batch to train on.
    if converter is None and nest.has_tensor(batch):
        return batch
    if converter is None:
        raise TypeError(
            f"`{name}` must yield tensors, or tuples or dicts of tensors, if there is no `converter`, got "
            f"{_found(batch)}. Pass a converter that returns the tensors of a list of samples, and let "
            f"`{name}` yield lists of samples, as a lockstep.BatchIterator does."
        )
    if isinstance(batch, Sequence):
        return Samples(batch, range(len(batch)), batch)
    return converter(batch, device)


def _found(batch: Any) -> str:
    """Return the type of a batch, and that of the first entry in its containers that is not a tensor."""
    entry = batch
    while isinstance(entry, Mapping | tuple | list):
        entries = entry.values() if isinstance(entry, Mapping) else entry
        entry = next(each for each in entries if not consists_of_tensors(each, lists=True))
    name = type(batch).__name__
    return name if entry is batch else f"{name} that holds a {type(entry).__name__}"


def consists_of_tensors(batch: Any, *, lists: bool) -> bool:
    """Return whether a batch consists of tensors; without ``lists``, a list counts as a list of samples.

    Args:
        batch: The batch.
        lists: Whether a list is a container of tensors.
    """
    if isinstance(batch, Mapping):
        return all(consists_of_tensors(value, lists=lists) for value in batch.values())
    if isinstance(batch, tuple) or (lists and isinstance(batch, list)):
        return all(consists_of_tensors(value, lists=lists) for value in batch)
    return isinstance(batch, torch.Tensor)


def windows(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield lists of batches of the given size; the last one may be shorter.

    Args:
        batches: The batches.
        size: The number of batches in a list, at least 1.
    """
    window: list[Any] = []
    for batch in batches:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def in_held_precision(inputs: Any, precision: Precision) -> Any:
    """Convert the inputs of a model that is held in half precision to that precision; return others unchanged.

    Args:
        inputs: Nested tensors.
        precision: The precision of the model.
    """
    dtype = precision.held_dtype
    if dtype is None:
        return inputs
    return nest.map_tensors(lambda each: each.to(dtype) if each.is_floating_point() else each, inputs)


class DataPass:
    """Runs a function on the shards of batches in evaluation mode, and exchanges what the ranks have found.

    Args:
        runner: Runs the shards of this rank.
        converter: Converts samples to tensors; None for the converter of the runner.
        name: The name of the source of the batches in error messages.

    Attributes:
        exchange: Exchanges values with the other ranks.
        networks: The replicas of the network to run, within `running`.
        sizes: The number of samples in each batch so far.
    """

    def __init__(self, runner: InferenceRunner, converter: Converter | None, *, name: str) -> None:
        self.runner = runner
        self.exchange = RankExchange(runner.communicator)
        self.networks: list[nn.Module] = []
        self.sizes: list[int] = []
        self._converter = converter
        self._name = name

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the model in evaluation mode within the ``with`` block, whose errors are raised on all ranks."""
        with self.exchange.reporting_errors():
            # Before the mode of the model changes, because replicas of another mode would have to be created anew.
            replicas = self.runner.prepare()
            self.networks = list(map(self.runner.network_of, replicas))
            with evaluation_mode(self.runner.replicas.model, replicas):
                yield

    def results(
        self, batches: Iterable[Any], function: ShardFunction, arguments: Callable[[Any], Any]
    ) -> Iterator[list[tuple[int, ShardResult]]]:
        """Yield the results of this rank's shards, each with the number of its batch, for some batches at a time.

        Args:
            batches: The batches.
            function: Called in the thread of a device with its index and what `arguments` returned.
            arguments: Called in the calling thread with the tensors of each shard.

        Raises:
            ValueError: If there is no batch.
        """
        runner = self.runner
        observers = [Observers({"": network}) for network in self.networks]
        for window in windows(map(self._seen, batches), runner.batches_per_run):
            first = len(self.sizes)
            results = runner.run(
                window, function, observers, first=first, converter=self._converter, arguments=arguments
            )
            self.sizes += [batch_size(batch, runner.batch_dim) for batch in window]
            yield [(first + each.shard.batch, each) for each in results]
        if not self.sizes:
            raise ValueError(f"`{self._name}` must yield at least one batch, got none. A generator yields only once.")

    def _seen(self, batch: Any) -> Any:
        """Return a batch in the form that is cut into shards, and record it for the other ranks."""
        batch = as_cuttable(batch, self._converter, self.runner.replicas.devices[0], name=self._name)
        self.exchange.see(batch)
        return batch


def runner_of(
    updater: Updater, *, num_shards: int | None, model: nn.Module | None = None, model_name: str = "main"
) -> InferenceRunner:
    """Return a runner with the devices, ranks and precision of an updater; of its ranks only if it has no replicas.

    Args:
        updater: The updater.
        num_shards: The number of shards per batch; None for that of the updater.
        model: Another model to run instead of one of the updater's.
        model_name: The name of the updater's model to run, which must exist.
    """
    if isinstance(updater, ParallelUpdater):
        return updater.inference_runner(num_shards=num_shards, model=model, model_name=model_name)
    model = updater.get_all_models()[model_name] if model is None else model
    return InferenceRunner.of_model(model, updater.communicator, num_shards=num_shards)
