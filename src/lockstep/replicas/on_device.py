"""A module that stays on one device inside a network that lives on several."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lockstep import nest
from lockstep.replicas.devices import device_context, parse_device
from lockstep.replicas.wrapping import Wrapping


class OnDevice(Wrapping):
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
