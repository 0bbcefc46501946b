"""Run a function on the shards of batches, without gradients, on the devices of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from lockstep.communicators import Communicator
from lockstep.data import collate
from lockstep.metrics import Observers
from lockstep.plan import Shard
from lockstep.precision import Precision, parse_precision
from lockstep.replicas import Devices, ReplicaSet, ShardRunner, ShardStreams
from lockstep.streams import DEFAULT_GENERATOR_LOCK
from lockstep.updaters.attempt.context import UpdateContext
from lockstep.updaters.compute.prepared_model import recording_runners
from lockstep.updaters.compute.shard_gradients import DeviceForwards, ShardFunction, ShardResult
from lockstep.updaters.compute.shares import RankShare, share_of
from lockstep.updaters.setup.batches import Conversion, Converter, batch_size
from lockstep.updaters.setup.names import MAIN, Networks
from lockstep.updaters.step.assembly import Parts
from lockstep.updaters.step.parts import parts_of

SEED_OFFSET = 2**64
"""The distance of the seeds of forwards from those of updates, which makes their random streams different ones."""


@dataclass(slots=True)
class InferenceRunner:
    """Runs a function on the shards of batches, each as in an update, but without gradients.

    A shard has its own random stream, starts from the buffers of the model, and runs in the precision of the updater.
    The buffers of the model do not change. Results therefore do not depend on which device and rank computes which
    shard.

    Attributes:
        replicas: The model and its replicas.
        communicator: The communicator of the ranks.
        precision: The precision policy.
        conversion: Creates the tensors of shards, and has the seed of the random streams.
        shards_per_batch: The number of shards that a batch is cut into.
        num_devices: The number of devices of all ranks.
        share: Returns the shards that this process computes, for batches of the given sizes.
        streams: Opens the random streams.
        model_name: The name of the network to run, if the model is one of several by name.
        runners: The runner of each replica, up to date after `prepare`.
        create_runners: Updates the replicas to the model, and returns their runners.
        audits: Whether an evaluation looks for what is no mean over samples; not where updates are not audited.
    """

    replicas: ReplicaSet
    communicator: Communicator
    precision: Precision
    conversion: Conversion
    shards_per_batch: int
    num_devices: int
    share: Callable[[Sequence[int]], RankShare]
    streams: ShardStreams
    create_runners: Callable[[], Sequence[ShardRunner]]
    model_name: str = MAIN
    runners: Sequence[ShardRunner] = ()
    audits: bool = False

    @classmethod
    def of_parts(
        cls, parts: Parts, *, num_shards: int | None, model: nn.Module | None = None, model_name: str = MAIN
    ) -> InferenceRunner:
        """Return a runner that uses the devices, ranks and precision of an updater.

        Args:
            parts: The parts of the updater.
            num_shards: The number of shards per batch, at least 1; None for that of updates.
            model: Another model to run instead of one of the updater's.
            model_name: The name of the updater's model to run.
        """
        engine, recipe = parts.engine, parts.engine.recipe
        replicas, streams = engine.replicas, engine.streams

        def runners_of_updater() -> Sequence[ShardRunner]:
            # Compares the ranks before the first update of a run: their models may differ until then.
            parts.coordinator.start_update()
            engine.refresh_prepared()
            return engine.prepared.runners

        if model is not None:
            replicas = ReplicaSet(model, replicas.devices, workloads=replicas.workloads)
            streams = ShardStreams(replicas.devices, lock=DEFAULT_GENERATOR_LOCK)
        return cls(
            replicas,
            parts.communicator,
            recipe.precision_policy,
            Conversion(recipe.converter, recipe.batch_dim, recipe.seed + SEED_OFFSET),
            num_shards or engine.shards_per_batch,
            engine.num_devices,
            partial(engine.share, num_shards=num_shards),
            streams,
            runners_of_updater if model is None else partial(recording_runners, replicas),
            model_name,
            audits=engine.auditor.is_on,
        )

    @classmethod
    def of_model(
        cls,
        model: nn.Module,
        communicator: Communicator,
        *,
        num_shards: int | None,
        devices: Devices | None = None,
        precision: str | None = None,
        converter: Converter = collate,
        seed: int = 0,
    ) -> InferenceRunner:
        """Return a runner that runs a model on every rank.

        Args:
            model: The model.
            communicator: The communicator of the ranks.
            num_shards: The number of shards per batch, at least 1; None for 1.
            devices: The devices of this rank; None for that of the model's parameters. If they are given, all ranks
                must make this call.
            precision: The name of the precision policy; None for that of the parameters, without autocast.
            converter: Converts samples to tensors.
            seed: The seed of the random streams.

        Raises:
            ValueError: If a device or the precision is out of range, or the model is not held in the precision.
        """
        policy = parse_precision(_held_precision(model) if precision is None else precision)
        policy.check_model(model)
        replicas = ReplicaSet(model, [_device_of(model)] if devices is None else devices)
        own = len(replicas.devices)
        is_alone = devices is None or communicator.size == 1
        counts = [own] * communicator.size if is_alone else communicator.gather_objects(own)
        workloads = tuple((1.0,) * count for count in counts)

        def share(sizes: Sequence[int]) -> RankShare:
            return share_of(workloads, communicator.rank, tuple(sizes), num_shards or 1, strided=False)

        return cls(
            replicas,
            communicator,
            policy,
            Conversion(converter, 0, seed + SEED_OFFSET),
            num_shards or 1,
            sum(counts),
            share,
            ShardStreams(replicas.devices, lock=DEFAULT_GENERATOR_LOCK),
            partial(recording_runners, replicas),
            audits=True,
        )

    @property
    def batches_per_run(self) -> int:
        """The number of batches to pass to `run`, so that there is a shard for every device."""
        return max(1, -(-self.num_devices // self.shards_per_batch))

    def prepare(self) -> list[nn.Module]:
        """Update the replicas to the model, and return them; call this before `run` and after changes of the model."""
        self.runners = self.create_runners()
        return [runner.replica for runner in self.runners]

    def network_of(self, replica: nn.Module) -> nn.Module:
        """Return the network to run, given a replica of the model."""
        return replica.by_name[self.model_name] if isinstance(replica, Networks) else replica

    def release(self) -> None:
        """Stop the threads of the replicas, and restore the random kernels of torch, until the next `run`."""
        self.replicas.release()
        self.streams.release()

    def own_samples(self, ahead: int, size: int) -> list[range]:
        """Return the samples of a batch that this process computes, if all batches have this size.

        Args:
            ahead: The number of batches before this one.
            size: The number of samples in the batch.
        """
        batch = ahead % self.batches_per_run
        shards_by_device = self.share([size] * self.batches_per_run).shards_by_device
        return [shard.samples for shards in shards_by_device for shard in shards if shard.batch == batch]

    def run(
        self,
        batches: Sequence[Any],
        function: ShardFunction,
        observers: Sequence[Observers],
        *,
        first: int,
        converter: Converter | None = None,
        arguments: Callable[[Any], Any],
    ) -> list[ShardResult]:
        """Run a function on the shards of some batches that belong to this process.

        Args:
            batches: The batches, each `Samples` or nested tensors.
            function: Called in the thread of a device with its index and what `arguments` returned.
            observers: The modules of each replica that may report values.
            first: The number of batches before these, which determines the random streams.
            converter: Converts samples to tensors instead of the runner's converter.
            arguments: Called in the calling thread with the tensors of each shard.

        Returns:
            The results in the order of shards.

        Raises:
            ReplicaError: If the function raised in a shard, or a device hung.
            ValueError: If a batch is empty, or its tensors differ in length.
        """
        share = self.share([batch_size(batch, self.conversion.batch_dim) for batch in batches])
        conversion = self.conversion if converter is None else self.conversion.by(converter)

        def cut() -> list[list[tuple[Shard, Any]]]:
            shards, devices = share.shards_by_device, self.replicas.devices
            device_shards = conversion.shards(batches, shards, devices, first * self.shards_per_batch)
            return [[(shard, arguments(each)) for shard, each in run] for run in device_shards]

        return self._run(cut, function, observers, first)

    def run_parts(
        self, shard: Shard, given: Any, parts: Sequence[range], function: ShardFunction, observers: Sequence[Observers]
    ) -> list[ShardResult]:
        """Run a function on parts of a shard, on the first device.

        Args:
            shard: The shard.
            given: Its tensors.
            parts: The samples of each part, counted from the first one of the shard.
            function: Called with the index of the device and a pair: the range of the samples, counted from 0, and
                their tensors.
            observers: The modules of each replica that may report values.
        """

        def cut() -> list[list[tuple[Shard, Any]]]:
            devices = self.replicas.devices
            return [parts_of(shard, given, parts, self.conversion, devices[0]), *([] for _ in devices[1:])]

        return self._run(cut, function, observers, shard.batch)

    def _run(
        self,
        cut: Callable[[], Sequence[Sequence[Any]]],
        function: ShardFunction,
        observers: Sequence[Observers],
        first: int,
    ) -> list[ShardResult]:
        """Run a function on the shards of all devices, at the same time where there are several."""
        watch, has_run = self.communicator.watch, False
        tasks = [DeviceForwards(function, self.precision, each, watch) for each in observers]
        with UpdateContext(self.replicas, training=False) as context:
            device_shards = cut()

            def on_device(place: int) -> None:
                runner, shards = self.runners[place], device_shards[place]
                runner.buffers.start_shards(shards[0][0].index if shards else 0)
                runner.run(shards, tasks[place], self.streams)

            def run(*, parallel: bool) -> None:
                nonlocal device_shards, has_run
                # A first run that drew from the default generator, or that left shards out, is discarded.
                device_shards, has_run = cut() if has_run else device_shards, True
                for task in tasks:
                    task.results.clear()
                self.replicas.run(on_device, settings=context.settings, parallel=parallel)

            left_out = True
            while left_out:
                self.streams.run(
                    run,
                    seed=self.conversion.seed,
                    first=first * self.shards_per_batch,
                    parallel=self.replicas.wants_threads(device_shards),
                )
                # There was an interrupt whose handler returned.
                left_out = context.interrupts.check()
        return list(chain.from_iterable(task.results for task in tasks))


def _device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter or buffer of a model."""
    first = next(chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def _held_precision(model: nn.Module) -> str:
    """Return the name of the precision in which the parameters of a model are held."""
    dtypes = {each.dtype for each in model.parameters() if each.is_floating_point()}
    names = {torch.bfloat16: "bf16-true", torch.float16: "fp16-true"}
    return names.get(dtypes.pop(), "fp32") if len(dtypes) == 1 else "fp32"
