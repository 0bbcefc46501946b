"""Modules that wrap another module: `ModuleWrapper`, whose state is that of the wrapped module, and `OnDevice`.

`OnDevice` runs the wrapped module on one device inside a network that uses several.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn

from lockstep import nest
from lockstep.arguments import check_instance
from lockstep.replicas.pool.copies import refuse_wrapped
from lockstep.replicas.pool.devices import device_context, parse_device

MODULE_PREFIX = "module."
"""The prefix that the names of the wrapped module's tensors have inside of the wrapper."""


class ModuleWrapper(nn.Module):
    """A module that wraps another one and has the same state dict.

    A state that was saved with the wrapper can be loaded without it, and the other way round. The wrapped module stays
    on its device when the surrounding network is moved, and is converted with it to another dtype.

    Args:
        module: The module to wrap, which becomes the attribute ``module``.

    Raises:
        TypeError: If `module` is not a module, or is spread over devices or processes already.

    Example:
        >>> list(ModuleWrapper(nn.Linear(2, 1)).state_dict())
        ['weight', 'bias']
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        check_instance("module", module, nn.Module, "a torch.nn.Module")
        refuse_wrapped(module, "module", copied=not isinstance(self, OnDevice))
        self.module = module
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]  # torch's gap
        self.register_load_state_dict_post_hook(_run_inner_hooks)  # type: ignore[no-untyped-call]  # torch's gap

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ModuleWrapper:
        """Apply a conversion of the surrounding network to the tensors, except for a change of their device.

        Args:
            fn: The function that converts a tensor.
            recurse: Whether to apply it to child modules.
        """

        def keep_device(tensor: torch.Tensor) -> torch.Tensor:
            changed = _apply_to(tensor, fn)
            # The device of the wrapped module is fixed, so only a change of the dtype is taken over.
            return changed if changed.device == tensor.device else tensor.to(changed.dtype)

        super()._apply(keep_device, recurse)  # type: ignore[no-untyped-call]  # torch's gap
        return self

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *arguments: Any) -> None:
        """Load the tensors of the wrapped module itself, before torch visits the children of that module.

        The names and versions of a saved state are those of the bare module, and torch looks up both by the prefix that
        it has built. The wrapped module must therefore be loaded under the prefix of the wrapper.

        Args:
            state_dict: The state to load.
            prefix: The prefix of the wrapper.
            *arguments: The other arguments of torch, which are passed on.
        """
        # Called here, because the method of `nn.Module` that this one overrides would call them.
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *arguments)
        self.module._load_from_state_dict(state_dict, prefix, *arguments)
        self._modules = _ChildrenOnce(self)


class OnDevice(ModuleWrapper):
    """Run a module on a device of its own, for inputs from any device.

    Every tensor of the inputs, including those in nests, is moved to the device. The output stays there or is moved to
    another device. In backward, each gradient is moved to the device of its input. A tensor that is on the right device
    already is not copied. The module stays on its device when the surrounding network is moved (``net.cuda()``,
    ``net.to("cuda:1")``), is converted with it to another dtype, and is moved only by `move_to`. An `OnDevice` inside
    of the module keeps its own device.

    Args:
        module: The module, which is moved to the device. Its parameters remain the same objects.
        device: The device to run on. ``"meta"`` computes only shapes.
        output_device: The device of the output, or None to leave the output on `device`.

    Raises:
        TypeError: If `module` is not a module.
        ValueError: If this machine does not have the device.

    Determinism: Copies keep every bit. Everything else depends on the module.

    References: Torch7's nn.GPU (2016), which is for models that are split over several devices in sequence.

    Example:
        >>> net = nn.Sequential(OnDevice(nn.Linear(3, 2), "cpu"), OnDevice(nn.Linear(2, 1), "cpu"))
        >>> net(torch.ones(4, 3)).shape
        torch.Size([4, 1])
        >>> list(net.state_dict())
        ['0.weight', '0.bias', '1.weight', '1.bias']
    """

    def __init__(
        self, module: nn.Module, device: str | torch.device, output_device: str | torch.device | None = None
    ) -> None:
        super().__init__(module)
        self.move_to(device, output_device)

    def move_to(self, device: str | torch.device, output_device: str | torch.device | None = None) -> OnDevice:
        """Move the module to another device.

        Args:
            device: The device to run on, as in the constructor.
            output_device: The device of the output, as in the constructor.

        Returns:
            This module.

        Raises:
            ValueError: If this machine does not have the device. Nothing has been moved in that case.
        """
        place = parse_device(device, "device")
        output = None if output_device is None else parse_device(output_device, "output_device")
        self.device, self.output_device = place, output
        self.module.to(place)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its device.

        Args:
            *args: Nests of tensors on any devices. Other values are passed through unchanged.
            **kwargs: The same by name.

        Returns:
            The output of the module, with its tensors on `output_device`.
        """
        args, kwargs = _move((args, kwargs), self.device)
        with device_context(self.device):
            output = self.module(*args, **kwargs)
        return output if self.output_device is None else _move(output, self.output_device)

    def extra_repr(self) -> str:
        """Return the names of the devices."""
        return f"{self.device}" + ("" if self.output_device is None else f" -> {self.output_device}")


class _ChildrenOnce(dict[str, "nn.Module | None"]):
    """The modules of a wrapper, for which the next call of `items` returns the children of the wrapped module.

    `torch.nn.Module.load_state_dict` iterates over them right after `_load_from_state_dict`. Nothing in between can
    fail, so the wrapper has its own modules again even if loading a child fails.

    Args:
        wrapper: The wrapper that is being loaded.
    """

    def __init__(self, wrapper: ModuleWrapper) -> None:
        super().__init__(wrapper._modules)
        self._wrapper, self._own = wrapper, wrapper._modules

    def items(self) -> Any:
        """Return the names and children of the wrapped module, and restore the modules of the wrapper."""
        self._wrapper._modules = self._own
        return self._wrapper.module._modules.items()


def _apply_to(tensor: torch.Tensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the converted tensor, or for a tensor on "meta" that cannot leave it, a tensor of the new dtype."""
    try:
        return fn(tensor)
    except RuntimeError:
        if not tensor.is_meta:
            raise
        # `_apply` uses only the dtype of the result if the device differs.
        return fn(torch.empty((0,), dtype=tensor.dtype, device="cpu"))


def _drop_prefix(wrapper: nn.Module, state: MutableMapping[str, Any], prefix: str, local_metadata: Any) -> None:
    """Rename the tensors of the wrapped module, and the versions of its state, as if there were no wrapper."""
    del wrapper, local_metadata
    _rename(state, prefix + MODULE_PREFIX, prefix)
    metadata = getattr(state, "_metadata", {})
    own = prefix + MODULE_PREFIX[:-1]
    for name in [name for name in metadata if name == own or name.startswith(own + ".")]:
        metadata[(prefix + name[len(own) + 1 :]).rstrip(".")] = metadata.pop(name)


def _run_inner_hooks(wrapper: ModuleWrapper, incompatible: Any) -> None:
    """Run the hooks of the wrapped module at the end of a load, which torch does not visit by itself."""
    for hook in wrapper.module._load_state_dict_post_hooks.values():
        if hook(wrapper.module, incompatible) is not None:
            raise ValueError("A hook of `register_load_state_dict_post_hook` must modify its argument, got a new one.")


def _rename(state: MutableMapping[str, Any], old: str, new: str) -> None:
    """Replace the beginning of names, keeping their order."""
    for name in [name for name in state if name.startswith(old)]:
        state[new + name[len(old) :]] = state.pop(name)


def _move(parts: Any, device: torch.device) -> Any:
    """Move every tensor of a nest to a device. Autograd moves its gradient back."""
    return nest.map_tensors(lambda tensor: tensor.to(device), parts)
