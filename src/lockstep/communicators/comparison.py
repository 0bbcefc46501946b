"""Compare values over ranks, and name the first rank and the first value that differ.

Ranks exchange a digest of their values first. They exchange the values themselves only if the digests differ, and
then every rank raises the same error.
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

MISSING_VALUE: Final = "nothing"
"""The value that an error shows for a field that a rank does not have."""

LISTED_FIELDS: Final = 3
"""The number of differing fields that an error lists."""

UPDATES_PER_PART: Final = 4
"""The number of updates from one part of a state to the next. Rare long parts cost less than frequent short ones."""

NamedTensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """How the first rank that differs from rank 0 differs from it.

    Attributes:
        rank: The first rank that differs.
        values: The values of that rank by name.
        rank_0_values: The values of rank 0 by name.
        names: The names whose values differ, in the order of rank 0, followed by those that only `rank` has.
    """

    rank: int
    values: Mapping[str, Any]
    rank_0_values: Mapping[str, Any]
    names: tuple[str, ...]

    def error(self, *, what: str, remedy: str, update: int | None = None) -> DisagreementError:
        """Return an error that lists the first names with the values of both ranks.

        Args:
            what: What the values describe, as in "recipe".
            remedy: A sentence that tells the user what to do about it.
            update: The number of updates that are done, if the values depend on it.
        """
        listed = [
            f"{name} is {self.values.get(name, MISSING_VALUE)}, not {self.rank_0_values.get(name, MISSING_VALUE)}"
            for name in self.names[:LISTED_FIELDS]
        ]
        more = f"; and {len(self.names) - LISTED_FIELDS} more differ" if len(self.names) > LISTED_FIELDS else ""
        message = f"Rank {self.rank} must have rank 0's {what}, but on it {'; '.join(listed)}{more}. {remedy}"
        return DisagreementError(message, rank=self.rank, subject=self.names[0], update=update)


def first_difference(values: Sequence[Mapping[str, Any]]) -> Difference | None:
    """Compare the values of all ranks with those of rank 0.

    Args:
        values: The values of each rank by name, in order of ranks.

    Returns:
        How the first rank that differs does so; None if the values of all ranks are equal.

    >>> first_difference([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b": 3, "c": 4}]).names
    ('a', 'b', 'c')
    """
    # A missing name needs a separate marker, because None may be a value.
    first, missing = values[0], object()
    for rank, here in enumerate(values):
        if here == first:
            continue
        # Dictionaries keep their order, unlike sets, so all ranks name the same value first.
        names = [name for name in {**first, **here} if first.get(name, missing) != here.get(name, missing)]
        if names:
            return Difference(rank, here, first, tuple(names))
    return None


def compare(communicator: Communicator, values: Mapping[str, Any]) -> Difference | None:
    """Compare values by name over ranks. Every rank must call this.

    Args:
        communicator: The communicator that connects the ranks.
        values: The values of this rank, which must be JSON values. Their order does not count.

    Returns:
        How the first rank that differs from rank 0 does so, the same on every rank; None if all values are equal.
    """
    found = gather(communicator, values)
    return None if found is None else first_difference(found)


def gather(communicator: Communicator, values: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the values of all ranks in the order of ranks; None if they are equal. Every rank must call this.

    Args:
        communicator: The communicator that connects the ranks.
        values: The values of this rank, which must be JSON values. Their order does not count.
    """
    sorted_text = json.dumps(values, sort_keys=True).encode()
    # All ranks see the same digests, so all of them make the second exchange or none does.
    if len(set(communicator.exchange(hashlib.sha256(sorted_text).digest()))) == 1:
        return None
    # The values are not sorted here, so that an error lists the names in the order of rank 0.
    return communicator.exchange_json(values)


def check_fields(communicator: Communicator, fields: Mapping[str, str], *, what: str, remedy: str) -> None:
    """Check that the fields of all ranks are equal.

    Args:
        communicator: The communicator that connects the ranks.
        fields: The fields of this rank as text, by name.
        what: What the fields describe, as the error names it.
        remedy: A sentence that tells the user what to do if the fields differ.

    Raises:
        DisagreementError: On every rank, if the fields differ. It lists the first fields in which the first
            differing rank differs from rank 0, and its `subject` is the first of these.
    """
    found = compare(communicator, fields)
    if found is not None:
        raise found.error(what=what, remedy=remedy)


def check_same(communicator: Communicator, subject: nn.Module | NamedTensors | Sequence[torch.Tensor]) -> None:
    """Check that all ranks hold the same bits; see `Communicator.check_same`."""
    tensors = _named_tensors(subject)
    # Dtype and shape are compared as text beside the digest, so that the error can name them.
    found = compare(
        communicator, {name: [f"{each.dtype} {tuple(each.shape)}", digest(each)] for name, each in tensors.items()}
    )
    if found is None:
        return
    rank, name = found.rank, found.names[0]
    here, first = found.values.get(name), found.rank_0_values.get(name)
    if len(found.values) != len(found.rank_0_values):
        # This is reported first, because it explains why names are missing.
        name = "number of tensors"
        what = f"Rank {rank} holds {len(found.values)} tensors, but rank 0 holds {len(found.rank_0_values)}"
    elif here is None or first is None:
        what = f"Rank {rank} holds no {name!r}, but rank 0 does"
    elif here[0] != first[0]:
        what = f"On rank {rank} {name!r} is {here[0]}, but on rank 0 {first[0]}"
    else:
        what = f"Rank {rank} holds other bits in {name!r} than rank 0"
    remedy = "Build the model from the same seed and code on every rank."
    raise DisagreementError(f"{what}. {remedy}", rank=rank, subject=name)


def _named_tensors(subject: nn.Module | NamedTensors | Sequence[torch.Tensor]) -> NamedTensors:
    """Return tensors by name: the parameters and buffers of a module, or the given tensors."""
    if isinstance(subject, nn.Module):
        return {**dict(subject.named_parameters()), **dict(subject.named_buffers())}
    if isinstance(subject, Mapping):
        return subject
    return {f"tensor {index}": tensor for index, tensor in enumerate(subject)}


class StateComparer:
    """Compares the tensors of a state over ranks, one part every few updates.

    The digest of a part has 128 bits and is sent in a message that the ranks exchange anyway.

    Args:
        tensors: A function that returns the tensors by name, with the same names on every rank.
        every: The number of updates within which every element is compared, at least 1.
    """

    def __init__(self, tensors: Callable[[], NamedTensors], every: int) -> None:
        self._tensors = tensors
        self._every = every
        self._flat_tensors: list[tuple[str, torch.Tensor]] = []
        self._cycle = -1

    def forget(self) -> None:
        """Read the list of tensors again at the next update, because tensors may have been replaced."""
        self._cycle = -1

    def digest_at(self, update: int) -> str:
        """Return the digest of the part of the state that is compared at an update, as text.

        Args:
            update: The number of updates that are done.

        Returns:
            The digest; empty if no part is compared at this update.
        """
        if update % self._every % UPDATES_PER_PART:
            return ""
        return fingerprint([piece for _, piece in self._pieces(update)]).hex()

    def explain(self, communicator: Communicator, update: int) -> DisagreementError:
        """Find the rank and the tensor in which a part differs. Every rank must call this once digests differed.

        Args:
            communicator: The communicator that connects the ranks.
            update: The number of updates that are done.

        Returns:
            The error to raise.
        """
        digests = {name: fingerprint([piece]).hex() for name, piece in self._pieces(update)}
        found = compare(communicator, digests)
        if found is None:
            what = f"The ranks held different states after {update} updates, and no longer do."
            return DisagreementError(what, rank=0, subject="state", update=update)
        name = found.names[0]
        return DisagreementError(
            f"Rank {found.rank} holds other bits in {name} than rank 0 after {update} updates. Other code than the "
            "updates has written to it on one rank, or the memory of the rank is faulty. Load a saved state.",
            rank=found.rank,
            subject=name,
            update=update,
        )

    def _pieces(self, update: int) -> list[tuple[str, torch.Tensor]]:
        """Return the part of an update, cut out of all tensors in order."""
        cycle, turn = divmod(update, self._every)
        if cycle != self._cycle:
            # These are views of the tensors, and updates work in place, so the list stays valid for all parts of a
            # cycle.
            self._cycle = cycle
            self._flat_tensors = [(name, _flat(tensor)) for name, tensor in self._tensors().items()]
        total = sum(tensor.numel() for _, tensor in self._flat_tensors)
        # Integer arithmetic cuts at the same elements on all ranks.
        stop = min(turn + UPDATES_PER_PART, self._every)
        return _between(self._flat_tensors, total * turn // self._every, total * stop // self._every)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a one-dimensional view of a contiguous tensor, and any other tensor as it is."""
    detached = tensor.detach()
    return detached.view(-1) if detached.is_contiguous() else detached


def _between(tensors: Sequence[tuple[str, torch.Tensor]], start: int, stop: int) -> list[tuple[str, torch.Tensor]]:
    """Return the elements from `start` to `stop` of tensors that are concatenated, with the names of the tensors."""
    pieces = []
    offset = 0
    for name, tensor in tensors:
        first, last = max(start - offset, 0), min(stop - offset, tensor.numel())
        if tensor.dim() == 1 and first < last:
            pieces.append((name, tensor[first:last]))
        elif tensor.dim() != 1 and start <= offset < stop:
            # A tensor with gaps has no flat view to cut, so all of it belongs to the part in which it begins.
            pieces.append((name, tensor))
        offset += tensor.numel()
    return pieces
