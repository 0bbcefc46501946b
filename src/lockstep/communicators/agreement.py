"""Compare over ranks what must be alike, and name what is not.

What is compared travels as a digest first. Only where digests differ, the ranks tell each other more, and
every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from lockstep.communicators.communicator import Communicator
from lockstep.digest import digest, fingerprint
from lockstep.errors import DisagreementError

NONE: Final = "nothing"
"""What an error calls the value of a field that a rank lacks."""

FEW: Final = 3
"""How many differing fields an error lists."""

STRIDE: Final = 4
"""Updates from one part of a state to the next: a long part now and then costs less than a short one each."""

Named = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """How the first rank that differs from rank 0 does so.

    Attributes:
        rank: The rank.
        here: Its values by name.
        first: Those of rank 0.
        names: The names under which they differ, in rank 0's order; then those that only this rank has.
    """

    rank: int
    here: Mapping[str, Any]
    first: Mapping[str, Any]
    names: tuple[str, ...]

    def error(self, *, what: str, remedy: str) -> DisagreementError:
        """Return the error that lists the first names with both values.

        Args:
            what: What the values describe.
            remedy: What to do about it, as a sentence.
        """
        listed = [
            f"{name} is {self.here.get(name, NONE)}, not {self.first.get(name, NONE)}" for name in self.names[:FEW]
        ]
        more = f"; and {len(self.names) - FEW} more differ" if len(self.names) > FEW else ""
        message = f"Rank {self.rank} must have rank 0's {what}, but on it {'; '.join(listed)}{more}. {remedy}"
        return DisagreementError(message, rank=self.rank, subject=self.names[0])


def first_difference(said: Sequence[Mapping[str, Any]]) -> Difference | None:
    """Return how the first rank that differs from rank 0 does so; None where all ranks say the same.

    Args:
        said: The values of each rank by name, in order of ranks.

    >>> first_difference([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b": 3, "c": 4}]).names
    ('a', 'b', 'c')
    """
    first, missing = said[0], object()
    for rank, here in enumerate(said):
        names = [name for name in {**first, **here} if first.get(name, missing) != here.get(name, missing)]
        if names:
            return Difference(rank, here, first, tuple(names))
    return None


def compare(communicator: Communicator, values: Mapping[str, Any]) -> Difference | None:
    """Compare values by name over ranks; only where their digests differ do the values themselves travel.

    Args:
        communicator: Joins the ranks, all of which call this.
        values: Those of this rank, as JSON knows them. Their order does not count.
    """
    sorted_text = json.dumps(values, sort_keys=True).encode()
    if len(set(communicator.exchange(hashlib.sha256(sorted_text).digest()))) == 1:
        return None
    return first_difference([json.loads(each) for each in communicator.exchange(json.dumps(values).encode())])


def check_fields(communicator: Communicator, fields: Mapping[str, str], *, what: str, remedy: str) -> None:
    """Refuse to go on unless all ranks say the same.

    Args:
        communicator: Joins them.
        fields: What this rank says, by name.
        what: What the fields describe, as an error shall name it.
        remedy: What to do where they differ, as a sentence.

    Raises:
        DisagreementError: On every rank, with the first rank that differs from rank 0 and the first fields in
            which it does; `subject` is the first of these.
    """
    found = compare(communicator, fields)
    if found is not None:
        raise found.error(what=what, remedy=remedy)


def check_same(communicator: Communicator, subject: nn.Module | Named | Sequence[torch.Tensor]) -> None:
    """Refuse to go on unless all ranks hold the same bits; see `Communicator.check_same`."""
    tensors = _named_tensors(subject)
    found = compare(
        communicator,
        {name: [f"{each.dtype} {tuple(each.shape)}", digest(each)] for name, each in tensors.items()},
    )
    if found is None:
        return
    rank, name = found.rank, found.names[0]
    here, first = found.here.get(name), found.first.get(name)
    if len(found.here) != len(found.first):
        name = "number of tensors"
        what = f"Rank {rank} holds {len(found.here)} tensors, but rank 0 holds {len(found.first)}"
    elif here is None or first is None:
        what = f"Rank {rank} holds no {name!r}, but rank 0 does"
    elif here[0] != first[0]:
        what = f"On rank {rank} {name!r} is {here[0]}, but on rank 0 {first[0]}"
    else:
        what = f"Rank {rank} holds other bits in {name!r} than rank 0"
    remedy = "Build the model from the same seed and code on every rank."
    raise DisagreementError(f"{what}. {remedy}", rank=rank, subject=name)


def _named_tensors(subject: nn.Module | Named | Sequence[torch.Tensor]) -> Named:
    """Return tensors with their names: a module's parameters and buffers, or what was given."""
    if isinstance(subject, nn.Module):
        return {**dict(subject.named_parameters()), **dict(subject.named_buffers())}
    if isinstance(subject, Mapping):
        return subject
    return {f"tensor {index}": tensor for index, tensor in enumerate(subject)}


class StateComparer:
    """Compares the tensors of a state, a part of it every few updates and all of it every so many.

    The digest of a part has 128 bits and travels in a message that the ranks send anyway.

    Args:
        tensors: Gives the tensors by name, the same names on every rank.
        every: Within how many updates every element is looked at, at least 1.
    """

    def __init__(self, tensors: Callable[[], Named], every: int) -> None:
        self._tensors = tensors
        self._every = every
        self._now: list[tuple[str, torch.Tensor]] = []
        self._cycle = -1

    def forget(self) -> None:
        """Ask for the tensors anew at the next update: others may be there now."""
        self._cycle = -1

    def part_of(self, update: int) -> str:
        """Give the digest of the part whose turn it is, as text; empty where it is no part's.

        Args:
            update: How many updates are done.
        """
        if update % self._every % STRIDE:
            return ""
        return fingerprint([piece for _, piece in self._pieces(update)]).hex()

    def explain(self, communicator: Communicator, update: int) -> DisagreementError:
        """Find the rank and the tensor in which the part differs; all ranks call it once digests did."""
        digests = {name: fingerprint([piece]).hex() for name, piece in self._pieces(update)}
        found = compare(communicator, digests)
        if found is None:
            what = f"The ranks held different states after {update} updates, and no longer do."
            return DisagreementError(what, rank=0, subject="state", update=update)
        name = found.names[0]
        return DisagreementError(
            f"Rank {found.rank} holds other bits in {name} than rank 0 after {update} updates. Something "
            "beside the updates wrote to it on one rank, or the rank's memory is faulty. Load a saved state.",
            rank=found.rank,
            subject=name,
            update=update,
        )

    def _pieces(self, update: int) -> list[tuple[str, torch.Tensor]]:
        """Cut the part of an update out of all tensors, laid end to end."""
        cycle, turn = divmod(update, self._every)
        if cycle != self._cycle:
            self._cycle = cycle
            self._now = [(name, _flat(tensor)) for name, tensor in self._tensors().items()]
        total = sum(tensor.numel() for _, tensor in self._now)
        after = min(turn + STRIDE, self._every)
        return _between(self._now, total * turn // self._every, total * after // self._every)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Look at a tensor as one row of elements, where they lie without gaps."""
    detached = tensor.detach()
    return detached.view(-1) if detached.is_contiguous() else detached


def _between(tensors: Sequence[tuple[str, torch.Tensor]], start: int, stop: int) -> list[tuple[str, torch.Tensor]]:
    """Give what lies between two elements of tensors laid end to end; a tensor with gaps only as a whole."""
    pieces = []
    offset = 0
    for name, tensor in tensors:
        first, last = max(start - offset, 0), min(stop - offset, tensor.numel())
        if tensor.dim() == 1 and first < last:
            pieces.append((name, tensor[first:last]))
        elif tensor.dim() != 1 and start <= offset < stop:
            pieces.append((name, tensor))
        offset += tensor.numel()
    return pieces
