"""Run an optimizer's load hooks before a saved state is checked, and never twice for one state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim import Optimizer


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
