"""What MXNet's group gives out: outputs, gradients of inputs, parameters."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lockstep.replicas import ReplicaGroup


class GroupResults:
    """The reading half of `DataParallelExecutorGroup`.

    Args:
        core: What computes.
        num_data: How many of its inputs are data; the others are labels.

    Attributes:
        core: The same, for what MXNet has no name for.
    """

    def __init__(self, core: ReplicaGroup, num_data: int) -> None:
        self.core = core
        self._num_data = num_data

    def get_batch_size(self) -> int:
        """Give the number of samples of a batch."""
        return self.core.batch_size

    def get_outputs(self) -> list[list[torch.Tensor]]:
        """Give for each output its part on each device."""
        return self.core.outputs(merge=False)

    def get_outputs_merged(self) -> list[torch.Tensor]:
        """Give each output of the whole batch, sample k at place k."""
        return self.core.outputs()

    def get_output_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Give the name and the shape of each output of the whole batch, after a forward."""
        return self.core.output_shapes()

    def get_input_grads(self) -> list[list[torch.Tensor]]:
        """Give for each of the data the gradient of what each device was given."""
        return self.core.input_grads(merge=False)[: self._num_data]

    def get_input_grads_merged(self) -> list[torch.Tensor]:
        """Give the gradient of each of the data; of what was given whole to each device, the sum."""
        return self.core.input_grads()[: self._num_data]

    def get_params(
        self, arg_params: Mapping[str, torch.Tensor], aux_params: Mapping[str, torch.Tensor]
    ) -> None:
        """Copy parameters and buffers into tensors that are there.

        Args:
            arg_params: A tensor for each parameter, changed in place; others are left alone.
            aux_params: Likewise for buffers.

        Raises:
            KeyError: There is no tensor for one; nothing has changed.
        """
        targets: list[tuple[torch.Tensor, torch.Tensor]] = []
        for given, own in zip((arg_params, aux_params), self.core.get_parameters(), strict=True):
            targets += [(given[name], value) for name, value in own.items()]
        for target, value in targets:
            target.copy_(value)
