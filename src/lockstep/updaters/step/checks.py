"""Check that the arguments of an updater belong together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lockstep.communicators import Communicator
from lockstep.optim import HookedOptimizer
from lockstep.precision import LossScale, asks_for_closure, parse_loss_scale
from lockstep.replicas import check_no_trained_buffers
from lockstep.updaters.setup import NetworkSet, Recipe, check_choice
from lockstep.updaters.step.fused import check_dense


def check_fit(recipe: Recipe, networks: NetworkSet, optimizers: Mapping[str, Optimizer], *, custom_step: bool) -> None:
    """Check that a recipe, networks and optimizers belong together.

    Args:
        recipe: The recipe of the update.
        networks: The networks to train.
        optimizers: The optimizers by name.
        custom_step: Whether a step function defines the update.

    Raises:
        TypeError: If the step of an optimizer requires a closure.
        ValueError: If something else does not fit.
    """
    check_closures(optimizers)
    check_ownership(optimizers, networks.modules)
    check_no_trained_buffers(networks.module)
    recipe.policy.check_model(networks.module)
    for optimizer in optimizers.values():
        check_dense(optimizer, has_masters=recipe.policy.held_dtype is not None)
    if custom_step:
        recipe.check_custom_step()
    elif recipe.loss_fn is None and networks.several:
        raise ValueError("`loss_fn` must be given for several networks, got None.")
    if recipe.flat_gradients:
        check_flat(optimizers, custom_step=custom_step)


def check_communicator(communicator: object) -> None:
    """Check that an argument is a communicator, or None for none.

    Raises:
        TypeError: If it is of another type.
    """
    if not isinstance(communicator, Communicator | None):
        raise TypeError(f"`communicator` must be a Communicator or None, got a {type(communicator).__name__}.")


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
    # Round robin gives all shards the same size, give or take one sample, so workloads could not be followed.
    sized_by_them = recipe.num_shards is None and workloads is not None and len(set(workloads)) > 1
    if recipe.split == "strided" and sized_by_them:
        raise ValueError(
            "`workloads` must be equal where samples are assigned round robin to one shard per device, got "
            f"{workloads}. Pass `num_shards`."
        )
    return workloads


def check_closures(optimizers: Mapping[str, Optimizer]) -> None:
    """Check that no optimizer recomputes gradients in its step.

    Raises:
        TypeError: If one does, such as `torch.optim.LBFGS`.
    """
    for optimizer in optimizers.values():
        if asks_for_closure(optimizer):
            raise TypeError(
                "`optimizer` must step by the gradients that it is given, got "
                f"{type(optimizer).__name__}, whose step() requires a closure that computes them again."
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


def check_flat(optimizers: Mapping[str, Optimizer], *, custom_step: bool) -> None:
    """Check that the gradients of all parameters can lie in one tensor.

    Raises:
        ValueError: If there are several optimizers, a step function, or parameters of several dtypes.
    """
    if custom_step or len(optimizers) > 1:
        raise ValueError("`flat_gradients` must be False with several optimizers or a step function, got True.")
    (optimizer,) = optimizers.values()
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    if len(dtypes) > 1:
        raise ValueError(f"`flat_gradients` must be False for parameters of several dtypes, got {dtypes}.")


def check_ownership(optimizers: Mapping[str, Optimizer], networks: Mapping[str, nn.Module]) -> None:
    """Check that optimizers hold only parameters of the models, and each parameter at most once.

    Args:
        optimizers: The optimizers by name.
        networks: The networks by name.

    Raises:
        ValueError: If a parameter is in no model or in two optimizers, or if it is a buffer of a model.
    """
    buffers = {
        id(buffer): name if len(networks) == 1 else f"{network}.{name}"
        for network, module in networks.items()
        for name, buffer in module.named_buffers()
    }
    names = {
        id(parameter): name if len(networks) == 1 else f"{network}.{name}"
        for network, module in networks.items()
        for name, parameter in module.named_parameters()
    }
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
                        "that does not belong to it."
                    )
                if owners.setdefault(id(parameter), owner) != owner:
                    raise ValueError(
                        "`optimizer` must hold each parameter in one optimizer only, got "
                        f"{names[id(parameter)]!r} in {owners[id(parameter)]!r} and {owner!r}."
                    )
