"""Refuse parts of an updater that do not belong together."""

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
from lockstep.updaters.setup import Arrangement, Recipe, check_choice
from lockstep.updaters.step.fused import check_dense


def check_fit(recipe: Recipe, arranged: Arrangement, optimizers: Mapping[str, Optimizer], *, takes_steps: bool) -> None:
    """Refuse a recipe, networks and optimizers that do not belong together.

    Args:
        recipe: What an update is.
        arranged: The networks.
        optimizers: By name.
        takes_steps: Whether the user says what an update does.

    Raises:
        TypeError: An optimizer's step asks for a closure.
        ValueError: Something else does not fit.
    """
    check_closures(optimizers)
    check_ownership(optimizers, arranged.networks)
    check_no_trained_buffers(arranged.module)
    recipe.policy.check_model(arranged.module)
    for optimizer in optimizers.values():
        check_dense(optimizer, has_masters=recipe.policy.held_dtype is not None)
    if takes_steps:
        recipe.check_own_steps()
    elif recipe.loss_fn is None and arranged.several:
        raise ValueError("`loss_fn` must be given for several networks, got None.")
    if recipe.flat_gradients:
        check_flat(optimizers, takes_steps=takes_steps)


def check_communicator(communicator: object) -> None:
    """Refuse what joins no processes; None may stand for none.

    Raises:
        TypeError: It is of another kind.
    """
    if not isinstance(communicator, Communicator | None):
        raise TypeError(f"`communicator` must be a Communicator or None, got a {type(communicator).__name__}.")


def fixed_workloads(recipe: Recipe, workloads: Sequence[float] | Literal["auto"] | None) -> Sequence[float] | None:
    """Give the workloads that are given, None where they are to be measured.

    Raises:
        ValueError: They would change the result, or are no numbers.
    """
    if isinstance(workloads, str):
        check_choice("workloads", workloads, ("auto",))
        if recipe.num_shards is None:
            raise ValueError(
                '`workloads` must be numbers where `num_shards` is None, got "auto". Shards would be sized '
                "by what was measured, and so would the result; give a number of shards."
            )
        return None
    sized_by_them = recipe.num_shards is None and workloads is not None and len(set(workloads)) > 1
    if recipe.split == "strided" and sized_by_them:
        raise ValueError(
            "`workloads` must be equal where samples are dealt round robin to one shard a device, got "
            f"{workloads}. Give a number of shards."
        )
    return workloads


def check_closures(optimizers: Mapping[str, Optimizer]) -> None:
    """Refuse optimizers whose step computes gradients by itself.

    Raises:
        TypeError: There is one, such as `torch.optim.LBFGS`.
    """
    for optimizer in optimizers.values():
        if asks_for_closure(optimizer):
            raise TypeError(
                "`optimizer` must step by the gradients that are there, got "
                f"{type(optimizer).__name__}, whose step() asks for a closure that computes them anew."
            )


def chosen_scale(given: LossScale | float | None, optimizers: Mapping[str, Optimizer]) -> LossScale:
    """Take the loss scale that is given, or else the one that optimizers were given, or else 1.

    Raises:
        TypeError: What is given is no loss scale.
        ValueError: It is out of range, or optimizers have several.
    """
    if given is not None:
        return parse_loss_scale(given)
    own = {each.loss_scale for each in optimizers.values() if isinstance(each, HookedOptimizer)} - {None}
    if len(own) > 1:
        raise ValueError(
            "`loss_scale` must be given for optimizers that have loss scales of their own, which differ: "
            f"got None, and {sorted(map(repr, own))}."
        )
    return parse_loss_scale(own.pop() if own else None)


def check_flat(optimizers: Mapping[str, Optimizer], *, takes_steps: bool) -> None:
    """Refuse one tensor for gradients that do not belong together.

    Raises:
        ValueError: There are several optimizers, steps of the user's own, or several dtypes.
    """
    if takes_steps or len(optimizers) > 1:
        raise ValueError("`flat_gradients` must be False with several optimizers or a step function, got True.")
    (optimizer,) = optimizers.values()
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    if len(dtypes) > 1:
        raise ValueError(f"`flat_gradients` must be False for parameters of several dtypes, got {dtypes}.")


def check_ownership(optimizers: Mapping[str, Optimizer], networks: Mapping[str, nn.Module]) -> None:
    """Refuse optimizers over parameters of other models, or over those of each other.

    Raises:
        ValueError: A parameter is in no model, or in two optimizers; or it is a buffer of a model.
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
                if id(parameter) in buffers and id(parameter) not in names:
                    raise ValueError(
                        f"{label} must hold parameters of `model` only, got its buffer "
                        f"{buffers[id(parameter)]!r} in group {index}. Register it as an nn.Parameter."
                    )
                if id(parameter) not in names:
                    shape = "unknown shape" if is_lazy(parameter) else f"shape {tuple(parameter.shape)}"
                    raise ValueError(
                        f"{label} must hold parameters of `model` only, got one of {shape} in group {index} "
                        "that is not."
                    )
                if owners.setdefault(id(parameter), owner) != owner:
                    raise ValueError(
                        "`optimizer` must hold each parameter in one optimizer only, got "
                        f"{names[id(parameter)]!r} in {owners[id(parameter)]!r} and {owner!r}."
                    )
