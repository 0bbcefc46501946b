"""Compare over ranks what must be alike, and name what is not.

What is compared travels as a digest first. Only where digests differ, the ranks tell each other more, and
every rank raises the same error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch

from lockstep.communicators.communicator import Communicator
from lockstep.digest import fingerprint
from lockstep.errors import DisagreementError

NONE: Final = "nothing"
"""What an error calls the value of a field that a rank lacks."""

FEW: Final = 3
"""How many differing fields an error lists."""

STRIDE: Final = 4
"""Updates from one part of a state to the next: a long part now and then costs less than a short one each."""

Named = Mapping[str, torch.Tensor]


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
    text = json.dumps(dict(fields)).encode()
    if len(set(communicator.exchange(hashlib.sha256(text).digest()))) == 1:
        return
    said = [json.loads(each) for each in communicator.exchange(text)]
    for rank, theirs in enumerate(said):
        names = [name for name in {**said[0], **theirs} if said[0].get(name) != theirs.get(name)]
        if names:
            parts = [
                f"{name} is {theirs.get(name, NONE)}, not {said[0].get(name, NONE)}" for name in names[:FEW]
            ]
            more = f"; and {len(names) - FEW} more differ" if len(names) > FEW else ""
            raise DisagreementError(
                f"Rank {rank} must have rank 0's {what}, but on it {'; '.join(parts)}{more}. {remedy}",
                rank=rank,
                subject=names[0],
            )


class StateWatch:
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
        said = [json.loads(each) for each in communicator.exchange(json.dumps(digests).encode())]
        for rank, theirs in enumerate(said):
            for name in {**said[0], **theirs}:
                if theirs.get(name) != said[0].get(name):
                    return DisagreementError(
                        f"Rank {rank} holds other bits in {name} than rank 0 after {update} updates. "
                        "Something beside the updates wrote to it on one rank, or the rank's memory is "
                        "faulty. Load a saved state.",
                        rank=rank,
                        subject=name,
                        update=update,
                    )
        return DisagreementError(
            f"The ranks held different states after {update} updates, and no longer do.",
            rank=0,
            subject="state",
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


def _between(
    tensors: Sequence[tuple[str, torch.Tensor]], start: int, stop: int
) -> list[tuple[str, torch.Tensor]]:
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
