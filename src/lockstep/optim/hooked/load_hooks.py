"""Run the hooks that bring a saved state up to date before it is checked, and only where one is loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


def migrated(optimizer: Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Give a saved state to the hooks of `register_load_state_dict_pre_hook`, as torch does while it loads.

    Args:
        optimizer: Whose hooks.
        saved: A shallow copy of it is what the hooks get.

    Returns:
        The state that is to be loaded.
    """
    state = dict(saved)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():  # noqa: SLF001 - torch calls them while it loads
        changed = hook(optimizer, state)
        state = state if changed is None else changed
    return state


@contextmanager
def without_pre_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Load a state that no hook of `register_load_state_dict_pre_hook` may change, for it is up to date.

    Args:
        optimizer: Has its hooks again afterwards.
    """
    hooks = optimizer._optimizer_load_state_dict_pre_hooks  # noqa: SLF001 - torch offers no way around them
    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()  # noqa: SLF001
    try:
        yield
    finally:
        optimizer._optimizer_load_state_dict_pre_hooks = hooks  # noqa: SLF001
