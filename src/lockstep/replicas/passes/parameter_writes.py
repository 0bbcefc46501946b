"""Detect a forward or a loss function that writes to the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from lockstep.digest import checksums
from lockstep.replicas.pool.copies import hidden_parameters
from lockstep.replicas.pool.replica_set import ReplicaSet

MOST_COPIED: Final = 2**22
"""The number of elements up to which parameters are copied. Of more only checksums are kept: a copy would be the
largest that a run ever holds."""
_MESSAGE: Final = (
    "`model` must not write to its parameters while a loss is computed, because all shards compute with the same "
    "values, got one whose {!r} has changed. If the first forward initializes parameters by its batch, run the model "
    "on a batch in training mode under torch.no_grad() before you create the updater. Keep values that every forward "
    "changes, such as moving averages, in buffers, and change weights between updates: in a post hook of the "
    "optimizer's step, or in an extension."
)


@contextmanager
def refusing_writes(replicas: ReplicaSet) -> Iterator[None]:
    """Compare the parameters before and after shards are computed, and refuse a model that changes them.

    Replicas share the memory of parameters with the model, or have copies that are overwritten. What a forward writes
    there is therefore seen by some shards and not by others, and is lost where it replaces ``parameter.data``.

    Args:
        replicas: The model and its replicas, up to date.

    Raises:
        ValueError: If a parameter has changed, at the end of the context. Unless the model is large, its parameters
            have their values from before then.
    """
    models, checked = [replicas.model, *replicas.replicas], _named(replicas.model)
    before = _checksums(checked)
    small = sum(map(torch.numel, checked.values())) <= MOST_COPIED
    copies = {name: parameter.detach().clone() for name, parameter in checked.items() if small}

    def check() -> None:
        for model in models:
            for name, found in _checksums(_named(model)).items():
                if name in before and found != before[name]:
                    _restore(replicas.model, copies)
                    # They may have other memory now.
                    replicas.release()
                    raise ValueError(_MESSAGE.format(name))

    try:
        yield
    except Exception:
        check()
        raise
    check()


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by name, and those of modules that it holds without registering them."""
    hidden = {f"unregistered {index}": each for index, each in enumerate(hidden_parameters(model))}
    named = dict(model.named_parameters()) | hidden
    # What the memory of other classes of tensors means is up to them.
    return {
        name: each
        for name, each in named.items()
        if type(each) is nn.Parameter and each.layout is torch.strided and not each.is_meta
    }


def _checksums(named: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return dict(zip(named, checksums(named.values()), strict=True))


@torch.no_grad()
def _restore(model: nn.Module, copies: Mapping[str, torch.Tensor]) -> None:
    """Restore the former values of parameters."""
    for name, parameter in _named(model).items():
        if name in copies and parameter.shape == copies[name].shape:
            parameter.copy_(copies[name])
