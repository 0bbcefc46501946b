"""Updates over several devices, the contract of lockstep: what the user gives, checked and put together."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep.communicators import Communicator, find_communicator
from lockstep.data import Iterator, collate
from lockstep.data.source import Source
from lockstep.integers import check_integer
from lockstep.precision import LossScale, MovingScale
from lockstep.replicas import ReplicaGroup
from lockstep.replicas.buffers import BufferRule
from lockstep.replicas.devices import Devices
from lockstep.replicas.replica_set import Timeout
from lockstep.updaters.alike import Alikeness, Differing
from lockstep.updaters.balance import PlaceTimes
from lockstep.updaters.batches import Converter
from lockstep.updaters.description import described
from lockstep.updaters.engine import GradientEngine
from lockstep.updaters.fitting import check_communicator, check_fit, chosen_scale, fixed_workloads
from lockstep.updaters.gradient_updater import GradientUpdater
from lockstep.updaters.loss import LossFunction
from lockstep.updaters.meeting import NoMeeting
from lockstep.updaters.names import by_name, iterators_by_name, named_schedulers
from lockstep.updaters.networks import arrange
from lockstep.updaters.over_ranks import join
from lockstep.updaters.recipe import OnExhausted, OnOverflow, Recipe, Reduction, Split, check_choice
from lockstep.updaters.training import Training

LOG = logging.getLogger("lockstep")

Schedulers = LRScheduler | Sequence[LRScheduler] | Mapping[str, LRScheduler]
StepFunction = Callable[["ParallelUpdater", Any], object]


class ParallelUpdater(GradientUpdater):
    """Train a model, or several, on several devices; the result does not depend on which and how many.

    One update: take the next batch (or `accumulate` of them), cut it into shards, run one forward and one
    backward per shard on whatever device it was assigned to, sum the gradients in one fixed tree, divide
    once by the summed weight, check, and let the optimizers step. Until the step begins nothing has
    changed: after an exception or Ctrl-C the next call goes on with the same batch. What comes while the
    weights move waits for the end of the update.

    A `step_fn`, or a subclass that overrides `update_core`, says otherwise what an update does, by any number
    of `compute_gradients` and `apply_gradients`, say for two networks in turn. Where it fails or is
    interrupted, everything is put back to the update before, and the next call begins with the same batch.

    Args:
        iterator: Gives the batches; or any iterable of batches of tensors, such as a DataLoader, a list or a
            generator function, as `lockstep.data.IterableBatches` takes them; or several by name, of which
            "main" gives those an update begins with and counts the epochs.
        optimizer: Any `torch.optim.Optimizer` over parameters of the models, or several by name that share
            none. The usual update steps all of them by the gradient of one loss.
        model: Moved to the first device. Never run itself: replicas are copies that share its memory. Or
            several networks by name, each replicated on all devices.
        models: Another word for `model`. With exactly the names of `devices`, they are taken as replicas of
            one model: they must be alike, the main one has the weights, the others are given them after each
            update.
        devices: ``"auto"`` for every GPU, else every core; or names, repeats allowed; or places by name, of
            which "main" (else the first) is the main one.
        num_shards: Shards a batch, at least 1; part of what the result means. None for one a device, sized by
            its workload: then the bits depend on the number of devices.
        workloads: Relative speeds of the devices, by which shards are assigned; equal ones by default.
            ``"auto"`` measures them over the first updates, for a fixed `num_shards` only. Processes whose
            speeds nobody gives are measured by themselves, where `num_shards` is fixed.
        loss_fn: Called as ``loss_fn(replica, *batch)``, a dict batch by keyword; returns a mean loss or a
            `Loss`. For several networks it gets a dict of their replicas. By default the model itself
            returns the loss.
        step_fn: Called as ``step_fn(updater, batch)``. What it does by `compute_gradients` and
            `apply_gradients` is told in the result and counted by `scheduler`; steps that it takes by
            PyTorch's own words are neither.
        converter: Called as ``converter(samples, device)`` for the samples of one shard.
        seed: Of the random streams, each keyed by (seed, update, shard).
        accumulate: Batches to an update, at least 1; fewer where the iterator ends.
        split: ``"contiguous"`` shards, or ``"strided"``: shard i of n has the samples i, i + n, i + 2n …
        reduction: ``"mean"`` over all shards by their weights, or the ``"sum"`` of the gradients of the
            shards' mean losses, as Chainer had it.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``: what autocast computes in. ``"bf16-true"`` or
            ``"fp16-true"`` for a model that is held in that format: gradients are summed in float32, and
            optimizers move float32 masters; see `master_weights`. Data stays in its own format.
        loss_scale: A number or a `LossScale`, one for all optimizers; None for the one they have (see
            `loss_scaling`), from which the updater's goes its own way, or else 1.
        on_overflow: What follows a gradient that is not finite, once the loss scale has stepped down:
            ``"retry"`` the same batch in the same random streams, draw the ``"next"``, or ``"skip"`` it. A
            batch whose loss itself is not finite stays so at any scale: retries then end at the floor or
            at `max_tries`, and `find_nonfinite` names its samples.
        max_tries: How often one update may try, at least 1.
        on_exhausted: ``"skip"`` the batch or ``"raise"`` when no try is left, or no scale to lower.
        buffers: ``"mean"`` over shards by their samples, or ``"first"`` for the first shard's.
        scheduler: Stepped whenever its optimizer has moved weights; one or several.
        epoch_scheduler: Stepped when the main iterator starts an epoch; one or several.
        auto_new_epoch: Whether optimizers that count epochs are told when the main iterator starts one.
        flat_gradients: Whether the gradients lie end to end in one tensor, `flat_gradients`, of which every
            ``parameter.grad`` is a view; costs a copy. For one optimizer whose parameters have one dtype.
        timeout: Seconds, above 0, after which a device that is still at work in an update counts as hung; the
            first one then has a thread of its own too. ``"auto"``: half an hour for the threads of the
            others, while the calling thread is not watched. None for never. It is part of no result.
        communicator: Joins the processes of the run, each with devices of its own, whose shards are parts of
            one batch. Found in the environment unless given; alone, a process is the whole run.
        check_every: Within how many updates processes compare all bits of their states, at least 1; a part
            every few updates. What must be alike otherwise is compared before the first update.
        differing_models: Whether models that differ over processes when a run begins become that of rank 0
            (``"broadcast"``) or end the run (``"refuse"``).

    Raises:
        TypeError: An argument is of another kind.
        ValueError: An argument is out of range, or parts do not belong together.

    Determinism: weights, buffers and optimizer state depend on the model, the data, `num_shards`, `seed`, the
    other arguments except `devices`, `workloads` and `timeout`, the torch build and the processor's type.
    Where `num_shards` is None they also depend on the number of devices and their workloads.

    References: Chainer 7.8.1, ``ParallelUpdater``, for the face. The arithmetic is ours.
    """

    def __init__(
        self,
        iterator: Iterator | Source | Mapping[str, Iterator | Source],
        optimizer: Optimizer | Mapping[str, Optimizer],
        model: nn.Module | Mapping[str, nn.Module] | None = None,
        *,
        models: nn.Module | Mapping[str, nn.Module] | None = None,
        devices: Devices | Mapping[str, str | torch.device] = "auto",
        num_shards: int | None = None,
        workloads: Sequence[float] | Mapping[str, float] | Literal["auto"] | None = None,
        loss_fn: LossFunction | None = None,
        step_fn: StepFunction | None = None,
        converter: Converter = collate,
        seed: int = 0,
        accumulate: int = 1,
        split: Split = "contiguous",
        reduction: Reduction = "mean",
        precision: str = "fp32",
        loss_scale: LossScale | float | None = None,
        on_overflow: OnOverflow = "retry",
        max_tries: int = 20,
        on_exhausted: OnExhausted = "skip",
        buffers: BufferRule = "mean",
        scheduler: Schedulers | None = None,
        epoch_scheduler: Schedulers | None = None,
        auto_new_epoch: bool = True,
        flat_gradients: bool = False,
        timeout: Timeout = "auto",
        communicator: Communicator | None = None,
        check_every: int = 100,
        differing_models: Differing = "broadcast",
    ) -> None:
        recipe = Recipe(
            num_shards=num_shards,
            seed=seed,
            accumulate=accumulate,
            split=split,
            reduction=reduction,
            precision=precision,
            buffers=buffers,
            on_overflow=on_overflow,
            max_tries=max_tries,
            on_exhausted=on_exhausted,
            flat_gradients=flat_gradients,
            auto_new_epoch=auto_new_epoch,
            loss_fn=loss_fn,
            step_fn=step_fn,
            converter=converter,
        )
        check_integer("check_every", check_every, minimum=1)
        check_choice("differing_models", differing_models, get_args(Differing))
        check_communicator(communicator)
        optimizers: dict[str, Optimizer] = by_name(
            "optimizer", optimizer, Optimizer, "a torch.optim.Optimizer"
        )
        arranged = arrange(model, models, devices, workloads)
        check_fit(recipe, arranged, optimizers, takes_steps=self._has_own_steps(recipe))
        fixed = fixed_workloads(recipe, arranged.workloads)
        training = Training(
            group=ReplicaGroup(arranged.module, arranged.devices, workloads=fixed, timeout=timeout),
            models=arranged.networks,
            optimizers=optimizers,
            iterators=iterators_by_name(iterator),
            schedulers=named_schedulers("scheduler", scheduler, optimizers),
            epoch_schedulers=named_schedulers("epoch_scheduler", epoch_scheduler, optimizers),
            scale=MovingScale(chosen_scale(loss_scale, optimizers)),
        )
        joined = find_communicator() if communicator is None else communicator
        if communicator is None:
            weakref.finalize(self, joined.close).atexit = False
        group = training.group
        alike = Alikeness(
            joined,
            training,
            partial(described, training, recipe),
            every=check_every,
            differing=differing_models,
        )
        ranks = join(
            joined,
            group.workloads,
            alike,
            movable=num_shards is not None,
            by_workloads=arranged.workloads is not None,
        )
        engine = GradientEngine(
            group,
            recipe,
            timing=PlaceTimes(group.devices) if arranged.workloads == "auto" else None,
            phase=joined.watch.phase,
            ranks=ranks,
        )
        group.model.to(group.devices[0])
        if recipe.policy.held_dtype:
            training.make_masters()
        meeting = NoMeeting() if ranks is None else ranks.meeting
        super().__init__(
            training, recipe, arranged=arranged, engine=engine, meeting=meeting, communicator=joined
        )
        if ranks is not None:
            for each in training.iterators.values():
                each.read_only(engine.own_samples)
        if num_shards is None and engine.shards_a_batch > 1:
            LOG.info(
                "num_shards is not given: %d shards, one a device; other devices give other bits.",
                engine.shards_a_batch,
            )
