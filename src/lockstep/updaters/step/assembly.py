"""Assemble the parts of an updater from its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.communicators import Communicator
from lockstep.errors import warn
from lockstep.precision import CurrentScale, LossScale
from lockstep.replicas import ReplicaSet, Timeout
from lockstep.updaters.attempt.attempt import Deferral
from lockstep.updaters.attempt.audit import Auditor
from lockstep.updaters.ranks.consistency import RankConsistency
from lockstep.updaters.ranks.coordinator import Coordinator
from lockstep.updaters.ranks.rank_reduction import join_ranks
from lockstep.updaters.setup.names import (
    MAIN,
    NetworkSet,
    by_name,
    check_unnamed,
    iterators_by_name,
    named_schedulers,
    parse_networks,
)
from lockstep.updaters.setup.recipe import Recipe
from lockstep.updaters.state.carried import Carried, CarriedValues
from lockstep.updaters.state.recipe_fields import settings_of
from lockstep.updaters.state.training import TrainingState
from lockstep.updaters.step.checks import (
    check_fit,
    check_reached,
    choose_loss_scale,
    fixed_workloads,
    warn_of_idle_devices,
)
from lockstep.updaters.step.commit import Committer
from lockstep.updaters.step.engine import GradientEngine
from lockstep.updaters.step.next_batches import CopyAhead, NextBatches
from lockstep.updaters.step.retry import OverflowRetry
from lockstep.updaters.step.sharing import ShardOptimizer, check_shardable, share_out

Schedulers: TypeAlias = "LRScheduler | Sequence[LRScheduler] | Mapping[str, LRScheduler]"


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an updater.

    Attributes:
        networks: The networks as the user gave them, and as loss functions receive them.
        communicator: The communicator of the run.
        coordinator: Communicates with the other ranks, if there are any.
        engine: Runs the stages of an update that change nothing.
        retry: Decides what follows a non-finite gradient.
        committer: Runs the last stage.
    """

    networks: NetworkSet
    communicator: Communicator
    coordinator: Coordinator
    engine: GradientEngine
    retry: OverflowRetry
    committer: Committer


def assemble(
    recipe: Recipe,
    *,
    iterator: Any,
    optimizer: Any,
    model: Any,
    placement: tuple[Any, Any],
    scheduler: Any,
    loss_scale: LossScale | float | None,
    timeout: Timeout,
    communicator: Communicator,
    custom_step: bool,
    carried: Carried | None,
    copy_ahead: CopyAhead,
    auditor: Auditor,
    shard_optimizer: ShardOptimizer,
) -> Parts:
    """Check the arguments of an updater that are not in its recipe, and create its parts.

    Args:
        recipe: The arguments that the result depends on.
        iterator: The argument `iterator` of `ParallelUpdater`.
        optimizer: The argument `optimizer`.
        model: The argument `model`.
        placement: The arguments `devices` and `workloads`.
        scheduler: The argument `scheduler`.
        loss_scale: The argument `loss_scale`; None for the loss scale of the optimizers.
        timeout: The number of seconds after which a device counts as hung.
        communicator: The communicator of the run.
        custom_step: Whether a step function defines the update.
        carried: What is carried from batch to batch; None for nothing.
        copy_ahead: Whether batches are copied to accelerators one update ahead.
        auditor: Chooses the shards that are computed twice.
        shard_optimizer: Whether ranks share out the steps and the state of optimizers.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or if arguments do not belong together.

    Returns:
        The parts.
    """
    optimizers: dict[str, Optimizer] = by_name("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    _prepare_hooks(optimizers)
    devices, workloads = placement
    check_unnamed(devices, workloads)
    networks = parse_networks(model)
    # Before replicas are created: nothing of the user's is touched until its arguments are known to fit.
    check_fit(recipe, networks, optimizers, carried, custom_step=custom_step)
    check_shardable(shard_optimizer, optimizers, networks.module)
    fixed = fixed_workloads(recipe, workloads)
    replicas = ReplicaSet(networks.module, devices, workloads=fixed, timeout=timeout)
    training = TrainingState(
        replicas=replicas,
        models=networks.modules,
        optimizers=optimizers,
        iterators=iterators_by_name(iterator),
        schedulers=named_schedulers(scheduler, optimizers),
        scale=CurrentScale(choose_loss_scale(loss_scale, optimizers)),
        carried=None if carried is None else CarriedValues(carried, replicas.devices[0]),
    )
    # Now, because schedules move the options of optimizers, and a resumed script sets up the same ones.
    training.settings = settings_of(training)
    # Collective: every rank must reach this call.
    ranks = join_ranks(
        communicator,
        replicas.workloads,
        RankConsistency(communicator, training, recipe),
        movable=recipe.num_shards is not None,
        measure=workloads == "auto",
    )
    measure = workloads == "auto" and (len(replicas.devices) > 1 if ranks is None else ranks.may_move)
    auditor.is_mixed = len(replicas.device_types) > 1
    engine = GradientEngine(training, recipe, auditor, watch=communicator.watch, measure_speeds=measure, ranks=ranks)
    # Before master weights are created, which are allocated on the devices of their parameters.
    replicas.model.to(replicas.devices[0])
    check_reached(training.optimizers, replicas.model)
    if recipe.precision_policy.held_dtype:
        training.create_master_weights()
    # A step function may use batches in any way.
    if replicas.accelerators and copy_ahead and not custom_step:
        always = copy_ahead is True
        engine.ahead = NextBatches(training.iterators[MAIN], replicas, engine.conversion, engine.share, always=always)
    if ranks is not None:
        # Each process loads only the samples of its own shards.
        for each in training.iterators.values():
            each.load_only(engine.own_samples)
    _warn_of_shards(recipe, engine, communicator)
    coordinator = Coordinator() if ranks is None else ranks.coordinator
    shared = {} if ranks is None else share_out(training, communicator, shard_optimizer, ranks)
    deferral = Deferral(recipe.on_overflow, communicator.size, training)
    retry = OverflowRetry(engine, deferral, coordinator)
    committer = Committer(engine, deferral, shared=shared)
    return Parts(networks, communicator, coordinator, engine, retry, committer)


def _warn_of_shards(recipe: Recipe, engine: GradientEngine, communicator: Communicator) -> None:
    """Warn where the number of shards does not fit the devices."""
    if recipe.num_shards is None and engine.shards_per_batch > 1 and recipe.split == "contiguous":
        warn(
            f"`num_shards` is not given, so each batch is cut into one shard per device ({engine.shards_per_batch}). "
            "Random numbers, batch statistics and rounding then depend on the number of devices. Give num_shards for "
            "results that do not."
        )
    if communicator.rank == 0:
        devices = len(engine.replicas.devices) * communicator.size
        warn_of_idle_devices(recipe, engine.training.iterators[MAIN], devices=devices)


def _prepare_hooks(optimizers: Mapping[str, Optimizer]) -> None:
    """Prepare the hooks of optimizers that wrap others and do not call the constructor of their base class."""
    for optimizer in optimizers.values():
        if "_optimizer_step_pre_hooks" not in vars(optimizer):
            Optimizer.__setstate__(optimizer, {})
