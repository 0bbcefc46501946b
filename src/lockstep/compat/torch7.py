"""Torch7's interface: `DataParallelTable` and `GPU`, with dimensions and devices counted from 1.

References: Torch7's cunn ``DataParallelTable`` and nn ``GPU`` (2015, 2016), for the names and their meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from lockstep import nest
from lockstep.errors import OrderError
from lockstep.replicas import DataParallel, ModuleWrapper, OnDevice

Device: TypeAlias = "int | str | torch.device"


class DataParallelTable(ModuleWrapper):
    """A module that splits each batch over several devices, based on `lockstep.DataParallel`.

    You can use it like any torch module, with a criterion and ``loss.backward()``; or as in Torch7, with
    `forward`, `backward` and `update_parameters`. Specific to Torch7: dimensions and devices are counted from 1,
    and modules are added after the table was created.

    Args:
        dim: The dimension of the samples, counted from 1; negative numbers count from the end.
        flatten_params: Whether to store all parameters contiguously in one tensor.
        use_nccl: Whether to copy parameters to other GPUs with NCCL; requires `flatten_params`.

    Raises:
        ValueError: If `dim` is 0, or `use_nccl` is set without `flatten_params`.

    Determinism: as `lockstep.DataParallel` with one shard per device.

    Example:
        >>> net = DataParallelTable(1).add(nn.Linear(2, 1), ["cpu", "cpu"])
        >>> x, target = torch.ones(6, 2), torch.zeros(6, 1)
        >>> output = net.forward(x)
        >>> net.zero_grad_parameters()
        >>> net.backward(x, 2 * (output - target) / 6)
        >>> net.update_parameters(0.1)
    """

    def __init__(self, dim: int, flatten_params: bool = False, use_nccl: bool = False) -> None:
        super().__init__(nn.Sequential())
        if dim == 0:
            raise ValueError("`dim` must count from 1, got 0.")
        if use_nccl and not flatten_params:
            raise ValueError("`flatten_params` must be True if `use_nccl` is, got False.")
        self.dim = dim
        self.flatten_params = flatten_params
        self.use_nccl = use_nccl
        self._worker_init: Callable[[int], None] | None = None
        self._added_at_once = False
        self._output: Any = None

    def add(self, module: nn.Module, devices: Device | Sequence[Device]) -> DataParallelTable:
        """Place a module on devices, starting with the main device.

        Args:
            module: The module to replicate on all devices.
            devices: A list of devices, in a single call; or one device per call, in which case the module of the
                first call is used. A device is the number of a GPU, counted from 1, or a torch device name.

        Returns:
            This table.

        Raises:
            OrderError: If a list was passed before.
            ValueError: If there is no device, or a device does not exist on this machine.
            TypeError: If `module` is not a module.
        """
        given = [devices] if isinstance(devices, int | str | torch.device) else devices
        single = given is not devices
        if self._added_at_once or (self._is_filled() and not single):
            raise OrderError("`add` must be called only once with a list of devices.")
        names = list(map(_device_name, given))
        if self._is_filled():
            self.table.place_on([*self.table.devices, *names])
        else:
            self.module = DataParallel(
                module,
                names,
                dim=self.dim - 1 if self.dim > 0 else self.dim,
                flatten_parameters=self.flatten_params,
                use_nccl=self.use_nccl,
                worker_init_fn=self._worker_init,
            )
        self._added_at_once = not single
        return self

    def threads(self, init: Callable[[], object] | None = None) -> DataParallelTable:
        """Set a function that the thread of each device calls before its first work.

        There are threads whether you call this or not.

        Args:
            init: A function without arguments, or None.

        Returns:
            This table.
        """
        self._worker_init = None if init is None else partial(_without_index, init)
        if self._is_filled():
            self.table.worker_init_fn = self._worker_init
            # Threads that run already would not call the function: the next forward starts new ones.
            self.table.release()
        return self

    @property
    def table(self) -> DataParallel:
        """The module that computes.

        Raises:
            OrderError: If no module has been added yet.
        """
        if not isinstance(self.module, DataParallel):
            raise OrderError("`add` must be called with a module first.")
        return self.module

    def forward(self, *inputs: Any) -> Any:
        """Run the module on the whole batch, split over the devices.

        Args:
            *inputs: The inputs of the module, with the samples of the whole batch.
        """
        self._output = self.table(*inputs)
        return self._output

    def backward(self, input: Any, grad_output: Any, scale: float = 1.0) -> Any:  # noqa: A002 - Torch7's name
        """Accumulate the gradients of parameters, by backward through the last forward.

        Args:
            input: The input of the last forward.
            grad_output: The gradient of its output, in the same nested structure.
            scale: The factor that the gradients of parameters are multiplied by.

        Returns:
            The gradient of the input in the same nested structure if a tensor of it requires one, otherwise None.

        Raises:
            OrderError: If there was no forward since the last backward.
        """
        if self._output is None:
            raise OrderError("`backward` must follow a forward, once.")
        # Backward frees the graph, so that a second one must be refused even if this one raises.
        outputs, self._output = list(nest.tensors(self._output)), None
        weights = [each for each in self.table.parameters() if each.requires_grad]
        inputs = [each for each in nest.tensors(input) if each.requires_grad]
        # `grad` and not `backward`, because only the gradients of parameters are multiplied by `scale`.
        grads = torch.autograd.grad(outputs, [*weights, *inputs], list(nest.tensors(grad_output)), allow_unused=True)
        _accumulate(weights, grads[: len(weights)], scale)
        input_grads = iter(grads[len(weights) :])
        nested = nest.map_tensors(lambda each: next(input_grads) if each.requires_grad else None, input)
        return nested if inputs else None

    def zero_grad_parameters(self) -> None:
        """Set all gradients to zero."""
        self.table.zero_grad(set_to_none=False)

    @torch.no_grad()
    def update_parameters(self, learning_rate: float) -> None:
        """Subtract the gradient, times the learning rate, from each parameter.

        Args:
            learning_rate: The learning rate.
        """
        for parameter in self.table.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=learning_rate)

    def get_parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all parameters as one flat tensor and all gradients as another, both in the original memory."""
        values, gradients = self.table.flat_parameters()
        return values.detach(), gradients

    def sync_parameters(self) -> None:
        """Copy the parameters to replicas on other devices; rarely needed, because changes are detected."""
        self.table.sync_parameters()

    def release(self) -> None:
        """Release threads and replicas until the next forward."""
        self._output = None
        if self._is_filled():
            self.table.release()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the last output, whose graph cannot be pickled."""
        return {**self.__dict__, "_output": None}

    def _is_filled(self) -> bool:
        """Return whether a module has been added."""
        return isinstance(self.module, DataParallel)


class GPU(OnDevice):
    """A module that runs on one device, based on `lockstep.OnDevice`.

    Args:
        module: The module, which is moved to the device.
        device: The number of a GPU, counted from 1, or a torch device name.
        out_device: The device of the output; None for the same device.

    Raises:
        TypeError: If `module` is not a module.
        ValueError: If the device does not exist on this machine.

    >>> GPU(nn.Linear(3, 2), "cpu")(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    def __init__(self, module: nn.Module, device: Device, out_device: Device | None = None) -> None:
        super().__init__(module, _device_name(device), None if out_device is None else _device_name(out_device))


def _without_index(init: Callable[[], object], _: int) -> None:
    """Call a function that takes no argument, and not the index of a device."""
    init()


def _device_name(device: Device) -> str | torch.device:
    """Return the torch device of a device; Torch7's numbers start at 1.

    >>> _device_name(2)
    'cuda:1'
    """
    if not isinstance(device, int):
        return device
    if device < 1:
        raise ValueError(f"`devices` must count GPUs from 1, got {device}.")
    return f"cuda:{device - 1}"


@torch.no_grad()
def _accumulate(weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], scale: float) -> None:
    """Add gradients times a factor to the gradients of weights."""
    for weight, grad in zip(weights, grads, strict=True):
        if grad is not None:
            weight.grad = grad * scale if weight.grad is None else weight.grad.add_(grad, alpha=scale)
