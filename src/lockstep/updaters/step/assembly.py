"""Put the parts of an updater together from what the user gave."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.communicators import Communicator
from lockstep.precision import LossScale, MovingScale
from lockstep.replicas import ReplicaSet, Timeout
from lockstep.updaters.attempt import Deferral
from lockstep.updaters.compute import DeviceTimer
from lockstep.updaters.ranks import Coordinator, Differing, LocalCoordinator, RankConsistency, describe_run, join_ranks
from lockstep.updaters.setup import (
    Arrangement,
    Recipe,
    arrange,
    by_name,
    check_unnamed,
    iterators_by_name,
    named_schedulers,
)
from lockstep.updaters.state import Training
from lockstep.updaters.step.checks import check_fit, chosen_scale, fixed_workloads
from lockstep.updaters.step.commit import Committer
from lockstep.updaters.step.engine import GradientEngine
from lockstep.updaters.step.retry import OverflowRetry

LOG = logging.getLogger("lockstep")

Schedulers: TypeAlias = "LRScheduler | Sequence[LRScheduler] | Mapping[str, LRScheduler]"


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an updater.

    Attributes:
        recipe: What an update is.
        arranged: The networks as the user gave them, and as loss functions get them.
        training: What is trained.
        communicator: Joins the processes of the run.
        coordinator: Where the other ranks are met.
        engine: Makes the stages of an update that change nothing.
        retry: Says what follows a gradient that is not finite.
        committer: Makes the last stage.
        deferral: Decides whether the overflow check stays on the device.
    """

    recipe: Recipe
    arranged: Arrangement
    training: Training
    communicator: Communicator
    coordinator: Coordinator
    engine: GradientEngine
    retry: OverflowRetry
    committer: Committer
    deferral: Deferral


def assemble(
    recipe: Recipe,
    *,
    iterator: Any,
    optimizer: Any,
    networks: tuple[Any, Any],
    places: tuple[Any, Any],
    schedulers: tuple[Any, Any],
    loss_scale: LossScale | float | None,
    timeout: Timeout,
    communicator: Communicator,
    check_every: int,
    differing_models: Differing,
    takes_steps: bool,
) -> Parts:
    """Check what the user gave beside the recipe, and make the parts of an updater of it.

    Args:
        recipe: What an update is.
        iterator: As `ParallelUpdater`, and so for what follows.
        optimizer: Optimizers.
        networks: `model` and `models`, one of which is None.
        places: `devices` and `workloads`.
        schedulers: `scheduler` and `epoch_scheduler`.
        loss_scale: A loss scale, or None for that of the optimizers.
        timeout: Seconds after which a device counts as hung.
        communicator: Joins the processes of the run.
        check_every: Within how many updates processes compare their states.
        differing_models: What is done about models that differ over processes.
        takes_steps: Whether the user says what an update does.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: An argument is out of range, or parts do not belong together.
    """
    optimizers: dict[str, Optimizer] = by_name("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    devices, workloads = places
    check_unnamed(devices, workloads)
    arranged = arrange(*networks)
    check_fit(recipe, arranged, optimizers, takes_steps=takes_steps)
    fixed = fixed_workloads(recipe, workloads)
    training = Training(
        group=ReplicaSet(arranged.module, devices, workloads=fixed, timeout=timeout),
        models=arranged.networks,
        optimizers=optimizers,
        iterators=iterators_by_name(iterator),
        schedulers=named_schedulers("scheduler", schedulers[0], optimizers),
        epoch_schedulers=named_schedulers("epoch_scheduler", schedulers[1], optimizers),
        scale=MovingScale(chosen_scale(loss_scale, optimizers)),
    )
    group = training.group
    ranks = join_ranks(
        communicator,
        group.workloads,
        RankConsistency(
            communicator,
            training,
            partial(describe_run, training, recipe),
            every=check_every,
            differing=differing_models,
        ),
        movable=recipe.num_shards is not None,
        measured=workloads == "auto",
    )
    timing = DeviceTimer(group.devices) if workloads == "auto" and len(group.devices) > 1 else None
    engine = GradientEngine(training, recipe, watch=communicator.watch, timing=timing, ranks=ranks)
    group.model.to(group.devices[0])
    if recipe.policy.held_dtype:
        training.make_masters()
    if ranks is not None:
        for each in training.iterators.values():
            each.read_only(engine.own_samples)
    if recipe.num_shards is None and engine.shards_a_batch > 1:
        LOG.info(
            "num_shards is not given: %d shards, one a device; other devices give other bits.",
            engine.shards_a_batch,
        )
    coordinator = LocalCoordinator() if ranks is None else ranks.coordinator
    deferral = Deferral(recipe.on_overflow, communicator.size, training)
    return Parts(
        recipe,
        arranged,
        training,
        communicator,
        coordinator,
        engine,
        OverflowRetry(engine, training, recipe, deferral, coordinator),
        Committer(engine, training, deferral, auto_new_epoch=recipe.auto_new_epoch),
        deferral,
    )
