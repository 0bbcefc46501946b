"""Torch7's names: `DataParallelTable` and `GPU`, with dimensions and devices counted from 1.

References: Torch7's cunn ``DataParallelTable`` and nn ``GPU`` (2015, 2016), for the names and what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from lockstep import nest
from lockstep.errors import OrderError
from lockstep.replicas import DataParallel, ModuleWrapper, OnDevice

Device: TypeAlias = "int | str | torch.device"


class DataParallelTable(ModuleWrapper):
    """A module on several devices that share its batch; see `lockstep.DataParallel`, which does it.

    It works in two ways. As any torch module, with a criterion and ``loss.backward()``; and as in Torch7, by
    `forward`, `backward` and `update_parameters`. Peculiar to Torch7: dimensions and devices count from 1,
    and modules are added after the table was made.

    Args:
        dim: The dimension that counts samples, from 1; negative ones count from the end.
        flatten_params: Lay the parameters end to end in one tensor.
        use_nccl: Send parameters to other GPUs by NCCL; asks for `flatten_params`.

    Raises:
        ValueError: `dim` is 0, or `use_nccl` comes without `flatten_params`.

    Determinism: as `lockstep.DataParallel` with one shard a device.

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
            raise ValueError("`flatten_params` must be True where `use_nccl` is, got False.")
        self.dim = dim
        self.flatten_params = flatten_params
        self.use_nccl = use_nccl
        self._prepare: _Prepare | None = None
        self._added_at_once = False
        self._output: Any = None

    def add(self, module: nn.Module, devices: Device | Sequence[Device]) -> DataParallelTable:
        """Put a module on devices, the main one first.

        Args:
            module: Replicated on all devices.
            devices: A list of devices, once; or one device a call, of which the first call's module counts. A
                GPU's number from 1, or a name of torch's.

        Returns:
            This table.

        Raises:
            OrderError: A list was given before.
            ValueError: There is no device, or this machine has none of this name.
            TypeError: `module` is no module.
        """
        single = isinstance(devices, int | str | torch.device)
        if self._added_at_once or (self._is_filled() and not single):
            raise OrderError("`add` must be called once with a list of devices.")
        names = _names(devices)
        if self._is_filled():
            self.table.place_on([*self.table.devices, *names])
        else:
            self.module = self._filled(module, names)
        self._added_at_once = not single
        return self

    def _filled(self, module: nn.Module, names: list[str | torch.device]) -> DataParallel:
        return DataParallel(
            module,
            names,
            dim=self.dim - 1 if self.dim > 0 else self.dim,
            flatten_parameters=self.flatten_params,
            use_nccl=self.use_nccl,
            worker_init_fn=self._prepare,
        )

    def threads(self, init: Callable[[], object] | None = None) -> DataParallelTable:
        """Have a function called in each device's thread before its first work; threads there are anyway.

        Returns:
            This table.
        """
        self._prepare = None if init is None else _Prepare(init)
        if self._is_filled():
            self.table.worker_init_fn = self._prepare
            self.table.release()
        return self

    @property
    def table(self) -> DataParallel:
        """What computes.

        Raises:
            OrderError: No module was added yet.
        """
        if not isinstance(self.module, DataParallel):
            raise OrderError("`add` must be called with a module first.")
        return self.module

    def forward(self, *inputs: Any) -> Any:
        """Run the module on the whole batch, each device on its part."""
        self._output = self.table(*inputs)
        return self._output

    def backward(self, input: Any, grad_output: Any, scale: float = 1.0) -> Any:  # noqa: A002 - Torch7's name
        """Add to the gradients of parameters, as backward after the last forward.

        Args:
            input: What the last forward was given.
            grad_output: The gradient of its output, in the same containers.
            scale: What the gradients of parameters are multiplied by.

        Returns:
            The gradient of the input, in the same containers, where a tensor of it asks for one; else None.

        Raises:
            OrderError: There was no forward since the last backward.
        """
        if self._output is None:
            raise OrderError("`backward` must follow a forward, once.")
        outputs, self._output = list(nest.tensors(self._output)), None
        weights = [each for each in self.table.parameters() if each.requires_grad]
        asking = [each for each in nest.tensors(input) if each.requires_grad]
        grads = torch.autograd.grad(outputs, [*weights, *asking], list(nest.tensors(grad_output)), allow_unused=True)
        _accumulate(weights, grads[: len(weights)], scale)
        rest = iter(grads[len(weights) :])
        given = nest.map_tensors(lambda each: next(rest) if each.requires_grad else None, input)
        return given if asking else None

    def zero_grad_parameters(self) -> None:
        """Fill all gradients with zeros."""
        self.table.zero_grad(set_to_none=False)

    @torch.no_grad()
    def update_parameters(self, learning_rate: float) -> None:
        """Move each parameter against its gradient."""
        for parameter in self.table.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=learning_rate)

    def get_parameters(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Give all parameters as one flat tensor and all gradients as another; both are the memory itself."""
        values, gradients = self.table.flat_parameters()
        return values.detach(), gradients

    def sync_parameters(self) -> None:
        """Copy the parameters to replicas on other memory; rarely needed, for writes are noticed."""
        self.table.sync_parameters()

    def release(self) -> None:
        """Let go of threads and replicas until the next forward."""
        self._output = None
        if self._is_filled():
            self.table.release()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the graph of the last forward."""
        return {**self.__dict__, "_output": None}

    def _is_filled(self) -> bool:
        return isinstance(self.module, DataParallel)


class GPU(OnDevice):
    """A module that stays on one device; see `lockstep.OnDevice`, which does it.

    Args:
        module: Moved to the device.
        device: A GPU's number from 1, or a name of torch's.
        out_device: Where the output goes; None for the same device.

    Raises:
        TypeError: `module` is no module.
        ValueError: This machine has no such device.

    >>> GPU(nn.Linear(3, 2), "cpu")(torch.ones(4, 3)).shape
    torch.Size([4, 2])
    """

    def __init__(self, module: nn.Module, device: Device, out_device: Device | None = None) -> None:
        super().__init__(module, _name(device), None if out_device is None else _name(out_device))


class _Prepare:
    """A function without arguments where one that takes a device's index is wanted."""

    def __init__(self, init: Callable[[], object]) -> None:
        self.init = init

    def __call__(self, _: int) -> None:
        self.init()


def _names(devices: Device | Sequence[Device]) -> list[str | torch.device]:
    """Read one device or several."""
    return [_name(each) for each in ([devices] if isinstance(devices, int | str | torch.device) else devices)]


def _name(device: Device) -> str | torch.device:
    """Read a device; Torch7's numbers begin at 1.

    >>> _name(2)
    'cuda:1'
    """
    if not isinstance(device, int):
        return device
    if device < 1:
        raise ValueError(f"`devices` must count GPUs from 1, got {device}.")
    return f"cuda:{device - 1}"


@torch.no_grad()
def _accumulate(weights: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], scale: float) -> None:
    """Add multiples of gradients to those that are there."""
    for weight, grad in zip(weights, grads, strict=True):
        if grad is None:
            continue
        if weight.grad is None:
            weight.grad = grad * scale
        else:
            weight.grad.add_(grad, alpha=scale)
