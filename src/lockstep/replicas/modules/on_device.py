"""A module around one other that keeps its device, and whose saved state is the other's alone."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn

from lockstep import nest
from lockstep.replicas.pool import device_context, parse_device, refuse_wrapped

INNER = "module."
"""What the names of the wrapped module's tensors begin with while they are inside."""


class ModuleWrapper(nn.Module):
    """Hold one module; a state saved with the wrapper loads without it, and the other way round.

    The module stays on its device when the network around is moved, and follows it to another dtype.

    Args:
        module: What is wrapped; afterwards found as the attribute of the same name.

    Raises:
        TypeError: It is no module, or one that is spread over devices or processes already.

    Example:
        >>> list(ModuleWrapper(nn.Linear(2, 1)).state_dict())
        ['weight', 'bias']
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"`module` must be a torch.nn.Module, got a {type(module).__name__}.")
        refuse_wrapped(module, "module")
        self.module = module
        self.register_state_dict_post_hook(_drop_prefix)  # type: ignore[no-untyped-call]  # torch's gap
        self.register_load_state_dict_post_hook(_run_inner_hooks)  # type: ignore[no-untyped-call]  # torch's gap

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ModuleWrapper:
        """Change the tensors as the network around asks, all but their device."""

        def stay(tensor: torch.Tensor) -> torch.Tensor:
            changed = _change(tensor, fn)
            return changed if changed.device == tensor.device else tensor.to(changed.dtype)

        super()._apply(stay, recurse)  # type: ignore[no-untyped-call]  # torch's gap
        return self

    def _load_from_state_dict(self, state_dict: MutableMapping[str, Any], prefix: str, *arguments: Any) -> None:
        """Load what the wrapped module owns itself; torch's recursion then goes on with that module's children.

        The names and versions of a saved state are those of the bare module. torch looks both up by the prefix
        it has built, so the wrapped module must be loaded under the prefix of the wrapper.
        """
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, *arguments)
        self.module._load_from_state_dict(state_dict, prefix, *arguments)
        self._modules = _ChildrenOnce(self)


class _ChildrenOnce(dict[str, "nn.Module | None"]):
    """The modules of a wrapper, whose next `items` are the children of the wrapped module.

    `torch.nn.Module.load_state_dict` iterates over them right after `_load_from_state_dict`, with nothing in
    between that could fail; so the wrapper has its own modules again whatever the children's load does.

    Args:
        wrapper: The wrapper that is being loaded.
    """

    def __init__(self, wrapper: ModuleWrapper) -> None:
        super().__init__(wrapper._modules)
        self._wrapper, self._own = wrapper, wrapper._modules

    def items(self) -> Any:
        """Return the names and children of the wrapped module, and restore the wrapper's own modules."""
        self._wrapper._modules = self._own
        return self._wrapper.module._modules.items()


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


def _run_inner_hooks(wrapper: ModuleWrapper, incompatible: Any) -> None:
    """Run the wrapped module's hooks for the end of a load, which torch does not visit by itself."""
    for hook in wrapper.module._load_state_dict_post_hooks.values():
        if hook(wrapper.module, incompatible) is not None:
            raise ValueError("A hook of `register_load_state_dict_post_hook` must change its argument, got a new one.")


def _rename(state: MutableMapping[str, Any], old: str, new: str) -> None:
    """Change the beginning of names; their order stays."""
    for name in [name for name in state if name.startswith(old)]:
        state[new + name[len(old) :]] = state.pop(name)


class OnDevice(ModuleWrapper):
    """Run a module on a device of its own, whatever devices its inputs come from.

    Every tensor of the inputs, nested as it may be, is brought to the device; the output stays there or
    goes to another one. In backward each gradient goes back to its own input's device. What is where it
    belongs already is not copied. The module stays on its device when the network around it is moved
    (``net.cuda()``, ``net.to("cuda:1")``), follows it to another dtype, and is moved by `move_to` alone. A
    module within it that is an `OnDevice` itself keeps its own device.

    Args:
        module: Moved to the device, its parameters staying the same objects.
        device: Where it runs. ``"meta"`` computes shapes alone.
        output_device: Where the output goes; None leaves it on the device.

    Raises:
        TypeError: `module` is no module.
        ValueError: This machine has no such device.

    Determinism: copies keep every bit; the rest is the module's own.

    References: Torch7's nn.GPU (2016), which is for models that are cut in sequence over several devices.

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
        """Let the module live elsewhere from now on.

        Args:
            device: As in the constructor.
            output_device: As in the constructor.

        Returns:
            This module.

        Raises:
            ValueError: This machine has no such device; nothing has been moved.
        """
        place = parse_device(device, "device")
        output = None if output_device is None else parse_device(output_device, "output_device")
        self.device, self.output_device = place, output
        self.module.to(place)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on its device.

        Args:
            *args: Nests of tensors from any devices; what is no tensor is passed on as it is.
            **kwargs: The same by name.

        Returns:
            What the module returns, its tensors on `output_device`.
        """
        args, kwargs = _move((args, kwargs), self.device)
        with device_context(self.device):
            output = self.module(*args, **kwargs)
        return output if self.output_device is None else _move(output, self.output_device)

    def extra_repr(self) -> str:
        """Name the devices."""
        return f"{self.device}" + ("" if self.output_device is None else f" -> {self.output_device}")


def _move(parts: Any, device: torch.device) -> Any:
    """Bring every tensor of a nest to a device; autograd brings its gradient back."""
    return nest.map_tensors(lambda tensor: tensor.to(device), parts)
