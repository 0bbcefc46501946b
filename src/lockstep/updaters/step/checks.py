"""Check that the arguments of an updater belong together."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter, is_not
from types import FunctionType
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lockstep import plan
from lockstep.arguments import check_choice, check_instance
from lockstep.communicators import Communicator
from lockstep.data import BatchIterator, Iterator
from lockstep.errors import OrderError, RandomStreamWarning, warn
from lockstep.optim import HookedOptimizer
from lockstep.precision import LossScale, asks_for_closure, parameters_of, parse_loss_scale, required_by_step
from lockstep.replicas import check_buffers, check_leaves, check_no_lookups, check_no_trained_buffers, refuse_wrapped
from lockstep.updaters.attempt.attempt import Attempt
from lockstep.updaters.attempt.audit import ATTRIBUTES, TENSORS
from lockstep.updaters.compute.prepared_model import PreparedModel
from lockstep.updaters.detectors import called_functions, compares_objects, outside_tensors, references
from lockstep.updaters.loss import BatchLoss
from lockstep.updaters.setup.names import NetworkSet
from lockstep.updaters.setup.recipe import Recipe
from lockstep.updaters.state.carried import Carried
from lockstep.updaters.step.originals import (
    changed_attributes,
    check_attributes_read,
    check_buffers_read,
    warn_of_reads,
    warn_of_registered,
)
from lockstep.updaters.step.stepping import check_dense


def check_fit(
    recipe: Recipe,
    networks: NetworkSet,
    optimizers: Mapping[str, Optimizer],
    carried: object = None,
    *,
    custom_step: bool,
) -> None:
    """Check that a recipe, networks and optimizers belong together.

    Args:
        recipe: The recipe of the update.
        networks: The networks to train.
        optimizers: The optimizers by name.
        carried: What is carried from batch to batch, if anything is.
        custom_step: Whether a step function defines the update.

    Raises:
        TypeError: If `carried` has another type than `Carried`, or a network cannot be copied.
        ValueError: If something else does not fit.
    """
    clipping_norms(recipe.clip_grad_norm, optimizers)
    check_carried(carried, recipe, custom_step=custom_step)
    check_closures(recipe, optimizers)
    model = networks.module
    check_ownership(optimizers, model)
    refuse_wrapped(model, "model")
    check_no_trained_buffers(model)
    recipe.precision_policy.check_model(model)
    for optimizer in optimizers.values():
        check_dense(optimizer, has_masters=recipe.precision_policy.held_dtype is not None)
    if custom_step:
        recipe.check_custom_step()
        return
    for name, optimizer in optimizers.items():
        for argument in required_by_step(optimizer):
            raise ValueError(
                f"`optimizer` must have a step without arguments, or with a closure, got {type(optimizer).__name__} "
                f"({name!r}), whose step requires {argument!r}. Define step(self, closure), where loss = closure() "
                "computes the gradients, too, or pass a step function that calls it, as `step_fn`."
            )
    if recipe.loss_fn is None and networks.several:
        raise ValueError(
            "`loss_fn` must be given for several networks, got None. Calls of compute_gradients may give others: "
            "without `update`, any function will do."
        )


def check_run_options(communicator: object, copy_ahead: object) -> None:
    """Check the arguments of an updater that only concern several processes or accelerators.

    Args:
        communicator: The communicator, or None for one that is found.
        copy_ahead: Whether batches are copied one update ahead.

    Raises:
        TypeError: If one of them has another type.
        ValueError: If one of them is out of range.
    """
    if not isinstance(copy_ahead, bool) and copy_ahead != "auto":
        raise ValueError(f"`copy_ahead` must be True, False or 'auto', got {copy_ahead!r}.")
    check_instance("communicator", communicator, Communicator | None, "a Communicator or None")


def check_carried(carried: object, recipe: Recipe, *, custom_step: bool) -> None:
    """Check that what is carried from batch to batch fits an updater.

    Args:
        carried: The argument of the updater.
        recipe: The recipe of the update.
        custom_step: Whether a step function defines the update.

    Raises:
        TypeError: If it is neither a `Carried` nor None.
        ValueError: If an update has several batches or several gradients.
    """
    if not isinstance(carried, Carried | None):
        raise TypeError(
            f"`carried` must be a lockstep.Carried or None, got a {type(carried).__name__}. Pass "
            "lockstep.Carried(initial_values)."
        )
    if carried is not None and (recipe.accumulate != 1 or custom_step):
        several = "a step function, a BatchLoss, or an optimizer whose step requires a closure"
        got = several if custom_step else f"accumulate={recipe.accumulate}"
        raise ValueError(
            f"`carried` must be None unless an update has one batch and one gradient, got {got}. The values after a "
            "batch are where the next one begins, so batches cannot share an update."
        )


def fixed_workloads(recipe: Recipe, workloads: Sequence[float] | Literal["auto"] | None) -> Sequence[float] | None:
    """Return the given workloads; None if they are to be measured.

    Args:
        recipe: The recipe of the update.
        workloads: The argument of the updater.

    Raises:
        ValueError: If the workloads would change the result, or if they are not numbers.
    """
    if isinstance(workloads, str):
        check_choice("workloads", workloads, ("auto",))
        if recipe.num_shards is None:
            raise ValueError(
                '`workloads` must be numbers where `num_shards` is None, got "auto". Measurements would decide '
                "the sizes of shards, and so the result. Pass `num_shards`."
            )
        return None
    if workloads is not None:
        plan.check_workloads(workloads)
    # Round robin gives all shards the same size, give or take one sample, so workloads could not be followed.
    sized_by_them = recipe.num_shards is None and workloads is not None and len(set(workloads)) > 1
    if recipe.split == "strided" and sized_by_them:
        raise ValueError(
            "`workloads` must be equal where samples are assigned round robin to one shard per device, got "
            f"{workloads}. Pass `num_shards`."
        )
    return workloads


def warn_of_idle_devices(recipe: Recipe, iterator: Iterator, *, devices: int) -> None:
    """Warn if some devices, or some shards, have nothing to compute in any update.

    Args:
        recipe: The recipe of the update.
        iterator: The main iterator.
        devices: The number of devices of all ranks.
    """
    shards = recipe.num_shards
    if shards is None:
        return
    batches = recipe.accumulate if isinstance(recipe.accumulate, int) else 1
    if shards * batches < devices:
        warn(
            f"`num_shards` is {shards}, but there are {devices} devices, of which some will have nothing to compute. "
            "Use fewer devices, or more shards, which is another result."
        )
    if isinstance(iterator, BatchIterator) and shards > iterator.batch_size:
        warn(
            f"`num_shards` is {shards}, but a batch has only {iterator.batch_size} samples: each of them is a shard, "
            "and the others are empty. Use fewer shards or larger batches."
        )


def needs_custom_step(loss_fn: object, optimizer: object) -> bool:
    """Return whether an update is made as that of a step function, because it has more than one computation.

    An optimizer, or one of several by name, may compute gradients again in its step, as LBFGS does. Weights have moved
    by then, so an update that fails there must be restored. A `BatchLoss` has two forwards.
    """
    if isinstance(loss_fn, BatchLoss):
        return True
    given = optimizer.values() if isinstance(optimizer, Mapping) else [optimizer]
    return any(isinstance(each, Optimizer) and asks_for_closure(each) for each in given)


def check_closures(recipe: Recipe, optimizers: Mapping[str, Optimizer]) -> None:
    """Check that optimizers that compute gradients again in their step can do so.

    Raises:
        ValueError: If the precision or the reduction does not allow it, or if several optimizers would have to step at
            once.
    """
    for name, optimizer in optimizers.items():
        if not asks_for_closure(optimizer):
            continue
        kind = type(optimizer).__name__
        if recipe.precision_policy.held_dtype is not None:
            raise ValueError(
                f"`precision` must be 'fp32', 'bf16' or 'fp16' for {kind}, whose step computes gradients at several "
                f"points, got {recipe.precision!r}."
            )
        if recipe.reduction == "sum":
            raise ValueError(f"`reduction` must be 'mean' for {kind}, which compares losses, got 'sum'.")
        if len(optimizers) > 1 and recipe.step_fn is None:
            raise ValueError(
                f"`step_fn` must be given for several optimizers one of which is {kind} ({name!r}), got None. Its step "
                "computes gradients again, so each optimizer needs its own compute_gradients and apply_gradients."
            )


def choose_loss_scale(given: LossScale | float | None, optimizers: Mapping[str, Optimizer]) -> LossScale:
    """Return the given loss scale, or else that of the optimizers, or else a static one of 1.

    Args:
        given: The argument of the updater.
        optimizers: The optimizers by name.

    Raises:
        TypeError: If the argument is not a loss scale.
        ValueError: If it is out of range, or if optimizers have different loss scales.
    """
    if given is not None:
        return parse_loss_scale(given)
    own = {each.loss_scale for each in optimizers.values() if isinstance(each, HookedOptimizer)} - {None}
    if len(own) > 1:
        raise ValueError(
            "`loss_scale` must be given for optimizers with different loss scales, got None and "
            f"{sorted(map(repr, own))}."
        )
    return parse_loss_scale(own.pop() if own else None)


def clipping_norms(given: float | Mapping[str, float] | None, optimizers: Mapping[str, Optimizer]) -> dict[str, float]:
    """Return the largest norm of the gradients of each optimizer by name, without those that have no limit.

    Args:
        given: The argument `clip_grad_norm` of the updater.
        optimizers: The optimizers by name.

    Raises:
        TypeError: If a norm is not a number.
        ValueError: If a norm is not above 0, a name is unknown, or an optimizer computes gradients again in its step.
    """
    if given is None:
        return {}
    norms = dict(given) if isinstance(given, Mapping) else dict.fromkeys(optimizers, given)
    unknown = sorted(norms.keys() - optimizers.keys())
    if unknown:
        raise ValueError(f"`clip_grad_norm` must name optimizers ({sorted(optimizers)}), got {unknown}.")
    for name, norm in norms.items():
        if isinstance(norm, bool) or not isinstance(norm, int | float):
            raise TypeError(
                f"`clip_grad_norm` must be a number for {name!r}, got a {type(norm).__name__}. Leave out optimizers "
                "whose gradients are not to be clipped."
            )
        if not norm > 0:
            raise ValueError(f"`clip_grad_norm` must be above 0, got {norm}. Pass None to clip nothing.")
        if asks_for_closure(optimizers[name]):
            kind = type(optimizers[name]).__name__
            raise ValueError(f"`clip_grad_norm` must be None for {kind}, whose step computes gradients again.")
    return norms


def check_reached(optimizers: Mapping[str, Optimizer], model: nn.Module) -> None:
    """Check that parameters that optimizers hold were not replaced by others, which would not be trained.

    On CUDA devices `Module.to` keeps the parameters and replaces their memory. On other accelerators it may replace the
    parameters, as `load_state_dict(assign=True)` does, and an optimizer that was created before would step the old
    ones, which train nothing.

    A layer that is removed leaves parameters in an optimizer, too; that does no harm.

    Raises:
        ValueError: If an optimizer holds parameters of no model, and none of the models', or not all of those.
    """
    known = {id(each): (name, each) for name, each in model.named_parameters()}
    held = {name: set(map(id, parameters_of(each))) for name, each in optimizers.items()}
    everywhere = set().union(*held.values())
    missing = [name for at, (name, each) in known.items() if each.requires_grad and at not in everywhere]
    for owner, own in held.items():
        lost = len(own - known.keys())
        if lost and (missing or lost == len(own)):
            raise ValueError(
                f"`optimizer` must hold parameters of `model`, got {lost} of {len(own)} in {owner!r} of which none "
                f"belongs to it any more{f', and not {missing[0]!r}' if missing else ''}. They were replaced, by "
                "`load_state_dict(assign=True)`, by another layer, or by moving the model to this type of device: load "
                "them, and call `model.to(device)` before you create the optimizer, or create both again."
            )


def options_of(optimizers: Mapping[str, Optimizer], loss_fn: Any) -> dict[str, str]:
    """Return the numbers that optimizers step by, and the positions of schedulers that a loss function refers to.

    Args:
        optimizers: The optimizers by name.
        loss_fn: The loss function.
    """
    found = {
        f"{option!r} of group {index} of optimizer {name!r}": (
            # Not by its value, for which the host would wait.
            f"version {value._version}" if isinstance(value, torch.Tensor) else repr(value)
        )
        for name, optimizer in optimizers.items()
        for index, group in enumerate(optimizer.param_groups)
        for option, value in group.items()
        if isinstance(value, int | float | tuple | torch.Tensor)
    }
    schedulers = [each for each in references(loss_fn) if issubclass(type(each), LRScheduler)]
    return found | {f"'last_epoch' of {type(each).__name__}": str(vars(each).get("last_epoch")) for each in schedulers}


def warn_of_no_means(found: Iterable[str]) -> None:
    """Warn of losses that are no means over samples.

    Args:
        found: What the losses of shards are; nothing for means.
    """
    for what in sorted(found):
        warn(
            f"`loss_fn` must return the mean over the samples of its shard, but returns {what} so that the "
            "result depends on the number of shards. Return Loss(mean, weight=sum of the weights), or pass "
            "lockstep.supervised(criterion), which knows class weights, ignored labels and reduction='sum', or "
            "lockstep.token_mean() for a model that returns its loss. If the loss compares samples, use BatchLoss. "
            "`lockstep verify` compares the gradients."
        )


def warn_of_repeated_streams(seed: int) -> None:
    """Warn of an updater that goes on where another one with the same seed has ended.

    Args:
        seed: The seed of both.
    """
    warn(
        f"Another updater with seed={seed} has trained this model, and this one counts its updates anew, so its shards "
        "draw the same random numbers again, such as dropout masks. Pass another `seed`, such as the number of the "
        "epoch, or keep one updater and give it the data of all epochs by an iterable.",
        RandomStreamWarning,
    )


def check_first_shards(
    attempt: Attempt, prepared: PreparedModel, model: nn.Module, optimizers: Mapping[str, Optimizer]
) -> None:
    """Check what the shards of one of the first updates have used and changed, before they are summed.

    Args:
        attempt: The attempt, whose shards are computed.
        prepared: The model as it was run.
        model: The original model.
        optimizers: The optimizers by name.

    Raises:
        ValueError: If a loss function uses what the replicas do not have, or changes options of optimizers, or the rule
            of a buffer does not fit, or if a gradient of several shards would not be that of the batch.
    """
    context, replicas = attempt.gradient_context, [runner.replica for runner in prepared.runners]
    loss_fn, shards = attempt.request.loss_fn, [part for run in attempt.device_shards for part in run]
    for name, value in options_of(optimizers, loss_fn).items():
        if value != context.options.get(name, value):
            raise ValueError(
                "`loss_fn` must not change what optimizers step by, because it is called once for each shard, and once "
                f"more in an audit, got {name} changed from {context.options[name]} to {value}. Change it between "
                "updates, or pass the scheduler as `scheduler`."
            )
    check_lookups(loss_fn, model)
    check_buffers_read(loss_fn, context.original_reads, prepared, attempt)
    if context.at_start:
        changed = changed_attributes(model, replicas[0])
        check_attributes_read(context.original_reads, changed)
        warn_of_registered(changed, replicas[0])
        if attempt.audit is not None:
            attempt.audit.holds += ATTRIBUTES * bool(changed)
            warn_of_reads(loss_fn, model, changed)
    if attempt.audit is not None:
        # Here, because some are created by the first call, such as a copy of the model.
        attempt.audit.holds += TENSORS * bool(outside_tensors(loss_fn, [model, *replicas]))
    if attempt.share.num_shards > 1:
        check_no_counts(model)
    check_leaves(context.foreign_leaves, "loss_fn", (loss_fn, replicas), (shards, [*model.parameters()]))
    counted = {report.shard for task in attempt.device_tasks for report in task.reports}
    sizes = [len(shard.samples) for shard, _ in shards if shard.index in counted and context.at_start]
    check_buffers([task.buffer_sum for task in attempt.device_tasks], prepared.buffer_refs, sizes)


def check_no_counts(model: nn.Module) -> None:
    """Check that no embedding divides its gradient by how often an index occurs in the batch.

    Args:
        model: The original model.

    Raises:
        ValueError: If one does, because it would count in each shard apart.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.scale_grad_by_freq:
            raise ValueError(
                "`model` must not scale gradients by how often an index occurs in a batch of several shards, because "
                f"each shard counts its own, got an {type(module).__name__} with scale_grad_by_freq=True at {name!r}. "
                "Leave it out, or pass num_shards=1."
            )


def check_lookups(loss_fn: Any, model: nn.Module) -> None:
    """Check that a loss function, and functions that it calls, look up nothing by identity, and do not scale the loss.

    Args:
        loss_fn: The loss function.
        model: The original model.

    Raises:
        ValueError: If one of them refers to a container by which it could, or compares objects by ``is`` or ``in`` and
            refers to a parameter or module of the original model, or if one refers to a `GradScaler`.
    """
    containers: list[Any] = []
    for function, found in called_functions(loss_fn):
        containers += [each for each in found if issubclass(type(each), set | frozenset | dict | list | tuple)]
        scalers: list[Any] = [each for each in found if issubclass(type(each), GradScaler)]
        if any(each.is_enabled() for each in scalers):
            raise ValueError(
                "`loss_fn` must not scale its loss, which multiplies the gradient and the reported loss, got one that "
                "refers to an enabled GradScaler. Leave it out, and pass loss_scale=lockstep.DynamicLossScale(2.0**16)."
            )
        compared = getattr(function, "__func__", function)
        if type(compared) is FunctionType and compares_objects(compared.__code__):
            # As numbers, which no list holds by chance, because a list by itself may be read by position.
            containers.append([id(each) for each in found])
            containers += [[id(each) for each in held] for held in found if isinstance(held, list | tuple)]
    check_no_lookups(containers, model, "loss_fn")


def check_ownership(optimizers: Mapping[str, Optimizer], model: nn.Module) -> None:
    """Check that optimizers hold only parameters of the models, and each parameter at most once.

    Args:
        optimizers: The optimizers by name.
        model: The model, or one that holds all networks by name.

    Raises:
        ValueError: If a parameter is in no model or in two optimizers, or if it is a buffer of a model.
    """
    buffers = {id(buffer): name for name, buffer in model.named_buffers()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    owners: dict[int, str] = {}
    for owner, optimizer in optimizers.items():
        label = "`optimizer`" if len(optimizers) == 1 else f"`optimizer[{owner!r}]`"
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                # A buffer is not copied back by gradients: replicas would use the old values. It gets an error of its
                # own, because it does belong to the model.
                if id(parameter) in buffers and id(parameter) not in names:
                    raise ValueError(
                        f"{label} must hold parameters of `model` only, got its buffer "
                        f"{buffers[id(parameter)]!r} in group {index}. Register it as an nn.Parameter."
                    )
                if id(parameter) not in names:
                    shape = "unknown shape" if is_lazy(parameter) else f"shape {tuple(parameter.shape)}"
                    raise ValueError(
                        f"{label} must hold parameters of `model` only, got one of {shape} in group {index} "
                        "that does not belong to it. If it belongs to another network, such as a loss with weights of "
                        "its own, pass all networks as a dict by name. If it was replaced after the optimizer was "
                        "created, by `load_state_dict(assign=True)`, by another layer, or on some devices by "
                        "`Module.to`, create the optimizer again."
                    )
                if owners.setdefault(id(parameter), owner) != owner:
                    raise ValueError(
                        "`optimizer` must hold each parameter in one optimizer only, got "
                        f"{names[id(parameter)]!r} in {owners[id(parameter)]!r} and {owner!r}."
                    )


GRADIENT_OF: Final = attrgetter("grad")
VERSION_OF: Final = attrgetter("_version")
USED_VERSION: Final = "_lockstep_used_version"
"""The attribute of a gradient with the version in which an update has used it. It belongs to the gradient and not to an
updater, because several may train one model in turn."""

USED_SEED: Final = "_lockstep_used_seed"
"""The attribute of the first of these gradients with the seed of the updater and the version of the parameter then."""


PRESENT: Final = partial(is_not, None)
CONSUME: Final = deque[object](maxlen=0).extend
"""Runs an iterator to its end. Loops of every update run in C, in a tenth of the time of those in Python."""


def check_no_unused_gradients(
    parameters: Mapping[str, torch.Tensor],
    wanted: Collection[int] | None,
    used_at: Mapping[int, int],
    optimizers: Iterable[Optimizer],
) -> None:
    """Refuse gradients that no optimizer has stepped by, before those of an update replace them.

    Args:
        parameters: The parameters by name.
        wanted: The ``id`` of the parameters that are about to get a gradient, or None for all.
        used_at: The version of each parameter after the last update, by its ``id``. If it has another one, you have
            stepped by a gradient of your own since.
        optimizers: The optimizers. Fused ones leave versions as they are, so only gradients before the first update are
            found.

    Raises:
        OrderError: If a gradient is neither that of a finished update nor zero.
    """
    fused = any(group.get("fused") for each in optimizers for group in each.param_groups)
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if gradient is None or (wanted is not None and id(parameter) not in wanted):
            continue
        if id(parameter) in used_at and (fused or used_at[id(parameter)] != parameter._version):
            continue
        if gradient.__dict__.get(USED_VERSION) != gradient._version and bool((gradient.to_dense() != 0).any()):
            raise OrderError(
                f"The gradient of {name!r} must be None, zero or that of the last update before another one is "
                "computed, got one that no optimizer has used, which would be lost. Add its loss to that of the "
                "update, call `apply_gradients` after each `compute_gradients` (several batches are accumulated by "
                "`accumulate=` and `update()`), or drop it by `optimizer.zero_grad()`."
            )
