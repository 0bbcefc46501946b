"""One pass over data without training: run the shards of this rank, and exchange what all ranks have found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn

from lockstep import nest
from lockstep.data import Iterator as LockstepIterator, Samples, check_not_split_by_rank, fingerprint
from lockstep.errors import DisagreementError, RandomStreamWarning, warn
from lockstep.metrics import Observers
from lockstep.precision import Precision
from lockstep.replicas import OneIntraOpThread, in_mode
from lockstep.streams import DRAWS, moved, restored_generators
from lockstep.updaters import (
    CURE,
    Converter,
    InferenceRunner,
    ParallelUpdater,
    ShardFunction,
    ShardResult,
    Updater,
    batch_size,
    changed_attributes,
    check_attributes_read,
    describe_error,
    generator_states,
    noting_reads,
    raise_error,
)

Batches = TypeVar("Batches", bound=Iterable[Any])


def check_one_pass(batches: object, name: str) -> None:
    """Check that batches end, and that they are the same on every rank.

    Args:
        batches: The source of the batches.
        name: Its name in error messages.

    Raises:
        ValueError: If it repeats, or its sampler gives each rank other samples.
    """
    if getattr(batches, "repeat", False):
        raise ValueError(f"`{name}` must end after one pass, got one that repeats. Create it with repeat=False.")
    check_not_split_by_rank(batches, name)


def rewound(batches: Batches, runner: InferenceRunner) -> Batches:
    """Reset an iterator that can be reset, and let it load only the samples that this process computes.

    Args:
        batches: The source of the batches, which is returned.
        runner: Runs the shards of this process.
    """
    if hasattr(batches, "reset"):
        batches.reset()
    if isinstance(batches, LockstepIterator):
        batches.load_only(runner.own_samples)
    return batches


def as_cuttable(batch: Any, converter: Converter | None, device: torch.device, *, name: str) -> Any:
    """Return a batch in the form that is cut into shards: `Samples`, or tensors with other values beside them.

    Args:
        batch: The batch.
        converter: Converts samples to tensors; None if batches must hold tensors or be `Samples`.
        device: The device to convert samples on that are not a sequence.
        name: The name of the source of the batch in error messages.

    Raises:
        TypeError: If the batch is something else, and there is no converter.
    """
    if isinstance(batch, Samples) or _consists_of_tensors(batch):
        return batch
    if converter is None:
        if nest.has_tensor(batch):
            return batch
        raise TypeError(
            f"`{name}` must yield tensors, or tuples or dicts of tensors, if there is no `converter`, got a "
            f"{type(batch).__name__} without tensors. Pass a converter that returns the tensors of a list of samples, "
            f"and let `{name}` yield lists of samples, as a lockstep.BatchIterator does."
        )
    return Samples(batch, range(len(batch)), batch) if isinstance(batch, Sequence) else converter(batch, device)


def _consists_of_tensors(batch: Any) -> bool:
    """Return whether a batch consists of tensors; a list counts as one of samples."""
    if isinstance(batch, Mapping | tuple):
        return all(map(_consists_of_tensors, batch.values() if isinstance(batch, Mapping) else batch))
    return isinstance(batch, torch.Tensor)


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


@contextmanager
def evaluation_mode(model: nn.Module, replicas: Sequence[nn.Module]) -> Iterator[None]:
    """Set a model and its replicas to evaluation mode, without gradients and on one intra-op thread.

    Afterwards the mode of each module, the attributes of the replicas' modules and what is in their dicts, such as a
    cache, the number of threads, and the random generators of torch's CPU, of Python and of NumPy are restored, also
    after an error.

    Args:
        model: The model to evaluate.
        replicas: The replicas that run.
    """
    # Iterating over a DataLoader draws a seed from the default generator: training must not depend on evaluations.
    with in_mode(model, *replicas, training=False), restored_generators(), OneIntraOpThread(), torch.no_grad():
        modules = [vars(module) for replica in replicas for module in replica.modules()]
        held = [*modules, *(each for own in modules for each in own.values() if type(each) is dict)]
        before = [{**each} for each in held]
        try:
            yield
        finally:
            for each, values in zip(held, before, strict=True):
                if each.keys() != values.keys() or not all(each[name] is value for name, value in values.items()):
                    each.clear()
                    each.update(values)


class DataPass:
    """Runs a function on the shards of batches in evaluation mode, and exchanges what the ranks have found.

    Args:
        runner: Runs the shards of this rank.
        converter: Converts samples to tensors; None for the converter of the runner.
        name: The name of the source of the batches in error messages.

    Attributes:
        networks: The replicas of the network to run, within `running`.
        observers: Their modules, which may report values.
        sizes: The number of samples in each batch so far.
    """

    def __init__(self, runner: InferenceRunner, converter: Converter | None, *, name: str) -> None:
        self.runner = runner
        self.networks: list[nn.Module] = []
        self.observers: list[Observers] = []
        self.sizes: list[int] = []
        self._converter = converter
        self._name = name
        self._communicator = runner.communicator
        self._checksums: list[int] = []
        self._replicas: list[nn.Module] = []
        self._reads: dict[tuple[int, str], str] = {}
        self._failed = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the model in evaluation mode within the ``with`` block, whose errors are raised on all ranks."""
        try:
            # Before the mode of the model changes, because replicas of another mode would have to be created anew.
            self._replicas = replicas = self.runner.prepare()
            self.networks = list(map(self.runner.network_of, replicas))
            self.observers = [Observers({"": network}) for network in self.networks]
            model = self.runner.replicas.model
            with evaluation_mode(model, replicas), noting_reads(model, self._reads):
                yield
        except BaseException as error:
            # The others wait for a message, unless this error came from them.
            if self._communicator.size > 1 and not self._failed:
                self._communicator.gather_objects(describe_error(error, phase="evaluation"))
            raise

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
        seen = map(self._seen, batches)
        while window := list(islice(seen, runner.batches_per_run)):
            first = len(self.sizes)
            before = {} if first else generator_states([], self._replicas)
            results = runner.run(
                window, function, self.observers, first=first, converter=self._converter, arguments=arguments
            )
            if before and (names := moved(before, generator_states([], self._replicas))):
                warn(DRAWS.format("The model or a function draws", " and ".join(names)), RandomStreamWarning)
            self.sizes += [batch_size(batch, runner.conversion.batch_dim) for batch in window]
            yield [(first + each.shard.batch, each) for each in results]
        if not self.sizes:
            raise ValueError(f"`{self._name}` must yield at least one batch, got none. A generator yields only once.")

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in order of ranks.

        Args:
            value: The value of this rank.

        Raises:
            PeerError: If a rank failed.
            PeerInterrupt: If a rank was interrupted.
            SignalExit: If a signal on a rank ends the run.
            DisagreementError: If the ranks were given different batches.
            ValueError: If a function has read from the original model what a forward has set in a replica.
        """
        # Before the exchange, so that the other ranks hear of the error.
        for replica in self._replicas[:1] if self._reads else ():
            check_attributes_read(self._reads, changed_attributes(self.runner.replicas.model, replica))
        if self._communicator.size == 1:
            return [value]
        # An error from here on is raised on every rank, or cannot be sent.
        self._failed = True
        messages = self._communicator.gather_objects({"batches": self._checksums, "value": value})
        for rank, each in enumerate(messages):
            raise_error(rank, each)
        _check_same([each["batches"] for each in messages])
        self._checksums, self._failed = [], False
        return [each["value"] for each in messages]

    def _seen(self, batch: Any) -> Any:
        """Return a batch in the form that is cut into shards, and record it for the other ranks."""
        batch = as_cuttable(batch, self._converter, self.runner.replicas.devices[0], name=self._name)
        if self._communicator.size > 1:
            self._checksums.append(fingerprint(batch, contents=False).checksum)
        return batch


def _check_same(by_rank: Sequence[Sequence[int]]) -> None:
    """Check that all ranks have seen the same batches, given their checksums by rank."""
    for rank, seen in enumerate(by_rank):
        if list(seen) == list(by_rank[0]):
            continue
        pairs = zip(seen, by_rank[0], strict=False)
        position = next((index for index, (one, other) in enumerate(pairs) if one != other), None)
        what = f"there are {len(seen)} and not {len(by_rank[0])}" if position is None else f"batch {position} differs"
        raise DisagreementError(
            f"The evaluation batches of rank {rank} must be those of rank 0, but {what}. {CURE}",
            rank=rank,
            subject="evaluation batches",
        )


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
