"""Check a saved state before it is loaded: its kind, its groups, and what load hooks make of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.errors import StateError
from lockstep.optim.hooked.options import option_names, unknown_options


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
    _check_keys("The state", saved, wanted)
    groups = saved["param_groups"]
    # Parameters have no names in a state: torch assigns their states by position.
    sizes = [len(group["params"]) for group in own_groups]
    saved_sizes = [len(group["params"]) for group in groups]
    if sizes != saved_sizes:
        raise StateError(f"The groups must hold as many parameters as in the saved state ({saved_sizes}), got {sizes}.")
    group_keys = {"params"} | option_names(options)
    for index, group in enumerate(groups):
        _check_missing(f"Group {index} of the state", group, group_keys)
        unknown = unknown_options(group, options)
        if unknown:
            raise StateError(
                f"Group {index} of the state must hold nothing but {sorted(group_keys)} and what torch's "
                f"schedulers keep there, got {unknown} too."
            )
    known = {index for group in groups for index in group["params"]}
    unlisted = sorted(saved["state"].keys() - known)
    if unlisted:
        raise StateError(f"The state must only hold parameters of its groups, got {unlisted} too.")
    for group, saved_group in zip(own_groups, groups, strict=True):
        keys = state_keys(saved_group)
        for index, weight in zip(saved_group["params"], group["params"], strict=True):
            # A parameter that has never been updated has no state.
            if (state := saved["state"].get(index)) is not None:
                _check_parameter_state(f"The state of parameter {index}", state, keys, weight.shape)


def _check_missing(subject: str, saved: Mapping[str, Any], wanted: set[str] | frozenset[str]) -> None:
    """Check that a mapping has all keys."""
    missing = sorted(wanted - saved.keys())
    if missing:
        raise StateError(f"{subject} must hold {sorted(wanted)}, got none for {missing}.")


def _check_keys(subject: str, saved: Mapping[str, Any], wanted: set[str] | frozenset[str]) -> None:
    """Check that a mapping has all keys and no other."""
    _check_missing(subject, saved, wanted)
    unknown = sorted(saved.keys() - wanted)
    if unknown:
        raise StateError(f"{subject} must hold nothing but {sorted(wanted)}, got {unknown} too.")


def _check_parameter_state(subject: str, state: Mapping[str, Any], keys: frozenset[str], shape: torch.Size) -> None:
    """Check that the state of one parameter has the right keys and shapes."""
    _check_keys(subject, state, keys)
    for key, value in state.items():
        if isinstance(value, Tensor) and value.shape != shape:
            raise StateError(f"{subject} must hold a {key!r} of shape {tuple(shape)}, got {tuple(value.shape)}.")


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


@contextmanager
def without_pre_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Suspend the hooks of `register_load_state_dict_pre_hook` while a state is loaded that they have seen.

    Args:
        optimizer: The optimizer whose hooks are suspended.
    """
    # A hook that converts an old state would convert the new one a second time.
    hooks = optimizer._optimizer_load_state_dict_pre_hooks  # noqa: SLF001 - torch offers no way around them
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()  # noqa: SLF001
    try:
        yield
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks  # noqa: SLF001
