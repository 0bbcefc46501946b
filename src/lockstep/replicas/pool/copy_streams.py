"""Copy data to accelerators on streams of their own, while the current streams compute."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch

from lockstep.replicas.pool.devices import NULL_CONTEXT


class CopyStreams:
    """One stream per accelerator, on which data is prepared that the current stream uses later.

    Args:
        accelerators: The accelerators.
    """

    def __init__(self, accelerators: Iterable[torch.device]) -> None:
        self._streams = {device: torch.Stream(device) for device in accelerators}

    def start(self) -> None:
        """Order what is prepared from now on after all work that the current streams have been given so far."""
        # Data on the device may still be written there, and memory that is free on the host may still be read.
        for device, stream in self._streams.items():
            stream.wait_stream(torch.accelerator.current_stream(device))

    def preparing_on(self, device: torch.device) -> AbstractContextManager[object]:
        """Return a context in which work for a device is given to its copy stream; without effect for a CPU."""
        return self._streams.get(device, NULL_CONTEXT)

    def hand_over(self, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        """Allow the current stream of a device to use tensors that were prepared on its copy stream.

        Args:
            device: The device.
            tensors: The tensors; those on other devices are left alone.
        """
        stream = self._streams.get(device)
        if stream is None:
            return
        current = torch.accelerator.current_stream(device)
        current.wait_stream(stream)
        for tensor in tensors:
            # Their memory belongs to the copy stream, which would write to it again while the current stream reads it.
            if tensor.device == device:
                tensor.record_stream(current)
