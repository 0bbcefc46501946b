"""Detect a replica that computes with parameters of the original model, and a forward that writes to parameters."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Final
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import Node

from lockstep.digest import checksums
from lockstep.replicas.pool.copies import hidden_parameters
from lockstep.replicas.pool.replica_set import ReplicaSet

REMEDY: Final = (
    "A function that refers to the original model by a global variable, or that an object in an attribute holds, has "
    "the same effect. Define it as a method of the model instead."
)
"""The end of the error messages, which describes the usual cause."""


MOST_PARTS: Final = 100_000
"""The number of objects that are looked at most, to find what a function or a batch refers to."""


def check_no_leaked_graphs(outputs: Iterable[torch.Tensor], replica: nn.Module, parameters: Mapping[int, str]) -> None:
    """Check that the graph of a replica's outputs leads to no parameters but those of the replica.

    It leads to those of the original model if a function that is stored in the model calls the original module.
    Backward would then add gradients there from several threads, in an order that varies.

    Args:
        outputs: The outputs of one shard, whose inputs begin a graph of their own.
        replica: The replica that computed them.
        parameters: The names of the parameters of the original model by ``id``.

    Raises:
        ValueError: If the graph reaches another parameter.
    """
    leaves = foreign_leaves(outputs, replica)
    reached = {id(leaf) for leaf in leaves}
    names = [name for each, name in parameters.items() if each in reached]
    if names:
        raise ValueError(
            f"`model` must compute with the parameters of its replica, got a replica that uses {names[0]!r} of your "
            f"original model. {REMEDY}"
        )
    check_leaves([ref(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter)], "model", replica)


def foreign_leaves(outputs: Iterable[torch.Tensor], model: nn.Module) -> list[torch.Tensor]:
    """List the tensors to which backward would give a gradient, without the parameters and buffers of a model.

    Args:
        outputs: The tensors in which backward begins.
        model: The model, or a replica.
    """
    own = {id(each) for each in (*model.parameters(), *model.buffers())}
    pending: list[Node] = [each.grad_fn for each in outputs if each.grad_fn is not None]
    leaves, seen = list[torch.Tensor](), set(pending)
    while pending:
        node = pending.pop()
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(node.variable)  # type: ignore[attr-defined]  # torch's gap
        following = [each for each, _ in node.next_functions if each is not None and each not in seen]
        seen.update(following)
        pending.extend(following)
    return [leaf for leaf in leaves if id(leaf) not in own]


def check_leaves(found: Collection[ref[torch.Tensor]], function: str, user: object, known: object = ()) -> None:
    """Check that no tensor beside the model is trained.

    Gradients of such a tensor would be added up in several threads in an order that varies, without the weights of the
    shards, or would be lost. A module in evaluation mode is left out, because it is not trained.

    Args:
        found: What has received gradients beside the parameters of the model. Only what still exists counts: tensors
            that were created while a shard was computed end with its graph. The gradients are removed.
        function: The argument that uses these tensors, for the error message.
        user: The function or the module that this argument is.
        known: Tensors to leave out, in any containers.

    Raises:
        ValueError: If there is such a tensor.
    """
    if not _existing(found):
        return
    given = {id(each) for each in _reachable(known, (type, ModuleType, FunctionType))}
    owners = {
        id(parameter): (name, module)
        for module in _reachable(user, (type, ModuleType))
        # By its type, as `isinstance` would run code of proxies.
        if issubclass(type(module), nn.Module) and isinstance(module, nn.Module)
        for name, parameter in vars(module)["_parameters"].items()
    }
    # Some tensors are part of a cycle, such as those with a hook that uses them; they are among the youngest objects.
    # A collection of all objects takes long in a large program, so it comes only before the error.
    for generation in (0, 1, 2):
        if not _trained(found, given, owners):
            return
        gc.collect(generation)
    for leaf, name, owner in _trained(found, given, owners):
        for each in _existing(found):
            each.grad = None
        what = f"a tensor of shape {tuple(leaf.shape)}" if owner is None else f"{name!r} of a {type(owner).__name__}"
        raise ValueError(
            f"`{function}` must use no tensors that require a gradient besides the parameters of the model, got "
            f"{what}. To train it, make it a parameter of the model, or pass its module as one of several models, "
            'model={"net": net, "criterion": criterion}, with an optimizer for each; `loss_fn` is then given a dict of '
            "them. If nothing trains it, call requires_grad_(False) on it. Where the loss is computed of derivatives "
            "by a tensor of the batch, call requires_grad_() on it in the loss function and not before."
        )


def _trained(
    leaves: Iterable[ref[torch.Tensor]], given: Collection[int], owners: Mapping[int, tuple[str, nn.Module]]
) -> list[tuple[torch.Tensor, str, nn.Module | None]]:
    """List the tensors that are neither known nor of a module in evaluation mode, each with its name and module.

    Args:
        leaves: The tensors.
        given: The ``id`` of the tensors to leave out.
        owners: The name and the module of parameters, by their ``id``.
    """
    found = [(leaf, *owners.get(id(leaf), ("", None))) for leaf in _existing(leaves) if id(leaf) not in given]
    return [(leaf, name, owner) for leaf, name, owner in found if owner is None or owner.training]


def _existing(found: Iterable[ref[torch.Tensor]]) -> list[torch.Tensor]:
    return [leaf for each in found if (leaf := each()) is not None]


def _reachable(root: object, left_out: tuple[type, ...]) -> list[object]:
    """List the objects that an object refers to, the nearest first.

    Args:
        root: The object.
        left_out: Types whose objects are not followed.
    """
    seen, found = {id(root)}, [root]
    for each in found:
        following = [] if issubclass(type(each), left_out) else gc.get_referents(each)
        new = {id(part): part for part in following if id(part) not in seen}
        if len(found) + len(new) <= MOST_PARTS:
            seen.update(new)
            found += new.values()
    return found


def check_no_leaked_gradients(parameters: Mapping[str, nn.Parameter], wanted: Collection[int] | None) -> None:
    """Check that backward did not store gradients in the parameters of the original model.

    It does if a part of the loss is computed with the original model. The sums over shards do not contain such
    gradients, so that part of the loss would be lost without an error.

    Args:
        parameters: The parameters by name. Gradients that are found are removed.
        wanted: The ``id`` of the parameters that had no gradient before the shards were computed, or None for all.

    Raises:
        ValueError: If a parameter has a gradient.
    """
    leaked = None
    for name, parameter in parameters.items():
        if parameter.grad is not None and (wanted is None or id(parameter) in wanted):
            # Removed from all parameters before raising, so that the model is left as it was.
            parameter.grad = None
            leaked = leaked or name
    if leaked is None:
        return
    raise ValueError(
        "`loss_fn` must compute its loss with the model that it is given, which is a replica; got one that "
        f"also gives {leaked!r} of your original model a gradient. {REMEDY}"
    )


def check_no_inner_backward(replica: nn.Module) -> None:
    """Refuse gradients that a forward has left in a replica.

    Args:
        replica: The replica, after a forward.

    Raises:
        ValueError: If a parameter has a gradient.
    """
    for name, parameter in replica.named_parameters():
        if parameter.grad is not None:
            raise ValueError(
                "`loss_fn` and the model must not call `backward`, whose gradients would be added to the loss's; "
                f"got a gradient of {name!r}. Leave the call out and return the loss: an update runs backward. For the "
                "gradient of an input, as in adversarial training, use torch.autograd.grad(loss, inputs). To train on "
                "several losses return their sum."
            )


def check_no_accumulate_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Check that no parameter has a hook on the accumulation of its gradient, which replicas do not do for a batch.

    Args:
        parameters: The parameters by name.

    Raises:
        ValueError: If a parameter has such a hook.
    """
    for name, parameter in parameters.items():
        if parameter._post_accumulate_grad_hooks:
            raise ValueError(
                f"`model` must have no post-accumulate-grad hooks, got one on {name!r}. A shard's gradient "
                "is not that of the batch. Use Tensor.register_hook or an optimizer hook instead."
            )


MOST_COPIED: Final = 2**22
"""The number of elements up to which parameters are copied. Of more only checksums are kept: a copy would be the
largest that a run ever holds."""
_MESSAGE: Final = (
    "`model` must not write to its parameters while shards are computed, because all of them compute with the same "
    "values, got one whose {!r} has changed. If the first forward initializes parameters by its batch, run the model "
    "on a batch in training mode under torch.no_grad() before you pass it on. Keep values that every forward changes, "
    "such as moving averages, in buffers, and change weights between updates: in a post hook of the optimizer's step, "
    "or in an extension."
)


@contextmanager
def refusing_writes(replicas: ReplicaSet) -> Iterator[None]:
    """Compare the parameters before and after shards are computed, and refuse a model that changes them.

    Replicas share the memory of parameters with the model, or have copies that are overwritten. What a forward writes
    there is therefore seen by some shards and not by others, and is lost where it replaces ``parameter.data``.

    Args:
        replicas: The model and its replicas, up to date.

    Raises:
        ValueError: If a parameter has changed, at the end of the context. Unless the model is large, its parameters
            have their values from before then.
    """
    models, checked = [replicas.model, *replicas.replicas], _named(replicas.model)
    before = _checksums(checked)
    small = sum(map(torch.numel, checked.values())) <= MOST_COPIED
    copies = {name: parameter.detach().clone() for name, parameter in checked.items() if small}

    def check() -> None:
        for model in models:
            for name, found in _checksums(_named(model)).items():
                if name in before and found != before[name]:
                    _restore(replicas.model, copies)
                    # They may have other memory now.
                    replicas.release()
                    raise ValueError(_MESSAGE.format(name))

    try:
        yield
    except Exception:
        check()
        raise
    check()


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by name, and those of modules that it holds without registering them."""
    hidden = {f"unregistered {index}": each for index, each in enumerate(hidden_parameters(model))}
    named = dict(model.named_parameters()) | hidden
    # What the memory of other classes of tensors means is up to them.
    return {
        name: each
        for name, each in named.items()
        if type(each) is nn.Parameter and each.layout is torch.strided and not each.is_meta
    }


def _checksums(named: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return dict(zip(named, checksums(named.values()), strict=True))


@torch.no_grad()
def _restore(model: nn.Module, copies: Mapping[str, torch.Tensor]) -> None:
    """Restore the former values of parameters."""
    for name, parameter in _named(model).items():
        if name in copies and parameter.shape == copies[name].shape:
            parameter.copy_(copies[name])
