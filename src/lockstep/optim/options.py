"""The options of groups of parameters, and the check of a saved state before anything of it is loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer

from lockstep.arguments import check_bool, check_choice, check_number
from lockstep.errors import StateError
from lockstep.state import check_keys, temporarily

TORCH_GROUP_KEYS: Final = frozenset(
    {"param_names", "initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}
)
"""The keys that torch stores in a group besides the options: parameter names, and the state of its schedulers."""


def check_options(options: Mapping[str, Any]) -> None:
    """Check that the options of a group are in range.

    Raises:
        TypeError: If a number is none, or a switch neither True nor False.
        ValueError: If ``lr`` is not a single number, or ``lr``, ``missing_grad`` or, where present, ``momentum`` or
            ``weight_decay`` is out of range.
    """
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(
            f"`lr` must be a number or a tensor of one element, got a tensor of shape {tuple(lr.shape)}. "
            "Pass parameters that need different learning rates in groups, each with its own `lr`."
        )
    check_number("lr", lr, least=0, finite=True)
    if "momentum" in options:
        check_number("momentum", options["momentum"], least=0, below=1)
    if "weight_decay" in options:
        check_number("weight_decay", options["weight_decay"], least=0, finite=True)
    for name in {"nesterov", "maximize", "correction", "frozen"} & options.keys():
        check_bool(name, options[name])
    check_choice("missing_grad", options["missing_grad"], ("skip", "zero"))


def scalar(lr: float | Tensor) -> float | Tensor:
    """Return a learning rate in the form that torch's kernels accept: a number or a 0-d tensor."""
    return lr.reshape(()) if isinstance(lr, Tensor) and lr.dim() > 0 else lr


def option_names(defaults: Iterable[str]) -> set[str]:
    """Return the names of a group's options, given the defaults of its optimizer."""
    # torch adds `differentiable` to the defaults, but not to the groups, once a state was loaded or a part created.
    return {*defaults} - {"differentiable"}


def unknown_options(group: Mapping[str, Any], defaults: Iterable[str]) -> list[str]:
    """List the keys of a group that are neither options of its optimizer nor torch's.

    The key ``name`` is not an option: it is a label for the reader.

    >>> unknown_options({"params": [], "lr": 0.1, "nesterov": True, "name": "head"}, {"lr": 0.01, "momentum": 0.9})
    ['nesterov']
    """
    return sorted({*group} - {"params", "name"} - option_names(defaults) - TORCH_GROUP_KEYS)


def check_names(group: Mapping[str, Any], defaults: Iterable[str], *, optimizer: str) -> None:
    """Check that a group has no options that its optimizer does not have and would ignore.

    Raises:
        ValueError: If there is such an option.
    """
    unknown = unknown_options(group, defaults)
    if unknown:
        options, got = ", ".join(sorted(option_names(defaults))), ", ".join(map(repr, unknown))
        raise ValueError(
            f"Groups in `params` must have only options of {optimizer} ({options}), got {got}. "
            "It would have no effect: remove it, or use an optimizer that has it."
        )


def check_saved(
    saved: Mapping[str, Any],
    own_groups: Sequence[Mapping[str, Any]],
    *,
    wanted: set[str],
    options: Mapping[str, Any],
    state_keys: Callable[[Mapping[str, Any]], frozenset[str]],
) -> None:
    """Check that a state was written by an optimizer of the same kind and groups.

    Args:
        saved: The state that ``state_dict`` returned.
        own_groups: The groups of the optimizer that is to load it.
        wanted: The keys that the state must have.
        options: The options that every group must have.
        state_keys: A function that returns the state keys of a parameter for its group.

    Raises:
        StateError: If something is missing, unknown or has another shape.
    """
    check_keys(saved, sorted(wanted), of="an optimizer")
    groups = saved["param_groups"]
    # Parameters have no names in a state: torch assigns their states by position.
    sizes = [len(group["params"]) for group in own_groups]
    saved_sizes = [len(group["params"]) for group in groups]
    if sizes != saved_sizes:
        raise StateError(f"The groups must hold as many parameters as in the saved state ({saved_sizes}), got {sizes}.")
    group_keys = {"params"} | option_names(options)
    for index, group in enumerate(groups):
        left_out = {"name", *TORCH_GROUP_KEYS} - group_keys
        own = {key: value for key, value in group.items() if key not in left_out}
        check_keys(own, sorted(group_keys), of=f"group {index}")
    known = {index for group in groups for index in group["params"]}
    unlisted = sorted(saved["state"].keys() - known)
    if unlisted:
        raise StateError(f"The state must only hold parameters of its groups, got {unlisted} too.")
    for group, saved_group in zip(own_groups, groups, strict=True):
        keys = state_keys(saved_group)
        for index, weight in zip(saved_group["params"], group["params"], strict=True):
            # A parameter that has never been updated has no state.
            if (state := saved["state"].get(index)) is not None:
                check_keys(state, sorted(keys), of=f"parameter {index}")
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape != weight.shape:
                        rule = f"must hold a {key!r} of shape {tuple(weight.shape)}"
                        raise StateError(f"The state of parameter {index} {rule}, got {tuple(value.shape)}.")


def run_load_pre_hooks(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Run the hooks of `register_load_state_dict_pre_hook` on a saved state, as torch does when it loads one.

    Args:
        optimizer: The optimizer whose hooks are run.
        saved: The saved state; the hooks get a shallow copy.

    Returns:
        The state to load.
    """
    state = dict(saved)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():  # noqa: SLF001 - torch calls them as it loads
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    return state


def without_pre_hooks(optimizer: Optimizer) -> AbstractContextManager[None]:
    """Suspend the hooks of `register_load_state_dict_pre_hook` while a state is loaded that they have seen.

    Args:
        optimizer: The optimizer whose hooks are suspended.
    """
    # A hook that converts an old state would convert the new one a second time.
    return temporarily(optimizer, _optimizer_load_state_dict_pre_hooks=OrderedDict())


def rows_by(key: Callable[[Tensor], Any], *lists: list[Tensor]) -> dict[Any, list[list[Tensor]]]:
    """Group the rows of parallel lists by a key of their first tensors.

    Args:
        key: A function of the first tensor of a row.
        *lists: The lists.

    >>> import torch
    >>> row = [torch.zeros(1)], [torch.ones(1)]
    >>> rows_by(len, *row)
    {1: [[tensor([0.])], [tensor([1.])]]}
    """
    rows: dict[Any, list[tuple[Tensor, ...]]] = {}
    for row in zip(*lists, strict=True):
        rows.setdefault(key(row[0]), []).append(row)
    return {each: [list(column) for column in zip(*some, strict=True)] for each, some in rows.items()}
