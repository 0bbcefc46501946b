"""Find the first tensor in which ranks differ, by names and digests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from lockstep.digest import digest
from lockstep.errors import DisagreementError

Named = dict[str, torch.Tensor]


def named_tensors(subject: nn.Module | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]) -> Named:
    """Give tensors with their names: a module's parameters and buffers, or what was given."""
    if isinstance(subject, nn.Module):
        return {**dict(subject.named_parameters()), **dict(subject.named_buffers())}
    if isinstance(subject, Mapping):
        return dict(subject)
    return {f"tensor {index}": tensor for index, tensor in enumerate(subject)}


def check_same(tensors: Named, exchange: Callable[[bytes], list[bytes]]) -> None:
    """Refuse to go on unless all ranks hold the same bits; tell tensors apart only when they do not.

    Args:
        tensors: This rank's, by name.
        exchange: Brings a message to every rank.

    Raises:
        DisagreementError: Two ranks differ.
    """
    digests = {name: digest(tensor) for name, tensor in tensors.items()}
    if len(set(exchange(digest(digests).encode()))) == 1:
        return
    shapes = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()}
    rows = [[name, shapes[name], digests[name]] for name in tensors]
    ranks = [json.loads(message) for message in exchange(json.dumps(rows).encode())]
    raise next(
        difference(rank, rows, ranks[0])
        for rank, rows in enumerate(ranks)
        if sorted(rows) != sorted(ranks[0])
    )


def difference(rank: int, rows: list[list[str]], first: list[list[str]]) -> DisagreementError:
    """Say where a rank differs from rank 0.

    Args:
        rank: The rank.
        rows: For each of its tensors the name, dtype with shape, and digest.
        first: Those of rank 0, which differ.
    """
    remedy = "Build the model from the same seed and code on every rank."
    if len(rows) != len(first):
        counts = f"Rank {rank} holds {len(rows)} tensors, but rank 0 holds {len(first)}."
        return DisagreementError(f"{counts} {remedy}", rank=rank, subject="number of tensors")
    theirs = {name: (shape, bits) for name, shape, bits in rows}
    for name, shape, bits in first:
        if name not in theirs:
            message = f"Rank {rank} holds no {name!r}, but rank 0 does. {remedy}"
            return DisagreementError(message, rank=rank, subject=name)
        if theirs[name][0] != shape:
            message = f"On rank {rank} {name!r} is {theirs[name][0]}, but on rank 0 {shape}. {remedy}"
            return DisagreementError(message, rank=rank, subject=name)
        if theirs[name][1] != bits:
            break
    message = f"Rank {rank} holds other bits in {name!r} than rank 0. {remedy}"
    return DisagreementError(message, rank=rank, subject=name)
