"""Detect a forward or a loss function that writes to the parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Final

import torch
from torch import nn

from lockstep.replicas.buffers import as_bits
from lockstep.replicas.pool import NULL_CONTEXT, ReplicaSet, hidden_parameters

MOST_COPIED: Final = 2**22
"""The number of elements up to which parameters are copied. The bits of more are only summed, which takes no memory: a
copy would be the largest that a run ever holds."""


class ParameterWrites:
    """Compares the parameters before and after the shards of the first update, and refuses a model that changes them.

    Replicas share the memory of parameters with the model, or have copies that are overwritten. What a forward writes
    there is therefore seen by some shards and not by others, and is lost where it replaces ``parameter.data``.

    Args:
        replicas: The model and its replicas, up to date; None for no check.
    """

    def __init__(self, replicas: ReplicaSet | None = None) -> None:
        self._replicas = replicas

    def watching(self) -> AbstractContextManager[None]:
        """Return a context for the shards of an update, which checks those of the first one that completes.

        Raises:
            ValueError: If a parameter has changed, at the end of the context. Unless the model is large, its parameters
                have their values from before then.
        """
        return NULL_CONTEXT if self._replicas is None else self._comparing(self._replicas)

    @contextmanager
    def _comparing(self, replicas: ReplicaSet) -> Iterator[None]:
        checked = {
            name: parameter
            for name, parameter in _named(replicas.model)
            # What the memory of other classes of tensors means is up to them.
            if type(parameter) is nn.Parameter and parameter.layout is torch.strided and not parameter.is_meta
        }
        read = _copied if sum(map(torch.numel, checked.values())) <= MOST_COPIED else _summed
        before = {name: read(parameter) for name, parameter in checked.items()}
        copies = replicas.replicas
        try:
            yield
        except Exception as error:
            self._check(replicas, copies, read, before, error)
            raise
        self._check(replicas, copies, read, before)
        self._replicas = None

    def _check(
        self,
        replicas: ReplicaSet,
        copies: Sequence[nn.Module],
        read: Callable[[torch.Tensor], torch.Tensor],
        before: dict[str, torch.Tensor],
        cause: Exception | None = None,
    ) -> None:
        """Raise an error if a parameter has another value than before, after it was given a copied value again."""
        written = [
            name
            for model in (replicas.model, *copies)
            for name, parameter in _named(model)
            if name in before and not _same(read(parameter), before[name])
        ]
        if not written:
            return
        with torch.no_grad():
            for name, parameter in _named(replicas.model):
                if name in written and read is _copied and as_bits(parameter.detach()).shape == before[name].shape:
                    as_bits(parameter.detach()).copy_(before[name])
        # They may have other memory now.
        replicas.release()
        raise ValueError(
            "`model` must not write to its parameters while a loss is computed, because all shards compute with the "
            f"same values, got one whose {written[0]!r} has changed. If the first forward initializes parameters by "
            "its batch, run the model on a batch in training mode before you create the updater. Keep values that "
            "every forward changes, such as moving averages, in buffers, and change weights between updates: in a post "
            "hook of the optimizer's step, or in an extension."
        ) from cause


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List the parameters of a model with names, and those of modules that it holds without registering them."""
    hidden = hidden_parameters(model)
    return [*model.named_parameters(), *((f"unregistered {index}", each) for index, each in enumerate(hidden))]


def _same(now: torch.Tensor, before: torch.Tensor) -> bool:
    """Return whether what was read of a parameter is what was read before."""
    return now.dtype is before.dtype and torch.equal(now.to(before.device), before)


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of the bits of a parameter."""
    return as_bits(parameter.detach()).clone()


def _summed(parameter: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of a parameter."""
    # In blocks, because each is converted to 64 bits first.
    blocks = torch.split(as_bits(parameter.detach()).reshape(-1), 2**16)
    return torch.stack([block.sum(dtype=torch.int64) for block in blocks]).sum()
