"""The communicator of a process that is alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.communicators.communicator import Communicator, Contribution
from lockstep.tree import PartialSum, Tensors, total


class LocalCommunicator(Communicator):
    """Rank 0 of 1: nothing is sent, nothing is waited for.

    >>> communicator = LocalCommunicator()
    >>> communicator.rank, communicator.size, communicator.exchange(b"alone")
    (0, 1, [b'alone'])
    """

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give back the message."""
        return [payload]

    def all_reduce(self, tensors: Sequence[torch.Tensor], *, ordered: bool = True) -> None:
        """Leave the tensors as they are: they are their own sum."""

    def sum_partials(
        self,
        partials: Sequence[PartialSum],
        contributions: Sequence[Contribution],  # noqa: ARG002 - `partials` say it all here
        like: Sequence[torch.Tensor],
        *,
        divisor: float = 1.0,
    ) -> Tensors:
        """Add up the partial sums of this process; see `Communicator.sum_partials`."""
        summed: Tensors = total(partials) if partials else [None] * len(like)
        present = [tensor for tensor in summed if tensor is not None]
        if divisor != 1.0 and present:
            torch._foreach_div_(present, divisor)
        return summed

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Leave the tensors as they are."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Give back the object itself."""
        return [value]

    def check_same(self, subject: nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> None:
        """Agree with oneself."""

    def barrier(self) -> None:
        """Go on."""

    def close(self) -> None:
        """Do nothing: nothing was opened."""
