"""Keep the parameters of replicas that have memory of their own equal to those of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn

Layout: TypeAlias = "tuple[int, torch.dtype, torch.Size, tuple[int, ...]]"
"""The address, dtype, shape and strides of a tensor."""


class ParameterCopier:
    """A copier of the parameters of a model to the replicas that do not share their memory.

    Whether a parameter has changed cannot be found out without reading it: a fused optimizer, a write to
    ``parameter.data`` and a custom operator do not increment its version counter. All values are therefore copied every
    time. The version counters of the copies change only if those of the model have changed. A copy of values that are
    already there must not invalidate the graph of an earlier forward, and a write that autograd would reject for the
    model must be rejected for its replicas too.

    Args:
        parameters: The parameters of the model.
        replicas: For each replica the copies of these parameters, in the same order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], replicas: Sequence[Sequence[nn.Parameter]]) -> None:
        self._pairs = [
            (copied, parameter)
            for replica in replicas
            for copied, parameter in zip(replica, parameters, strict=True)
            # By address: whether a replica shares memory is decided when it is created.
            if copied.device != parameter.device or copied.data_ptr() != parameter.data_ptr()
        ]
        self.has_copies = bool(self._pairs)
        """Whether there is a replica with memory of its own."""
        self._layouts = self._current_layouts()
        self._versions = self._current_versions()

    def fits(self) -> bool:
        """Return whether the parameters still have the same memory, dtypes, shapes and strides."""
        return self._current_layouts() == self._layouts

    @torch.no_grad()
    def copy(self) -> None:
        """Copy all values."""
        if self._pairs:
            copies, originals = zip(*self._pairs, strict=True)
            # Unlike `detach`, `data` has a version counter of its own, so those of the copies do not change.
            torch._foreach_copy_([copied.data for copied in copies], originals)
            self.count_writes()

    def count_writes(self) -> None:
        """Increment the version counters of the copies whose originals have been written to."""
        versions = self._current_versions()
        if versions != self._versions:
            torch.autograd.graph.increment_version(
                [
                    copied
                    for (copied, _), before, now in zip(self._pairs, self._versions, versions, strict=True)
                    if before != now
                ]
            )
            self._versions = versions

    def _current_layouts(self) -> list[Layout]:
        return [(each.data_ptr(), each.dtype, each.shape, each.stride()) for _, each in self._pairs]

    def _current_versions(self) -> list[int]:
        return [original._version for _, original in self._pairs]
