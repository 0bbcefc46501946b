"""Whether a gradient is finite: known, or on the device until somebody looks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lockstep.precision import first_flagged, first_nonfinite, nonfinite_flags
from lockstep.tree import Tensors


class Verdict:
    """What the check of a gradient said.

    Args:
        nonfinite: The name of the first parameter whose gradient is not finite; None if all are.

    >>> unread = Verdict.unread(["weight", "bias"], torch.tensor([0.0, 1.0]))
    >>> unread.flag, unread.nonfinite, unread.flag
    (tensor(1.), 'bias', None)
    """

    def __init__(self, nonfinite: str | None = None) -> None:
        self._nonfinite = nonfinite
        self._names: Sequence[str] = ()
        self._flags: torch.Tensor | None = None

    @classmethod
    def unread(cls, names: Sequence[str], flags: torch.Tensor) -> Verdict:
        """Make a verdict of flags on a device.

        Args:
            names: Of the parameters that have a gradient.
            flags: One float32 for each name, 1 where the gradient is not finite, else 0.
        """
        verdict = cls()
        verdict._names, verdict._flags = names, flags
        return verdict

    @property
    def flag(self) -> torch.Tensor | None:
        """1 if the gradient is not finite, else 0: 0-d, on its device; None where the host knows already."""
        return None if self._flags is None else self._flags.amax()

    @property
    def nonfinite(self) -> str | None:
        """The first parameter whose gradient is not finite, or None; waits for the device if it must."""
        if self._flags is not None:
            self._nonfinite = first_flagged(self._names, self._flags)
            self._flags = None
        return self._nonfinite


def judge(names: Iterable[str], gradients: Tensors, finite: Sequence[bool | None]) -> Verdict:
    """Name the parameter that is not finite, if one is not; where nobody looked, read nothing.

    Args:
        names: Of the parameters, in the order of the gradients.
        gradients: None where there is none.
        finite: What was told of each slice of the gradients; None where nobody looked.

    >>> judge(["weight", "bias"], [None, torch.tensor([torch.inf])], [True, False]).nonfinite
    'bias'
    """
    unread = finite[0] is None
    if not unread and all(finite):
        return Verdict()
    named = zip(names, gradients, strict=True)
    present = {name: gradient for name, gradient in named if gradient is not None}
    if unread and present:
        return Verdict.unread(list(present), nonfinite_flags(list(present.values())))
    return Verdict(first_nonfinite(present))
