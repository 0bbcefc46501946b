"""Detect a forward or a loss function that writes to the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final

import torch
from torch import nn

from lockstep.replicas.pool import ReplicaSet

NO_CONTEXT: Final[AbstractContextManager[None]] = nullcontext()


class ParameterWrites:
    """Compares the parameters before and after the shards of the first update, and refuses a model that changes them.

    Replicas share the memory of parameters with the model, or have copies that are overwritten. What a forward writes
    there is therefore seen by some shards and not by others, and is lost where it replaces ``parameter.data``.

    Args:
        replicas: The model and its replicas, up to date; None for no check.
    """

    def __init__(self, replicas: ReplicaSet | None = None) -> None:
        self.replicas = replicas

    def watching(self) -> AbstractContextManager[None]:
        """Return a context for the shards of an update, which checks those of the first one that completes.

        There is nothing left to check once `replicas` is None.

        Raises:
            ValueError: If a parameter has changed, at the end of the context. Parameters of the model have their values
                from before then.
        """
        return NO_CONTEXT if self.replicas is None else self._comparing(self.replicas)

    @contextmanager
    def _comparing(self, replicas: ReplicaSet) -> Iterator[None]:
        before = {
            name: parameter.detach().clone()
            for name, parameter in replicas.model.named_parameters()
            if parameter.layout is torch.strided and not parameter.is_meta
        }
        copies = replicas.replicas
        try:
            yield
        except Exception as error:
            self._check(replicas, copies, before, error)
            raise
        self._check(replicas, copies, before)
        self.replicas = None

    def _check(
        self,
        replicas: ReplicaSet,
        copies: Sequence[nn.Module],
        before: dict[str, torch.Tensor],
        cause: Exception | None = None,
    ) -> None:
        """Raise an error if a parameter has another value than before, after it was given that value again."""
        written = [
            name
            for model in (replicas.model, *copies)
            for name, parameter in model.named_parameters()
            if name in before and not _same(parameter.detach(), before[name])
        ]
        if not written:
            return
        with torch.no_grad():
            for name, parameter in replicas.model.named_parameters():
                if name in written:
                    parameter.copy_(before[name])
        # They may have other memory now.
        replicas.release()
        raise ValueError(
            "`model` must not write to its parameters while a loss is computed, because all shards compute with the "
            f"same values, got one whose {written[0]!r} has changed. If the first forward initializes parameters by "
            "its batch, run the model on a batch in training mode before you create the updater. Keep values that "
            "every forward changes, such as moving averages, in buffers, and change weights between updates: in a post "
            "hook of the optimizer's step, or in an extension."
        ) from cause


def _same(parameter: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether two tensors hold the same values, where a NaN equals a NaN."""
    if parameter.shape != before.shape or parameter.dtype != before.dtype:
        return False
    there = before.to(parameter.device)
    return torch.equal(parameter, there) or bool(((parameter == there) | (parameter.isnan() & there.isnan())).all())
