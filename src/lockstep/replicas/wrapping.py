"""A module around one other that keeps its device, and whose saved state is the other's alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn

INNER = "module."
"""What the names of the wrapped module's tensors begin with while they are inside."""


class Wrapping(nn.Module):
    """Hold one module; a state saved with the wrapper loads without it, and the other way round.

    The module stays on its device when the network around is moved, and follows it to another dtype.

    Args:
        module: What is wrapped; afterwards found as the attribute of the same name.

    Raises:
        TypeError: It is no module.

    Example:
        >>> list(Wrapping(nn.Linear(2, 1)).state_dict())
        ['weight', 'bias']
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"`module` must be a torch.nn.Module, got a {type(module).__name__}.")
        self.module = module
        self.loading_prefix = ""
        """The beginning of the names under which this module was loaded the last time."""
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]  # torch's gap
        self.register_load_state_dict_post_hook(_name_as_saved)  # type: ignore[no-untyped-call]  # torch's gap

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Wrapping:
        """Change the tensors as the network around asks, all but their device."""

        def stay(tensor: torch.Tensor) -> torch.Tensor:
            changed = _change(tensor, fn)
            return changed if changed.device == tensor.device else tensor.to(changed.dtype)

        super()._apply(stay, recurse)  # type: ignore[no-untyped-call]  # torch's gap
        return self

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *arguments: Any) -> None:
        """Give the saved names the prefix by which the wrapped module, which loads next, looks for them.

        Hooks of `register_load_state_dict_pre_hook` come before: they know the saved names.
        """
        self.loading_prefix = prefix
        hooks = self._load_state_dict_pre_hooks
        for hook in hooks.values():
            hook(state_dict, prefix, *arguments)
        _rename(state_dict, prefix, prefix + INNER)
        self._load_state_dict_pre_hooks = OrderedDict()
        try:
            super()._load_from_state_dict(state_dict, prefix, *arguments)
        finally:
            self._load_state_dict_pre_hooks = hooks


def _change(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return what a function makes of a tensor; of one on "meta" that cannot leave it, at least the dtype."""
    try:
        return fn(tensor)
    except RuntimeError:
        if not tensor.is_meta:
            raise
        return fn(torch.empty((0,), dtype=tensor.dtype, device="cpu"))


def _drop_prefix(wrapper: nn.Module, state: MutableMapping[str, Any], prefix: str, local_metadata: Any) -> None:
    """Save the wrapped module's tensors, and the versions of its layout, under its own names."""
    del wrapper, local_metadata
    _rename(state, prefix + INNER, prefix)
    metadata = getattr(state, "_metadata", {})
    own = prefix + INNER[:-1]
    for name in [name for name in metadata if name == own or name.startswith(own + ".")]:
        metadata[(prefix + name[len(own) + 1 :]).rstrip(".")] = metadata.pop(name)


def _name_as_saved(wrapper: Wrapping, incompatible: Any) -> None:
    """Report missing and unknown tensors by the names they have where they are saved."""
    prefix = wrapper.loading_prefix
    inner = prefix + INNER
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [prefix + name[len(inner) :] if name.startswith(inner) else name for name in names]


def _rename(state: MutableMapping[str, Any], old: str, new: str) -> None:
    """Change the beginning of names; their order stays."""
    for name in [name for name in state if name.startswith(old)]:
        state[new + name[len(old) :]] = state.pop(name)
